//! TRL's GRPO and RLOO: losses, and advantages of weighted rewards.

use firebrick_engine::objective::advantage::{
    AdvantageEstimator, AdvantageInputs, Plain, ScaleRewards, grpo, normalize_then_sum,
};
use firebrick_engine::objective::aggregate::{Denominators, LossAggMode, token_weights};
use firebrick_engine::objective::entropy::high_entropy_mask;
use firebrick_engine::objective::kl::KlType;
use firebrick_engine::objective::kl_controller::token_level_rewards;
use firebrick_engine::objective::policy::{Cispo, Clip, ClipRange, ImportanceSamplingLevel, PolicyLoss, Sapo, Vespo};
use firebrick_engine::objective::{Algorithm, MultiObjectiveAggregation, ObjectiveConfig, PolicyGradient, TokenInputs};
use serde::Deserialize;

use super::{Case, Mask, Outcome, Set, assert_rows, rows, run, vector};
use crate::support::{assert_all_close, assert_close, parse};

const TOLERANCE: f64 = 1e-9;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    loss_type: LossType,
    level: ImportanceSamplingLevel,
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
    sapo_temperature_pos: Option<f64>,
    sapo_temperature_neg: Option<f64>,
    vespo_k_pos: Option<f64>,
    vespo_lambda_pos: Option<f64>,
    vespo_k_neg: Option<f64>,
    vespo_lambda_neg: Option<f64>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum LossType {
    Grpo,
    Bnpo,
    DrGrpo,
    Dapo,
    Luspo,
    Cispo,
    Sapo,
    Vespo,
}

impl Params {
    /// TRL's `loss_type` as aggregation mode and denominators.
    fn aggregation(&self, mask: &Mask) -> (LossAggMode, Denominators) {
        let by = Denominators::trl(&mask.lengths(), self.max_completion_length);
        let by = by.repeated(self.grad_accum);
        match self.loss_type {
            LossType::Grpo | LossType::Sapo => (LossAggMode::SeqMeanTokenMean, by),
            LossType::Bnpo => (LossAggMode::TokenMean, by),
            LossType::DrGrpo => (LossAggMode::SeqMeanTokenSumNorm, by),
            LossType::Luspo => (LossAggMode::SeqMeanTokenSum, by),
            LossType::Dapo | LossType::Cispo | LossType::Vespo => {
                let steps = self.grad_accum as f64 / self.steps_per_generation as f64;
                let tokens = self.num_items_in_batch * steps;
                (LossAggMode::TokenMean, Denominators { tokens, ..by })
            }
        }
    }

    fn objective(&self) -> PolicyGradient {
        let importance_sampling_level = self.level;
        let (sapo, vespo) = (Sapo::default(), Vespo::default());
        let policy_loss = match self.loss_type {
            // TRL's CISPO bounds the ratio above by epsilon_high itself, and not below
            LossType::Cispo => PolicyLoss::Cispo(Cispo {
                importance_sampling_level,
                range: ClipRange { clip_ratio_low: 1.0, clip_ratio_high: self.epsilon_high - 1.0 },
            }),
            LossType::Sapo => PolicyLoss::Sapo(Sapo {
                importance_sampling_level,
                tau_pos: self.sapo_temperature_pos.unwrap_or(sapo.tau_pos),
                tau_neg: self.sapo_temperature_neg.unwrap_or(sapo.tau_neg),
            }),
            LossType::Vespo => PolicyLoss::Vespo(Vespo {
                vespo_k_pos: self.vespo_k_pos.unwrap_or(vespo.vespo_k_pos),
                vespo_lambda_pos: self.vespo_lambda_pos.unwrap_or(vespo.vespo_lambda_pos),
                vespo_k_neg: self.vespo_k_neg.unwrap_or(vespo.vespo_k_neg),
                vespo_lambda_neg: self.vespo_lambda_neg.unwrap_or(vespo.vespo_lambda_neg),
            }),
            _ => PolicyLoss::Clip(Clip {
                importance_sampling_level,
                range: ClipRange { clip_ratio_low: self.epsilon, clip_ratio_high: self.epsilon_high },
                clip_ratio_c: self.delta,
            }),
        };
        ObjectiveConfig {
            policy_loss,
            off_policy_mask_threshold: self.off_policy_mask_threshold,
            kl_loss_coef: self.beta,
            kl_loss_type: KlType::K3,
            use_bias_correction_kl: self.kl_bias,
            ..ObjectiveConfig::default()
        }
        .build()
        .expect("an objective")
    }

