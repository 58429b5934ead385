//! Names of metrics, and that each is described.

use super::super::described::described;
use super::super::expert_load::ExpertLoad;
use super::super::phase::Phase;
use super::super::report::{ProgramStats, RankWaits, RolloutReport, RolloutStats, StepMemory, UpdateReport};
use super::*;
use crate::objective::mismatch::DIFF_MAX;
use crate::rollout::{Rerouted, Rollout};
use crate::sequence::TokenColumns;
use crate::task::RunningStats;
use crate::turns::TurnStats;
use firebrick_sampler::FinishReason;
use serde_json::json;
use std::collections::BTreeMap;

fn rollout(mask: Vec<bool>, advantages: Vec<f64>) -> Rollout {
    Rollout {
        prompt_index: 0,
        sample: 0,
        prompt: vec![1, 2],
        prompt_text: None,
        completion: vec![3; mask.len()],
        inserted: Vec::new(),
        turns: Vec::new(),
        text: String::new(),
        columns: TokenColumns { advantage: Some(advantages), ..TokenColumns::default() },
        finish: FinishReason::Stop,
        routes: None,
        rerouted: None,
        policy_version: 0,
        reward: Some(1.0),
        reward_parts: Vec::new(),
        reward_weights: Vec::new(),
        reward_extra: serde_json::Map::new(),
        reward_error: None,
        readings: Vec::new(),
        baseline: None,
        mask,
        penalized_reward: 1.0,
    }
}

fn report(rollouts: Vec<Rollout>) -> RolloutReport {
    RolloutReport {
        prompts: Vec::new(),
        first_prompt: 0,
        rollouts,
        left_out: Vec::new(),
        stats: RolloutStats::default(),
        advantages: Vec::new(),
        entropy_coeff: None,
        reward_stats: BTreeMap::new(),
    }
}

fn step(rollouts: Vec<Rollout>, timings: PhaseTimings) -> Metrics {
    let rollout = Some(report(rollouts));
    let values = metrics(&StepReport { step: 3, timings, rollout, ..StepReport::default() });
    assert_described(&values);
    values
}

fn assert_described(values: &Metrics) {
    for name in values.keys() {
        assert!(described(name).is_some(), "{name} has no description");
    }
}

fn close(values: f64, wanted: f64) -> bool {
    (values - wanted).abs() < 1e-12
}

#[test]
fn advantages_are_those_of_scored_tokens() {
    let long = rollout(vec![true, true, true, false], vec![1.0, 1.0, 1.0, 9.0]);
    let short = rollout(vec![true], vec![-3.0]);
    let values = step(vec![long, short], PhaseTimings::default());
    assert!(close(values["critic/advantages/mean"], 0.0), "{values:?}");
    assert!(close(values["critic/advantages/max"], 1.0));
    assert!(close(values["critic/advantages/min"], -3.0));
    let none = step(vec![rollout(vec![false], vec![2.0])], PhaseTimings::default());
    assert!(!none.contains_key("critic/advantages/mean"));
}

#[test]
fn throughput_is_tokens_by_the_seconds_of_all_phases() {
    let mut timings = PhaseTimings::default();
    timings.add(Phase::Generate, 0.5);
    timings.add(Phase::Generate, 0.5);
    timings.add(Phase::UpdateActor, 1.0);
    let values = step(vec![rollout(vec![true; 4], vec![0.0; 4])], timings);
    assert!(close(values["perf/total_num_tokens"], 6.0));
    assert!(close(values["perf/throughput"], 3.0));
    assert!(close(values["timing_s/gen"], 1.0));
    assert!(close(values["timing_per_token_ms/gen"], 250.0));
}

#[test]
fn an_update_is_named_by_its_model() {
    let update = UpdateReport::new(0.5);
    let values = metrics(&StepReport { critic: Some(update.clone()), actor: Some(update), ..StepReport::default() });
    assert_described(&values);
    for name in ["actor/lr", "critic/lr", "batch/tokens", "batch/critic_tokens"] {
        assert!(values.contains_key(name), "{name}");
    }
    // no optimizer step, no norm
    assert!(!values.contains_key("actor/grad_norm"));
}

#[test]
fn all_metrics_of_a_step_are_described() {
    let mut one = rollout(vec![true; 2], vec![1.0; 2]);
    one.columns.full_logp = Some(vec![-1.0; 2]);
    one.columns.old_logp = Some(vec![-1.0; 2]);
    one.columns.value = Some(vec![0.5; 2]);
    one.columns.returns = Some(vec![1.0; 2]);
    one.rerouted = Some(Rerouted { tokens: 4, others: 1 });
    one.reward_parts = vec![("rule".into(), 1.0)];
    one.reward_extra.insert("rule/tries".into(), json!(2));
    let mut rollout = report(vec![one]);
    rollout.entropy_coeff = Some(0.1);
    rollout.reward_stats.insert("rule".into(), RunningStats::default());
    rollout.stats.experts = Some(ExpertLoad { max: 2.0, min: 0.0, unused: 0.25 });
    rollout.stats.programs = Some(ProgramStats::default());
    rollout.stats.turns = Some(TurnStats::default());
    rollout.stats.ranks = Some(RankWaits::default());
    let mut timings = PhaseTimings::default();
    // checkpoints are not timed, and the warm-up leaves no metrics
    for phase in Phase::ALL.into_iter().filter(|phase| !matches!(phase, Phase::SaveCheckpoint | Phase::WarmUp)) {
        timings.add(phase, 1.0);
    }
    let mut memory = StepMemory::new(Vec::new(), None);
    memory.device_used_bytes = Some(1);
    let update = UpdateReport { value_lr: Some(0.1), ..UpdateReport::new(0.5) };
    let values = metrics(&StepReport {
        timings,
        rollout: Some(rollout),
        critic: Some(update.clone()),
        actor: Some(update),
        epoch: Some(0.5),
        memory: Some(memory),
        ..StepReport::default()
    });
    assert_described(&values);
    for name in ["reward/rule/tries/mean", "reward/rule/running_std", "rollout/rerouted", DIFF_MAX, "reward/lost"] {
        assert!(values.contains_key(name), "{name}");
    }
}

#[test]
fn all_metrics_of_a_validation_are_described() {
    let sample = |set: &str, correct: Option<bool>, vote: &str| JudgedSample {
        set: set.into(),
        correct,
        vote: Some(vote.into()),
        ..JudgedSample::default()
    };
    let sets = [("math", Some(true)), ("data/stories", None)];
    let samples = sets.into_iter().flat_map(|(set, correct)| [1, 2, 3].map(|i| sample(set, correct, &i.to_string())));
    let values = validation_metrics(&ValidationReport {
        task: "dataset".into(),
        reward: Some(0.5),
        samples: samples.collect(),
        loss: Some(1.0),
        unjudged: Some(1),
        ..ValidationReport::default()
    });
    assert_described(&values);
    for name in ["val-core/math/acc/pass@3", "val-aux/math/acc/std@3", "val-core/data/stories/reward/maj@3/mean"] {
        assert!(values.contains_key(name), "{name}: {values:?}");
    }
}
