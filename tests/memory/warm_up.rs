//! Predicted and counted bytes of a run whose warm-up has larger batches than its steps.

use crate::own_process::in_own_process;
use firebrick::engine::config::{RunConfig, parse};
use firebrick::engine::metrics::{PhaseMemory, Summary};
use firebrick::engine::plan::estimate::EstimatePhase;
use firebrick::engine::trainer::Trainer;
use firebrick::spec::Pool;
use std::path::Path;

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.15;

/// Rows of the warm-up: a step takes all of them.
const ROWS: usize = 24;

/// Characters of a prompt, and of its completion: a token each.
const CHARACTERS: usize = 30;

in_own_process!(the_warm_up_of_a_run_is_within_15_percent_of_its_prediction_and_keeps_a_budget,);

/// A run of one short step after a warm-up of two, in a folder.
fn config(folder: &Path, run: &str, overrides: &[String]) -> RunConfig {
    let rows: Vec<String> = (0..ROWS)
        .map(|row| {
            // no two rows begin alike for long, so that they share little
            let digit =
                |place: usize| char::from(b'0' + ((row * 7919 + place * place * 31 + row * place * 17) / 7 % 10) as u8);
            let prompt: String = (0..CHARACTERS).map(digit).collect();
            let completion: String = (CHARACTERS..2 * CHARACTERS).map(digit).collect();
            format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{completion}\"}}\n")
        })
        .collect();
    let file = folder.join("rows.jsonl");
    std::fs::write(&file, rows.concat()).expect("a file of rows");
    let text = format!(
        "
model:
  arch: {{model_type: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4,
         num_key_value_heads: 2, max_position_embeddings: 128}}
task: {{kind: arithmetic, difficulty: 1, validation_size: 4}}
output: {}
device: cpu
rollout: {{n: 2, prompt_length: 6, response_length: 3}}
warmup: {{sft: {{train: {}, steps: 2, batch_size: {ROWS}}}}}
trainer: {{steps: 1, train_batch_size: 2, test_freq: 0, save_freq: -1}}
",
        folder.join(run).display(),
        file.display()
    );
    parse(&text, overrides).expect("a configuration")
}

fn run(config: RunConfig) -> Summary {
    let mut trainer = Trainer::builder(config).build().expect("a run");
    trainer.run().expect("a summary")
}

fn memory(summary: &Summary, phase: &str) -> PhaseMemory {
    let all = &summary.memory;
    *all.iter().find(|own| own.phase == phase).expect(phase)
}

/// Whether a prediction is as close to what was counted as it has to be.
fn assert_close(predicted: u64, counted: u64, what: &str) {
    let allowed = (TOLERANCE * counted as f64) as u64 + Pool::HEAP.fixed_bytes;
    assert!(predicted.abs_diff(counted) <= allowed, "{what}: {predicted} predicted, {counted} counted");
}

fn the_warm_up_of_a_run_is_within_15_percent_of_its_prediction_and_keeps_a_budget() {
    let folder = tempfile::tempdir().expect("a folder");
    let dry = Trainer::builder(config(folder.path(), "dry", &[])).dry_run().expect("a plan");
    let ran = run(config(folder.path(), "run", &[]));
    let warm = memory(&ran, "warmup");
    assert_close(warm.predicted_bytes, warm.measured_bytes, "the warm-up");
    let predicted = dry.estimate.phase(EstimatePhase::WarmupBackward);
    let predicted = predicted.expect("a phase").total_bytes;
    assert_eq!(warm.predicted_bytes, predicted);
    // the case is one in which the steps say nothing of the warm-up
    let update = memory(&ran, "update");
    assert_close(update.predicted_bytes, update.measured_bytes, "the steps");
    assert!(2 * update.predicted_bytes < warm.measured_bytes);
    let peak = ran.predicted_peak_bytes.expect("a prediction");
    assert_eq!(peak, dry.estimate.peak_bytes);
    assert_close(peak, ran.measured_peak_bytes, "the run");
    // a budget that the steps would keep under the plan as configured
    let budget = warm.measured_bytes * 6 / 10;
    assert!(update.measured_bytes < budget);
    let overrides = [format!("memory.budget={budget}")];
    let kept = run(config(folder.path(), "budget", &overrides));
    assert!(kept.measured_peak_bytes <= budget, "{} counted of {budget}", kept.measured_peak_bytes);
    assert_eq!(kept.replans, 0);
}
