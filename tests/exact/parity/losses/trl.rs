//! TRL's GRPO: losses of its `loss_type`s, and advantages of weighted rewards.

use firebrick_engine::objective::advantage::{ScaleRewards, grpo};
use firebrick_engine::objective::aggregate::{Denominators, LossAggMode, token_weights};
use firebrick_engine::objective::kl::KlType;
use firebrick_engine::objective::{ObjectiveConfig, TokenInputs};
use serde::Deserialize;

use super::{Case, Mask, Outcome, Set, assert_rows, rows, run, vector};
use crate::support::{assert_all_close, assert_close, parse};

const TOLERANCE: f64 = 1e-9;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    loss_type: LossType,
    level: Level,
    beta: f64,
    epsilon: f64,
    epsilon_high: f64,
    delta: Option<f64>,
    kl_bias: bool,
    top_entropy_quantile: f64,
    entropy_coef: f64,
    off_policy_mask_threshold: Option<f64>,
    grad_accum: usize,
    steps_per_generation: usize,
    num_items_in_batch: f64,
    max_completion_length: usize,
    old: bool,
    is_ratio: bool,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum LossType {
    Grpo,
    Bnpo,
    DrGrpo,
    Dapo,
}

#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Level {
    Token,
}

impl Params {
    /// TRL's `loss_type` as aggregation mode and denominators.
    fn aggregation(&self, mask: &Mask) -> (LossAggMode, Denominators) {
        let by = Denominators::trl(&mask.lengths(), self.max_completion_length);
        let by = by.repeated(self.grad_accum);
        match self.loss_type {
            LossType::Grpo => (LossAggMode::SeqMeanTokenMean, by),
            LossType::Bnpo => (LossAggMode::TokenMean, by),
            LossType::DrGrpo => (LossAggMode::SeqMeanTokenSumNorm, by),
            LossType::Dapo => {
                let steps = self.grad_accum as f64 / self.steps_per_generation as f64;
                let tokens = self.num_items_in_batch * steps;
                (LossAggMode::TokenMean, Denominators { tokens, ..by })
            }
        }
    }

    fn objective(&self, mode: LossAggMode) -> ObjectiveConfig {
        ObjectiveConfig {
            clip_ratio_low: self.epsilon,
            clip_ratio_high: self.epsilon_high,
            clip_ratio_c: self.delta,
            loss_agg_mode: mode,
            kl_loss_coef: self.beta,
            kl_loss_type: KlType::K3,
            ..ObjectiveConfig::default()
        }
    }
}

pub(super) fn compute_loss(case: &Case, set: &Set) {
    let params: Params = case.params();
    // what the list of later cases holds back
    assert!(params.level == Level::Token && !params.kl_bias && !params.is_ratio);
    assert!(params.top_entropy_quantile >= 1.0 && params.off_policy_mask_threshold.is_none());

    let mask = Mask::new(&set["mask"]);
    let scored = |name: &str| mask.pick(&rows(&set[name]));
    let (logp, entropy) = (scored("logprobs"), scored("entropies"));
    let (mode, by) = params.aggregation(&mask);
    let weights = |mode, by| vector(token_weights(mode, &mask.lengths(), by).concat());
    let advantage = vector(mask.advantages(&set["advantages"]));
    let mut inputs = TokenInputs::new(weights(mode, by), advantage, mask.lengths());
    inputs.old_logp = params.old.then(|| vector(scored("old_logprobs")));
    inputs.ref_logp = Some(vector(scored("ref_logprobs")));
    if params.entropy_coef != 0.0 {
        // TRL's bonus is a mean over tokens whatever the loss type, ours is weighted like the loss
        let tokens = Denominators::trl(&mask.lengths(), 1).repeated(params.grad_accum);
        inputs.bonus = Some(weights(LossAggMode::TokenMean, tokens) * params.entropy_coef);
    }
    let outcome = run(&params.objective(mode), &logp, &entropy, &inputs);
    compare(case, &params, &mask, &outcome);
}

fn compare(case: &Case, params: &Params, mask: &Mask, found: &Outcome) {
    let name = &case.name;
    let loss: f64 = parse(name, case.output("loss"));
    assert_close(&format!("{name}: loss"), found.loss, loss, TOLERANCE);
    for (of, found) in [("logprobs", &found.d_logp), ("entropies", &found.d_entropy)] {
        let stored = case
            .grads
            .as_ref()
            .is_some_and(|grads| grads.contains_key(of));
        if let Some(expected) = stored.then(|| case.gradient(of)).flatten() {
            assert_rows(
                &format!("{name}: d {of}"),
                mask,
                found,
                &expected,
                TOLERANCE,
            );
        }
    }
    let (mode, by) = params.aggregation(mask);
    let own_tokens = Denominators::trl(&mask.lengths(), 1).tokens;
    let token_mean = mode == LossAggMode::TokenMean && (by.tokens - own_tokens).abs() < 0.5;
    let metrics: Set = parse(name, case.output("metrics"));
    for (metric, expected) in &metrics {
        let Some(expected) = expected.as_f64() else {
            panic!("{name}: {metric} is {expected}")
        };
        let found = match metric.as_str() {
            "entropy" => found.metrics["actor/entropy"],
            "policy_loss" => found.metrics["actor/pg_loss"],
            "clip_ratio/region_mean" => found.metrics["actor/pg_clipfrac"],
            // a mean over tokens: ours where the loss is one
            "kl" if token_mean => found.metrics["actor/kl_loss"],
            "entropy_coef" => params.entropy_coef,
            // without a counterpart
            "kl"
            | "clip_ratio/low_mean"
            | "clip_ratio/high_mean"
            | "clip_ratio/low_min"
            | "clip_ratio/high_max" => continue,
            other => panic!("{name}: unknown metric {other}"),
        };
        assert_close(&format!("{name}: {metric}"), found, expected, TOLERANCE);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdvantageParams {
    num_generations: u64,
    reward_weights: Vec<f64>,
    multi_objective_aggregation: String,
    scale_rewards: ScaleRewards,
    eps: f64,
}

/// The weighted sum of the rewards that are there. A completion without any takes no part and gets no advantage.
pub(super) fn advantages(case: &Case) {
    let params: AdvantageParams = case.params();
    assert_eq!(params.multi_objective_aggregation, "sum_then_normalize");
    let by_func: Vec<Vec<Option<f64>>> = parse(&case.name, &case.inputs["rewards_per_func"]);
    let reward = |row: &Vec<Option<f64>>| {
        let parts = row.iter().zip(&params.reward_weights);
        let known: Vec<f64> = parts.filter_map(|(r, w)| r.map(|r| r * w)).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>())
    };
    let rewards: Vec<Option<f64>> = by_func.iter().map(reward).collect();
    let known: Vec<(u64, f64)> = (0..)
        .zip(&rewards)
        .filter_map(|(i, reward)| reward.map(|r| (i / params.num_generations, r)))
        .collect();
    let (groups, values): (Vec<u64>, Vec<f64>) = known.into_iter().unzip();
    let mut found = grpo(&values, &groups, params.scale_rewards, params.eps).into_iter();
    let found: Vec<f64> = rewards
        .iter()
        .map(|reward| reward.map_or(0.0, |_| found.next().expect("an advantage")))
        .collect();
    let expected: Vec<f64> = parse(&case.name, case.output("advantages"));
    assert_all_close(&case.name, &found, &expected, TOLERANCE);
}
