//! The run folder of several ranks: rank 0 locks, compares and writes it, and all come to the same end.

use super::{StopAfter, config, run, same_on_all, world};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::trainer::{Start, Trainer};
use std::path::Path;

/// The messages of all ranks of a run that is refused, which the user can fix on each.
fn refusals(config: &RunConfig, start: Start) -> Vec<String> {
    refusals_of(3, config, start)
}

/// The same of so many ranks.
fn refusals_of(size: usize, config: &RunConfig, start: Start) -> Vec<String> {
    let ended = Threads::run(size, Settings::default(), |rank| {
        let error = run(config.clone(), start, rank).unwrap_err();
        assert!(error.is_user_error(), "{error}");
        error.to_string()
    });
    ended.into_iter().map(|rank| rank.unwrap()).collect()
}

fn all_say(messages: &[String], parts: &[&str]) {
    for message in messages {
        assert_eq!(*message, messages[0], "the same on every rank");
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }
}

/// A task of rows in a folder.
fn rows(folder: &Path, overrides: &[&str]) -> RunConfig {
    let line = |i: i32| format!("{{\"q\": \"{i}+1=\", \"a\": \"{}\"}}\n", i + 1);
    let lines = (0..8).map(line).collect::<Vec<_>>().concat();
    let file = folder.join("rows.jsonl");
    if !file.exists() {
        std::fs::write(&file, lines).unwrap();
    }
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/qwen2-tied");
    let text = format!(
        "model: {{path: {}}}\ntask: {{kind: dataset, train: {}, prompt: '{{q}}', answer_field: a, rewards: [{{kind: number}}]}}\n\
         output: {}\ndevice: cpu\nrollout: {{n: 2, prompt_length: 16, response_length: 4}}\n\
         trainer: {{steps: 1, train_batch_size: 4, save_freq: 1}}\n",
        model.display(),
        file.display(),
        folder.join("run").display()
    );
    let overrides: Vec<String> = overrides.iter().map(|own| (*own).to_owned()).collect();
    parse(&text, &overrides).unwrap()
}

#[test]
fn a_folder_that_another_process_writes_is_refused_on_every_rank_with_the_same_message() {
    let folders = tempfile::tempdir().unwrap();
    let config = config(&folders.path().join("run"), &["trainer.steps=1"]);
    world(2, &config, Start::Fresh);
    all_say(&refusals(&config, Start::Fresh), &["already contains a run"]);
    let mut more = config.clone();
    more.trainer.steps = 2;
    let writer = Trainer::builder(more.clone()).start(Start::Resume).build().unwrap();
    let process = format!("process {} on ", std::process::id());
    all_say(&refusals(&more, Start::Resume), &[&process, "wait until it has ended"]);
    drop(writer);
    let ranks = world(2, &more, Start::Resume);
    same_on_all(&ranks);
    assert_eq!(ranks[1].steps, 2);
}

#[test]
fn inputs_and_settings_that_have_changed_are_refused_on_every_rank_with_the_same_message() {
    let folders = tempfile::tempdir().unwrap();
    let first = rows(folders.path(), &[]);
    world(2, &first, Start::Fresh);
    let more = rows(folders.path(), &["trainer.steps=2"]);
    let file = folders.path().join("rows.jsonl");
    let before = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, before.replace("7+1=", "6+1=")).unwrap();
    all_say(&refusals(&more, Start::Resume), &["cannot resume", "task.train (rows.jsonl has other contents)"]);
    std::fs::write(&file, before).unwrap();
    let other = rows(folders.path(), &["trainer.steps=2", "optim.lr=0.5"]);
    all_say(&refusals(&other, Start::Resume), &["cannot resume", "optim.lr (0.5, it was "]);
    let ranks = world(2, &more, Start::Resume);
    same_on_all(&ranks);
    assert_eq!(ranks[0].steps, 2);
}

#[test]
fn ranks_continue_together_from_the_checkpoint_before_a_damaged_one() {
    let folders = tempfile::tempdir().unwrap();
    let overrides = ["trainer.save_freq=1", "memory.zero_stage=2"];
    let whole = world(2, &config(&folders.path().join("whole"), &overrides), Start::Fresh);
    for file in ["model/model.safetensors", "trainer/optimizer-00002-of-00002.safetensors", "checksums.json"] {
        let cut = config(&folders.path().join(file.replace('/', " ")), &overrides);
        let stopped = Threads::run(2, Settings::default(), |rank| {
            Trainer::builder(cut.clone()).observer(StopAfter(2)).world(rank).build().unwrap().run().unwrap().steps
        });
        assert!(stopped.iter().all(|steps| *steps == Ok(2)));
        let damaged = cut.output.join("checkpoints/step-000002");
        let mut bytes = std::fs::read(damaged.join(file)).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(damaged.join(file), bytes).unwrap();
        let resumed = world(2, &cut, Start::Resume);
        same_on_all(&resumed);
        assert!(resumed[0].weights == whole[0].weights, "{file}");
        assert!(damaged.with_extension("damaged").is_dir() && damaged.is_dir(), "{file}");
        // without another checkpoint, all end with the same message
        for step in 1..=4 {
            let step = cut.output.join(format!("checkpoints/step-{step:06}"));
            if step.is_dir() {
                std::fs::write(step.join(file), "").unwrap();
            }
        }
        let mut more = cut.clone();
        more.trainer.steps = 9;
        all_say(&refusals_of(2, &more, Start::Resume), &["all of its checkpoints are damaged", file]);
    }
}
