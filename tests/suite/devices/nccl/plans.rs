//! Bytes of a card that a plan predicts of ranks over NCCL, beside those that its pools count.

use super::{config, settings};
use crate::support::{checked, report};
use firebrick_backends::accounts::Category;
use firebrick_backends::collective::Threads;
use firebrick_engine::metrics::Phase;
use firebrick_engine::trainer::Trainer;
use serde_json::Value;

/// Most bytes of a card in an update: those that are predicted of rank 0, and those that its pools count.
fn update(settings_of_plan: &[&str]) -> [u64; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let overrides = [
        "model.arch.hidden_size=128",
        "model.arch.intermediate_size=1024",
        "model.arch.head_dim=64",
        "memory.gradient_checkpointing=true",
        "memory.snapshot=2",
        // ranks that are threads of one process spoil each other's captures
        "rollout.enforce_eager=true",
        "rollout.n=2",
        "trainer.train_batch_size=2",
        "trainer.test_freq=0",
        "trainer.val_max_samples=2",
        "trainer.save_freq=-1",
    ];
    let config = config(folder.path(), &[&overrides, settings_of_plan].concat());
    let ranks = Threads::run(2, settings(), |rank| {
        let mut config = config.clone();
        config.device = format!("cuda:{}", rank.rank()).parse().expect("a name");
        let built = Trainer::builder(config).world(rank).build();
        let ran = built.and_then(|mut trainer| trainer.run());
        ran.unwrap_or_else(|error| panic!("{settings_of_plan:?}: {error}"));
    });
    for rank in ranks {
        rank.unwrap_or_else(|panic| panic!("{panic}"));
    }
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a file");
    let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    let lines = read("memory.jsonl");
    let lines = lines.lines().map(json);
    let updates = lines.filter(|line| line["phase"] == Phase::UpdateActor.name());
    let counted = updates.map(|line| line["peak_bytes"].as_u64().expect("a peak of the pools"));
    let timeline = json(&read("memory_timeline.json"));
    let phases = timeline["plans"][0]["phases"].as_array().expect("phases");
    let update_traffic = phases.iter().filter(|phase| {
        let name = phase["name"].as_str();
        name.is_some_and(|name| ["backward", "optimizer"].contains(&name))
    });
    let predicted = update_traffic.map(|phase| {
        let categories = phase["categories"].as_object().expect("categories");
        // what the pools round up is not in use
        let own = categories.iter().filter(|(name, _)| *name != Category::Overhead.name());
        own.map(|(_, bytes)| bytes.as_u64().expect("bytes")).sum()
    });
    [predicted.max().expect("phases of an update"), counted.max().expect("an update")]
}

pub(super) fn plans_count_what_nccl_needs_on_a_card(_: &str) {
    let plans: [&[&str]; 4] = [
        &[],
        &["memory.zero_stage=2"],
        &["memory.zero_stage=3"],
        &["memory.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"],
    ];
    for plan in plans {
        let [predicted, counted] = update(plan);
        let off = predicted as f64 / counted as f64 - 1.0;
        report(&format!("{plan:?}: {predicted} predicted, {counted} counted, {off:+.3}"));
        assert!(off.abs() < 0.05, "{plan:?}: {predicted} predicted, {counted} counted");
    }
    checked("peaks of ranks over NCCL", plans.len());
}
