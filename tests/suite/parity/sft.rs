//! Rows of chats and of prompts with completions: their tokens, which of them are scored, and the loss, against
//! transformers.

use std::path::Path;
use std::sync::Arc;

use firebrick_engine::checkpoint::PolicySource;
use firebrick_engine::config::{ModelConfig, SftConfig};
use firebrick_engine::data::{PromptDataset, RowsAlone, SftDataset};
use firebrick_engine::executor::Runtime;
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::MemoryConfig;
use firebrick_engine::sequence::Sequence;
use serde::Deserialize;
use serde_json::Value;

use crate::support::{assert_close, checked, device, fixtures, is_foreign, parse, read, report};

/// Losses, absolute.
const LOSS: f64 = 1e-4;

#[derive(Deserialize)]
struct Case {
    name: String,
    model: String,
    chat_template: Option<String>,
    rows: Vec<Value>,
    tokens: Vec<Vec<u32>>,
    scored: Vec<Vec<u8>>,
    loss: f64,
}

fn cases() -> Vec<Case> {
    let path = fixtures().join("sft/rows.json");
    if is_foreign() && !path.is_file() {
        report("no sft/rows.json in FIREBRICK_FIXTURES: none checked");
        return Vec::new();
    }
    let golden: Value = read(&path);
    assert_eq!(golden["format"], "sft-rows/1");
    parse("cases", &golden["cases"])
}

/// The case's model with the case's template, its rows in a file, and what the program makes of them.
struct Bench {
    source: PolicySource,
    data: PromptDataset,
    examples: SftDataset,
}

impl Bench {
    fn new(case: &Case, dir: &Path, config: SftConfig) -> Self {
        let (model, rows) = (dir.join("model"), dir.join("rows.jsonl"));
        copy(&fixtures().join("models").join(&case.model), &model);
        if let Some(template) = &case.chat_template {
            std::fs::write(model.join("chat_template.jinja"), template).unwrap();
        }
        let lines: Vec<String> = case.rows.iter().map(Value::to_string).collect();
        std::fs::write(&rows, lines.join("\n")).unwrap();
        let model = ModelConfig { path: Some(model), ..ModelConfig::default() };
        let source = PolicySource::open(&model, &RowsAlone).unwrap();
        let data = PromptDataset::held_out(Arc::new(RowsAlone), source.tokenizer.clone(), 8, None);
        let data = data.unwrap();
        let config = SftConfig { train: Some(rows), ..config };
        let examples =
            SftDataset::new(&config, "sft", &source, &data).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        Self { source, data, examples }
    }

    fn step(&self, step: u64) -> Vec<Sequence> {
        let drawn = self.examples.step(step, 3, &self.source, &self.data);
        drawn.expect("a step").0
    }

    /// Loss and gradient norm of one optimizer step.
    fn loss(&self, sequences: &[Sequence], memory: &MemoryConfig) -> (f64, f64) {
        let decoder = self.source.checkpoint.load(&device()).unwrap();
        let plan = memory.plan(decoder.arch()).unwrap();
        let runtime = Runtime::new(&device());
        let mut learner = Learner::new(decoder, plan, OptimConfig::default(), runtime);
        let updated = learner.update(sequences, 1.0, &Nll, 1e-6).unwrap();
        let values: Vec<(&str, f64)> = updated.sums.values().collect();
        let loss = values.iter().find(|(name, _)| *name == "train/loss");
        (loss.expect("a loss").1, updated.outcome.grad_norm)
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in from.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}

/// The whole file as one step.
fn whole(case: &Case) -> SftConfig {
    SftConfig { batch_size: case.rows.len(), epochs: Some(1), ..SftConfig::default() }
}

fn scored(sequence: &Sequence) -> Vec<u8> {
    let mut scored = vec![0; sequence.tokens.len()];
    for &position in &sequence.positions {
        scored[position + 1] = 1;
    }
    scored
}

#[test]
fn rows_have_transformers_tokens_and_masks() {
    let mut rows = 0;
    for case in cases() {
        let dir = tempfile::tempdir().unwrap();
        let mut found: Vec<(Vec<u32>, Vec<u8>)> = Bench::new(&case, dir.path(), whole(&case))
            .step(0)
            .into_iter()
            .map(|s| (s.tokens.clone(), scored(&s)))
            .collect();
        let mut expected: Vec<(Vec<u32>, Vec<u8>)> = case.tokens.iter().cloned().zip(case.scored.clone()).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{}", case.name);
        rows += expected.len();
    }
    if !is_foreign() || rows > 0 {
        checked("rows of supervised training", rows);
    }
}

#[test]
fn the_loss_of_rows_is_transformers_however_they_are_packed() {
    let mut losses = 0;
    for case in cases() {
        let dir = tempfile::tempdir().unwrap();
        let bench = Bench::new(&case, dir.path(), whole(&case));
        let sequences = bench.step(0);
        let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap();
        let cut =
            |train_tokens, micro_batch_size| MemoryConfig { train_tokens, micro_batch_size, ..MemoryConfig::default() };
        let (plain, norm) = bench.loss(&sequences, &cut(16_384, Some(1)));
        assert_close(&case.name, plain, case.loss, LOSS);
        for memory in [cut(16_384, None), cut(longest, None), cut(2 * longest, Some(3))] {
            let (packed, own) = bench.loss(&sequences, &memory);
            assert_close(&format!("{}: packed", case.name), packed, plain, 1e-5);
            assert_close(&format!("{}: its gradient", case.name), own, norm, 1e-4);
            losses += 1;
        }
    }
    if !is_foreign() || losses > 0 {
        checked("losses of packed rows", losses);
    }
}

#[test]
fn an_epoch_visits_every_row_once_and_the_next_one_in_another_order() {
    let Some(case) = cases().into_iter().next() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let config = SftConfig { batch_size: 3, epochs: Some(2), ..SftConfig::default() };
    let n = case.rows.len();
    let each = n.div_ceil(3) as u64;
    let bench = Bench::new(&case, dir.path(), config);
    assert_eq!(bench.examples.steps, 2 * each);
    let epoch = |e: u64| -> Vec<Vec<u32>> {
        let steps = e * each..(e + 1) * each;
        let drawn = steps.flat_map(|step| bench.step(step));
        drawn.map(|s| s.tokens).collect()
    };
    assert_ne!(epoch(0), epoch(1));
    for e in 0..2 {
        let (mut found, mut expected) = (epoch(e), case.tokens.clone());
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }
}

#[test]
fn templates_whose_turns_cannot_be_told_are_refused_with_the_reason() {
    let Some(mut case) = cases().into_iter().find(|c| c.rows.len() > 1 && c.rows[1]["messages"].is_array()) else {
        return;
    };
    // earlier turns of the assistant lose their words once later ones follow
    case.chat_template = Some(
        "{% for m in messages %}[{{ m.role }}]{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}\
         {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
            .to_owned(),
    );
    let dir = tempfile::tempdir().unwrap();
    let refused = std::panic::catch_unwind(|| Bench::new(&case, dir.path(), whole(&case)));
    let panic = refused.map(|_| ()).expect_err("refused");
    let message = panic.downcast_ref::<String>().expect("a message");
    for part in ["line 2", "turn 1", "rendered differently", "{% generation %}"] {
        assert!(message.contains(part), "{message}");
    }
}
