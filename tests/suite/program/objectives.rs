//! Every algorithm of the family by its name: it trains, and its losses do not depend on how the batch was cut.

use super::runs::metrics;
use super::{Bench, refused, succeeded};
use crate::support::{assert_close, checked};
use firebrick_engine::objective::Algorithm;
use serde_json::Value;

/// Numbers of the same step under two token budgets, relative where they are above 1.
const CLOSE: f64 = 1e-4;

/// What is compared; a share of clipped tokens jumps where a ratio stands on the edge.
const COMPARED: [&str; 5] = ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "actor/kl_loss"];

/// One step of two epochs, so that ratios are not all 1.
const OFF_POLICY: [&str; 3] = ["trainer.steps=1", "update.ppo_epochs=2", "model.arch=null"];

/// Names as they are written.
fn names() -> Vec<String> {
    let name = |algorithm: &Algorithm| match serde_json::to_value(algorithm) {
        Ok(Value::String(name)) => name,
        other => panic!("{other:?}"),
    };
    Algorithm::ALL.iter().map(name).collect()
}

/// A policy that gets some answers right and some wrong, so that there is something to compare.
fn half_taught() -> Bench {
    let bench = Bench::new();
    succeeded(&bench.firebrick("sft", &["sft.steps=100", "sft.optim.lr=0.01"]));
    bench
}

/// Runs with one token budget and with one that takes a sequence at a time, and compares what they report.
fn assert_cut_does_not_matter(bench: &Bench, label: &str, settings: &[&str]) -> Value {
    let mut lines = Vec::new();
    for (run, budget) in [("whole", 4096), ("cut", 10)] {
        let run = format!("{label}-{run}");
        let output = format!("output={}", bench.path(&run).display());
        let taught = bench.path("run/checkpoints/step-000100/model");
        let model = format!("model.path={}", taught.display());
        let train = format!("memory.train_tokens={budget}");
        let score = format!("memory.score_tokens={budget}");
        let own = [&OFF_POLICY, settings, &[&output, &model, &train, &score]].concat();
        succeeded(&bench.firebrick("train", &own));
        lines.extend(metrics(bench, &run).pop());
    }
    let [whole, cut] = &lines[..] else {
        panic!("{label}: a line a run");
    };
    for key in COMPARED.iter().filter(|key| whole[**key].is_number()) {
        let value = |line: &Value| line[*key].as_f64().unwrap_or(f64::NAN);
        let scale = value(whole).abs().max(1.0);
        let label = format!("{label}: {key}");
        assert_close(&label, value(cut), value(whole), CLOSE * scale);
    }
    let micros = |line: &Value| line["batch/num_micro_batches"].as_f64();
    assert!(micros(cut) > micros(whole), "{label}: the second was cut");
    lines.swap_remove(0)
}

#[test]
fn every_algorithm_trains_and_its_losses_do_not_depend_on_the_cut() {
    let bench = half_taught();
    for name in names() {
        let setting = format!("objective={name}");
        let critic = (name == "ppo").then_some("critic={}");
        let settings: Vec<&str> = [Some(setting.as_str()), critic].into_iter().flatten().collect();
        let line = assert_cut_does_not_matter(&bench, &name, &settings);
        let norm = line["actor/grad_norm"].as_f64();
        assert!(norm > Some(0.0), "{name}: nothing was learnt");
    }
    checked("algorithms that train", names().len());
}

#[test]
fn choices_out_of_the_whole_step_do_not_depend_on_the_cut() {
    let bench = half_taught();
    for settings in [
        // entropies tie, and a tie at the quantile is broken by rounding, which shared prefixes change
        &["memory.share_prefix=false", "objective.top_entropy_quantile=0.3", "objective.entropy_coeff=0.01"][..],
        &["objective=kl_cov", "objective.kl_cov_ratio=0.2"],
        &["objective=clip_cov", "objective.clip_cov_ratio=0.2", "objective.clip_cov_lb=-1"],
        &["objective.off_policy_mask_threshold=0.001"],
        &["objective.use_adaptive_entropy=true", "objective.entropy_target=9"],
    ] {
        let label = settings.last().expect("a setting");
        assert_cut_does_not_matter(&bench, label, settings);
    }
}

#[test]
fn corrections_are_reported_and_an_adaptive_coefficient_moves() {
    let bench = Bench::new();
    succeeded(&bench.firebrick(
        "train",
        &[
            "objective.rollout_is=token",
            "objective.rollout_rs=seq_mean_k1,token_k2",
            "objective.rollout_rs_threshold=0.5_1.5,2",
            "objective.use_adaptive_entropy=true",
            "objective.entropy_target=9",
            "objective.use_kl_in_reward=true",
            "objective.kl_ctrl.type=adaptive",
        ],
    ));
    let lines = metrics(&bench, "run");
    for key in [
        "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_is_eff_sample_size",
        "rollout_corr/rollout_rs_masked_fraction",
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "clip_ratio/region_mean",
        "actor/reward_kl_penalty",
        "actor/reward_kl_penalty_coeff",
    ] {
        assert!(lines[1][key].is_number(), "{key}: {}", lines[1]);
    }
    let ratio = lines[1]["rollout_corr/rollout_is_mean"].as_f64().unwrap();
    assert_close("the sampler agrees with the trainer", ratio, 1.0, 1e-3);
    let weight = |line: &Value| line["actor/entropy_coeff"].as_f64().unwrap();
    assert_close("one step", weight(&lines[1]), 0.005, 1e-9);
    assert_close("three steps", weight(&lines[3]), 0.015, 1e-9);
}

#[test]
fn an_adaptive_coefficient_survives_kill_and_resume() {
    let bench = Bench::new();
    let settings = ["objective.use_adaptive_entropy=true", "objective.entropy_target=9", "trainer.save_freq=1"];
    succeeded(&bench.firebrick("train", &settings));
    let whole = metrics(&bench, "run");
    let shorter = format!("output={}", bench.path("resumed").display());
    let half = [&settings[..], &[&shorter, "trainer.steps=1"]].concat();
    succeeded(&bench.firebrick("train", &half));
    let rest = [&settings[..], &[&shorter, "--resume"]].concat();
    succeeded(&bench.firebrick("train", &rest));
    let resumed = metrics(&bench, "resumed");
    assert_eq!(whole.last(), resumed.last());
}

#[test]
fn remax_compares_with_one_greedy_completion_a_prompt_that_is_not_trained_on() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["objective=remax", "trainer.steps=1"]));
    let samples: Vec<Value> =
        bench.read("run/samples.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(samples.len(), 4 * 4, "the greedy completions are not among them");
    for group in samples.chunks(4) {
        let baseline = |s: &Value| s["reward"].as_f64().unwrap() - s["advantage"].as_f64().unwrap();
        for sample in group {
            assert_close("one baseline a prompt", baseline(sample), baseline(&group[0]), 1e-9);
        }
    }
}

#[test]
fn a_run_is_refused_where_its_objective_cannot_be_served() {
    let bench = Bench::new();
    for (settings, reason) in [
        (&["objective=pass_at_k", "rollout.n=1"][..], "set rollout.n to at least 2"),
        (&["objective.rollout_is=token", "update.old_log_probs=sampler"], "set update.old_log_probs: trainer"),
        (&["objective=dpao"], "did you mean `dapo`?"),
    ] {
        refused(&bench.firebrick("train", settings), &[reason]);
    }
}