    /// Tokens that the policy term and the bonus look at.
    fn keep(&self, entropy: &[f64]) -> Option<Vec<f64>> {
        let kept = high_entropy_mask(entropy, self.top_entropy_quantile);
        let some = self.top_entropy_quantile < 1.0;
        some.then(|| kept.iter().map(|&k| f64::from(u8::from(k))).collect())
    }

    /// TRL's bonus is a mean over the tokens that it looks at whatever the loss type.
    fn bonus(&self, keep: Option<&Vec<f64>>, tokens: usize) -> Option<Vec<f64>> {
        let all = vec![1.0; tokens];
        let keep = keep.unwrap_or(&all);
        let each = self.entropy_coef / keep.iter().sum::<f64>() / self.grad_accum as f64;
        (self.entropy_coef != 0.0).then(|| keep.iter().map(|k| k * each).collect())
    }
}

pub(super) fn compute_loss(case: &Case, set: &Set) {
    let params: Params = case.params();
    let mask = Mask::new(&set["mask"]);
    let scored = |name: &str| mask.pick(&rows(&set[name]));
    let (logp, entropy) = (scored("logprobs"), scored("entropies"));
    let (mode, by) = params.aggregation(&mask);
    let weights = vector(token_weights(mode, &mask.lengths(), by).concat());
    let advantage = vector(mask.advantages(&set["advantages"]));
    let keep = params.keep(&entropy);
    let mut inputs = TokenInputs::new(weights, advantage, mask.lengths());
    inputs.columns.old_logp = params.old.then(|| vector(scored("old_logprobs")));
    inputs.columns.ref_logp = Some(vector(scored("ref_logprobs")));
    inputs.columns.bonus = params.bonus(keep.as_ref(), logp.len()).map(vector);
    inputs.columns.keep = keep.map(vector);
    if params.is_ratio {
        inputs.columns.correction = Some(vector(scored("importance_sampling_ratio")));
    }
    let outcome = run(&params.objective(), &logp, &entropy, &inputs);
    let by_token = set["advantages"][0].is_array();
    compare(case, &params, &mask, by_token, &outcome);
}

