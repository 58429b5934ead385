//! Plans that several ranks make for a budget.

use super::{config, world};
use firebrick_engine::config::{Mode, RunConfig};
use firebrick_engine::plan::planner::Fit;
use firebrick_engine::planning;
use firebrick_engine::trainer::{Start, Trainer};
use firebrick_spec::{Backend, DeviceProfile};
use std::path::Path;

/// A model whose gradients are much of what a step takes, and an update that looks at no norm.
fn unclipped(folder: &Path, overrides: &[&str]) -> RunConfig {
    let own = [
        "model.arch={model_type: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 2, \
         max_position_embeddings: 32}",
        "optim={lr: 1e-3, clip_grad: null}",
        // little beside the gradients
        "rollout.kv_cache_memory_bytes=2097152",
        "trainer.steps=1",
        "trainer.test_freq=0",
        "trainer.save_freq=-1",
        "update.ppo_mini_batch_size=4",
    ];
    config(folder, &[&own[..], overrides].concat())
}

/// What one rank makes of the budget of a configuration.
fn alone(config: &RunConfig) -> Option<Fit> {
    let arch = firebrick_engine::checkpoint::architecture(config).unwrap();
    let profile = DeviceProfile::assumed(Backend::Cpu);
    let request = planning::request(config, Mode::Rl, &arch, profile, None).unwrap();
    request.fit().ok()
}

#[test]
fn ranks_that_share_nothing_out_keep_a_budget_without_updates_in_the_backward_pass() {
    let folders = tempfile::tempdir().unwrap();
    let dry = Trainer::builder(unclipped(&folders.path().join("dry"), &[])).dry_run().unwrap();
    let plain = dry.estimate.peak_bytes;
    // the first budget for which a rank alone would update segments on the way
    let mut budgets = (10..24).rev().map(|share| plain * share / 20);
    let chosen = budgets.find_map(|budget| {
        let budget = format!("memory.budget={budget}");
        let config = unclipped(&folders.path().join("run"), &[&budget]);
        let fit = alone(&config)?;
        fit.plan.policy().optimizer.in_backward.then_some(config)
    });
    let config = chosen.expect("a budget that wants updates in the backward pass");
    let ran = world(2, &config, Start::Fresh);
    assert_eq!(ran[0].steps, 1);
    let plan = std::fs::read_to_string(config.output.join("plan.json")).unwrap();
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    let optimizer = &plan["plan"]["models"]["policy"]["optimizer"];
    assert_eq!(optimizer["in_backward"], false, "{plan}");
    assert!(plan["peak_bytes"].as_u64().unwrap() <= plan["budget_bytes"].as_u64().unwrap());
}

#[test]
fn ranks_share_out_as_much_as_a_budget_asks_for() {
    let folders = tempfile::tempdir().unwrap();
    let plan_of = |name: &str, overrides: &[&str]| {
        let config = unclipped(&folders.path().join(name), overrides);
        let ran = world(2, &config, Start::Fresh);
        assert_eq!(ran[0].steps, 1);
        assert!(ran[0].metrics == ran[1].metrics);
        let plan = std::fs::read_to_string(config.output.join("plan.json")).unwrap();
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        let policy = &plan["plan"]["models"]["policy"];
        let bytes = plan["peak_bytes"].as_u64().unwrap();
        (policy["zero"].as_str().unwrap().to_owned(), bytes)
    };
    let dry = Trainer::builder(unclipped(&folders.path().join("dry"), &[])).dry_run().unwrap();
    let plain = dry.estimate.peak_bytes;
    // plenty of room: nothing is shared out
    let (stage, _) = plan_of("plenty", &[&format!("memory.budget={}", 4 * plain)]);
    assert_eq!(stage, "off");
    // less than one rank alone needs, whatever it does
    let budgets = (4..20).rev().map(|share| plain * share / 20);
    let tight = budgets
        .take_while(|budget| {
            let budget = format!("memory.budget={budget}");
            alone(&unclipped(&folders.path().join("none"), &[&budget])).is_some()
        })
        .last()
        .expect("a budget that one rank keeps");
    let budget = format!("memory.budget={}", tight - plain / 20);
    let (stage, bytes) = plan_of("tight", &[&budget]);
    assert!(["stage2", "stage3"].contains(&stage.as_str()), "{stage}");
    assert!(bytes < tight);
    // a stage that is asked for is the least
    let (stage, _) = plan_of("asked", &["memory.budget=4GiB", "memory.zero_stage=1"]);
    assert_eq!(stage, "stage1");
}
