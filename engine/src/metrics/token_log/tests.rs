use super::*;
use crate::metrics::{Recorder, RolloutStats};
use crate::sequence::TokenColumns;
use firebrick_sampler::FinishReason;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

fn characters() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::characters("0123456789+=").unwrap())
}

/// A tokenizer of bytes, as most models have it: a character of several bytes is several tokens.
fn bytes(folder: &Path) -> Tokenizer {
    // the alphabet of byte-level BPE for the bytes of "é", "😀" and "a"
    let alphabet = ["Ã", "©", "ð", "Ł", "ĺ", "Ģ", "a"];
    let vocab: Map<String, Value> =
        alphabet.iter().enumerate().map(|(id, piece)| ((*piece).to_owned(), id.into())).collect();
    let file = serde_json::json!({
        "version": "1.0",
        "added_tokens": [{"id": 7, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::from_dir(folder).unwrap()
}

fn rollout(prompt_index: u64, sample: usize, reward: f64, tokens: usize) -> Rollout {
    let logp = vec![-0.5; tokens];
    Rollout {
        prompt_index,
        sample,
        prompt: vec![2],
        prompt_text: None,
        completion: (0..tokens as u32).map(|at| 2 + at % 10).collect(),
        text: String::new(),
        columns: TokenColumns {
            sampler_logp: Some(logp.clone()),
            full_logp: Some(logp),
            old_logp: Some(vec![-0.25; tokens]),
            advantage: Some(vec![f64::NAN; tokens]),
            ..TokenColumns::default()
        },
        inserted: Vec::new(),
        turns: Vec::new(),
        finish: FinishReason::Stop,
        routes: None,
        rerouted: None,
        policy_version: 0,
        reward: Some(reward),
        reward_parts: Vec::new(),
        reward_weights: Vec::new(),
        reward_extra: Map::new(),
        reward_error: None,
        readings: Vec::new(),
        baseline: None,
        mask: (0..tokens).map(|at| at % 2 == 0).collect(),
        penalized_reward: reward,
    }
}

/// Two groups of two, of which the second alone has a spread.
fn report(tokens: usize) -> RolloutReport {
    let of = [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 1.0)];
    RolloutReport {
        prompts: Vec::new(),
        first_prompt: 0,
        rollouts: of.map(|(prompt, sample, reward)| rollout(prompt, sample, reward, tokens)).into(),
        left_out: Vec::new(),
        stats: RolloutStats::default(),
        advantages: Vec::new(),
        entropy_coeff: None,
        reward_stats: BTreeMap::new(),
    }
}

struct Runs(tempfile::TempDir);

impl Runs {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn folder(&self, name: &str) -> RunDir {
        RunDir::create(&self.0.path().join(name), "output: x\n").unwrap()
    }
}

fn text(run: &RunDir) -> String {
    std::fs::read_to_string(run.path().join(TokenLog::FILE)).unwrap()
}

fn records(run: &RunDir) -> Vec<TokenRecord> {
    let text = text(run);
    let lines = text.lines().skip(1);
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn settings(groups: usize, max_bytes: u64) -> TokenSettings {
    TokenSettings { groups, max_bytes }
}

fn log(run: &RunDir, settings: TokenSettings) -> TokenLog {
    TokenLog::open(run, settings, characters()).unwrap()
}

#[test]
fn a_record_has_an_entry_a_token_in_every_list() {
    let runs = Runs::new();
    let run = runs.folder("run");
    log(&run, TokenSettings::new(1)).step(&run, 1, &report(3)).unwrap();
    let records = records(&run);
    // the group with a spread stands before the one without
    assert_eq!(records.len(), 2);
    let first = &records[0];
    assert_eq!((first.draw, first.sample, first.tokens), (1, 0, 3));
    assert_eq!(first.pieces, ["0", "1", "2"]);
    assert_eq!(first.sampler_logp, [Some(-0.5); 3]);
    assert_eq!(first.trainer_logp, Some(vec![Some(-0.25); 3]));
    let apart = (-0.25_f64).exp() - (-0.5_f64).exp();
    assert_eq!(first.mismatch, Some(vec![Some(apart as f32); 3]));
    assert_eq!(first.advantage, [None; 3]);
    assert_eq!(first.mask, [1, 0, 1]);
}

#[test]
fn a_sampler_whose_log_probs_are_the_old_ones_leaves_no_mismatch() {
    let runs = Runs::new();
    let run = runs.folder("run");
    let mut report = report(3);
    for rollout in &mut report.rollouts {
        rollout.columns.old_logp = None;
    }
    log(&run, TokenSettings::new(2)).step(&run, 1, &report).unwrap();
    assert!(!text(&run).contains("mismatch") && !text(&run).contains("trainer_logp"));
    assert_eq!(records(&run).len(), 4);
}

#[test]
fn a_character_of_several_tokens_belongs_to_the_last_and_special_tokens_have_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = bytes(folder.path());
    let ids = [6, 0, 1, 2, 3, 4, 5, 6, 7];
    let whole = tokenizer.decode(&ids, false).unwrap();
    assert_eq!(whole, "aé😀a<|end|>");
    let decoded = pieces(&ids, &tokenizer).unwrap();
    let wanted = ["a", "", "é", "", "", "", "😀", "a", "<|end|>"];
    assert_eq!(decoded, wanted);
    // bytes that never become a character are shown as what they are read as
    let broken = pieces(&[0, 6, 0, 0], &tokenizer).unwrap();
    let read = tokenizer.decode(&[0, 6, 0, 0], false).unwrap();
    assert_eq!((broken.len(), broken.concat()), (4, read));
}

#[test]
fn the_file_stays_within_its_size_and_keeps_steps_evenly_from_the_first_on() {
    let runs = Runs::new();
    let run = runs.folder("run");
    let mut log = log(&run, settings(2, 20_000));
    for step in 1..=200 {
        log.step(&run, step, &report(4)).unwrap();
        assert!(text(&run).len() <= 20_000, "step {step}");
    }
    let mut steps: Vec<u64> = records(&run).iter().map(|record| record.step).collect();
    steps.dedup();
    let every = steps[1] - 1;
    assert!(every.is_power_of_two() && every > 1, "{every}");
    let wanted: Vec<u64> = (1..=200).step_by(every as usize).collect();
    assert_eq!(steps, wanted);
    assert!(text(&run).len() > 20_000 / 3, "room is used");
    let header: Value = serde_json::from_str(text(&run).lines().next().unwrap()).unwrap();
    assert_eq!(header["every"], every);
    assert_eq!(header["max_bytes"], 20_000);
}

#[test]
fn a_step_of_long_completions_keeps_the_first_tokens_of_each() {
    let runs = Runs::new();
    let run = runs.folder("run");
    let mut log = log(&run, settings(2, 80_000));
    log.step(&run, 1, &report(5000)).unwrap();
    let records = records(&run);
    assert!(text(&run).len() <= 80_000 / 8 + HEADER_BYTES as usize);
    for record in &records {
        let kept = record.pieces.len();
        assert_eq!(record.tokens, 5000);
        assert!((16..200).contains(&kept), "{kept}");
        assert_eq!((record.mask.len(), record.sampler_logp.len()), (kept, kept));
    }
}

#[test]
fn a_run_that_was_rewound_and_goes_on_has_the_lines_of_one_that_never_stopped() {
    let runs = Runs::new();
    let (whole, broken) = (runs.folder("whole"), runs.folder("broken"));
    let small = settings(2, 6_000);
    let mut unbroken = log(&whole, small);
    for step in 1..=40 {
        unbroken.step(&whole, step, &report(4)).unwrap();
    }
    let mut first = log(&broken, small);
    for step in 1..=33 {
        first.step(&broken, step, &report(4)).unwrap();
    }
    // killed in the middle of a line; its newest checkpoint is of step 12
    broken.append_text(TokenLog::FILE, b"{\"step\":34,\"dr").unwrap();
    Recorder::rewind(&broken, Some(12)).unwrap();
    assert!(records(&broken).iter().all(|record| record.step <= 12));
    let mut rest = log(&broken, small);
    for step in 13..=40 {
        rest.step(&broken, step, &report(4)).unwrap();
    }
    assert_eq!(text(&broken), text(&whole));
    // a run that starts over has none of the old lines
    Recorder::rewind(&broken, None).unwrap();
    assert!(!broken.path().join(TokenLog::FILE).exists());
}