/// `by_token`: whether advantages differ by token.
fn compare(case: &Case, params: &Params, mask: &Mask, by_token: bool, found: &Outcome) {
    let name = &case.name;
    let loss: f64 = parse(name, case.output("loss"));
    assert_close(&format!("{name}: loss"), found.loss, loss, TOLERANCE);
    for (of, found) in [("logprobs", &found.d_logp), ("entropies", &found.d_entropy)] {
        let stored = case.grads.as_ref().is_some_and(|grads| grads.contains_key(of));
        if let Some(expected) = stored.then(|| case.gradient(of)).flatten() {
            assert_rows(&format!("{name}: d {of}"), mask, found, &expected, TOLERANCE);
        }
    }
    let (mode, by) = params.aggregation(mask);
    let own_tokens = Denominators::trl(&mask.lengths(), 1).tokens;
    let token_mean = mode == LossAggMode::TokenMean && (by.tokens - own_tokens).abs() < 0.5;
    let metrics: Set = parse(name, case.output("metrics"));
    for (metric, expected) in &metrics {
        let Some(expected) = expected.as_f64() else { panic!("{name}: {metric} is {expected}") };
        let found = match metric.as_str() {
            "entropy" => found.metrics["actor/entropy"],
            "policy_loss" => found.metrics["actor/pg_loss"],
            // of every sequence, whatever the ratio is of; known to losses that look at whole sequences
            "clip_ratio/low_min" | "clip_ratio/high_max" if params.level == ImportanceSamplingLevel::Token => {
                continue;
            }
            // with a ratio a sequence and an advantage a token, TRL's share is of tokens; ours is a mean over sequences
            "clip_ratio/low_mean" | "clip_ratio/high_mean" | "clip_ratio/region_mean"
                if by_token && params.level == ImportanceSamplingLevel::Sequence =>
            {
                continue;
            }
            // TRL counts sequences without a token too: their φ is 1, and nothing of them is clipped
            "vespo/phi_seq_mean" => with_empty(mask, found.metrics["vespo/phi_seq_mean"], 1.0),
            own if params.level == ImportanceSamplingLevel::Sequence && own.ends_with("_mean") => {
                with_empty(mask, found.metrics[own], 0.0)
            }
            own if found.metrics.contains_key(own) => found.metrics[own],
            // a mean over tokens: ours where the loss is one
            "kl" if token_mean => found.metrics["actor/kl_loss"],
            "entropy_coef" => params.entropy_coef,
            // without a counterpart
            "kl" => continue,
            other => panic!("{name}: unknown metric {other}"),
        };
        assert_close(&format!("{name}: {metric}"), found, expected, TOLERANCE);
    }
}

/// A mean over the sequences that have tokens, as one over all of them.
fn with_empty(mask: &Mask, mean: f64, empty: f64) -> f64 {
    let lengths = mask.lengths();
    let none = lengths.iter().filter(|n| **n == 0).count() as f64;
    let all = lengths.len() as f64;
    (mean * (all - none) + empty * none) / all
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdvantageParams {
    num_generations: u64,
    reward_weights: Vec<f64>,
    multi_objective_aggregation: MultiObjectiveAggregation,
    scale_rewards: ScaleRewards,
    eps: f64,
}

/// A completion without any reward takes no part and gets no advantage.
pub(super) fn advantages(case: &Case) {
    let params: AdvantageParams = case.params();
    let parts: Vec<Vec<Option<f64>>> = parse(&case.name, &case.inputs["rewards_per_func"]);
    let groups: Vec<u64> = (0..parts.len() as u64).map(|i| i / params.num_generations).collect();
    let found = match params.multi_objective_aggregation {
        MultiObjectiveAggregation::SumThenNormalize => sum_then_normalize(&params, &parts, &groups),
        MultiObjectiveAggregation::NormalizeThenSum => {
            normalize_then_sum(&parts, &params.reward_weights, &groups, params.eps)
        }
    };
    let expected: Vec<f64> = parse(&case.name, case.output("advantages"));
    assert_all_close(&case.name, &found, &expected, TOLERANCE);
}

/// The weighted sum of the rewards that are there, as one reward.
fn sum_then_normalize(params: &AdvantageParams, parts: &[Vec<Option<f64>>], groups: &[u64]) -> Vec<f64> {
    let reward = |row: &Vec<Option<f64>>| {
        let parts = row.iter().zip(&params.reward_weights);
        let known: Vec<f64> = parts.filter_map(|(r, w)| r.map(|r| r * w)).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>())
    };
    let rewards: Vec<Option<f64>> = parts.iter().map(reward).collect();
    let known = groups.iter().zip(&rewards);
    let known = known.filter_map(|(&group, reward)| reward.map(|r| (group, r)));
    let (groups, values): (Vec<u64>, Vec<f64>) = known.unzip();
    let mut found = grpo(&values, &groups, params.scale_rewards, params.eps).into_iter();
    rewards.iter().map(|reward| reward.map_or(0.0, |_| found.next().expect("an advantage"))).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RlooParams {
    epsilon: f64,
    epsilon_high: f64,
}

/// RLOO's whole completions as actions, and a mean over them.
pub(super) fn rloo_loss(case: &Case, set: &Set) {
    let params: RlooParams = case.params();
    let mask = Mask::new(&set["mask"]);
    let scored = |name: &str| mask.pick(&rows(&set[name]));
    let range = ClipRange { clip_ratio_low: params.epsilon, clip_ratio_high: params.epsilon_high };
    let importance_sampling_level = ImportanceSamplingLevel::SequenceProduct;
    let policy_loss = PolicyLoss::Clip(Clip { importance_sampling_level, range, clip_ratio_c: None });
    let settings = ObjectiveConfig { policy_loss, ..Algorithm::Rloo.settings() };
    let by = Denominators::trl(&mask.lengths(), mask.width());
    let weights = token_weights(settings.loss_agg_mode, &mask.lengths(), by).concat();
    let advantage = vector(mask.advantages(&set["advantages"]));
    let mut inputs = TokenInputs::new(vector(weights), advantage, mask.lengths());
    inputs.columns.old_logp = Some(vector(scored("old_logprobs")));
    let found = run(&settings.build().expect("an objective"), &scored("logprobs"), &scored("entropies"), &inputs);
    let loss: f64 = parse(&case.name, case.output("loss"));
    assert_close(&case.name, found.loss, loss, TOLERANCE);
    if let Some(expected) = case.gradient("logprobs") {
        assert_rows(&case.name, &mask, &found.d_logp, &expected, TOLERANCE);
    }
    let metrics: Set = parse(&case.name, case.output("metrics"));
    let entropy: f64 = parse(&case.name, &metrics["entropy"]);
    assert_close(&case.name, found.metrics["actor/entropy"], entropy, TOLERANCE);
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RlooAdvantageParams {
    num_generations: u64,
    normalize_advantages: bool,
    beta: f64,
    eps: f64,
}

/// Rewards less the KL to the reference, summed over the completion.
pub(super) fn rloo_advantages(case: &Case) {
    let params: RlooAdvantageParams = case.params();
    let mask = Mask::new(&case.inputs["mask"]);
    let rewards: Vec<f64> = parse(&case.name, &case.inputs["rewards"]);
    let (old, reference) = (rows(&case.inputs["old_logprobs"]), rows(&case.inputs["ref_logprobs"]));
    let by_token: Vec<Vec<f64>> = (0..rewards.len())
        .map(|i| {
            let scored = mask.0[i].iter().zip(old[i].iter().zip(&reference[i]));
            let kl: Vec<f64> = scored
                .filter(|(m, _)| **m)
                .map(|(_, (&old, &reference))| KlType::K1.estimate(old, reference))
                .collect();
            token_level_rewards(rewards[i], &kl, params.beta)
        })
        .collect();
    let masks: Vec<Vec<bool>> = by_token.iter().map(|row| vec![true; row.len()]).collect();
    let groups: Vec<u64> = (0..rewards.len() as u64).map(|i| i / params.num_generations).collect();
    let settings = ObjectiveConfig {
        adv_estimator: AdvantageEstimator::Rloo(Plain { normalize_advantages: params.normalize_advantages }),
        adv_eps: params.eps,
        ..Algorithm::Rloo.settings()
    };
    let inputs =
        AdvantageInputs { rewards: &by_token, masks: &masks, groups: &groups, lone: &[], baselines: &[], values: &[] };
    let objective = settings.build().expect("an objective");
    let estimator = objective.advantages().estimator().expect("one reward");
    let found: Vec<f64> = estimator.advantages(inputs, params.eps).iter().map(|row| row[0]).collect();
    let expected: Vec<f64> = parse(&case.name, case.output("advantages"));
    assert_all_close(&case.name, &found, &expected, TOLERANCE);
}
