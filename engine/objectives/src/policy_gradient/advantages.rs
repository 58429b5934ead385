//! The implementation of [`Objective`]: masks, corrections, token-level rewards and advantages of a training step's
//! rollouts.

use super::composition::{Advantages, PolicyGradient};
use crate::advantage::{AdvantageEstimator, AdvantageInputs, mean, normalize_then_sum};
use crate::coefficients::AdaptiveCoefficients;
use crate::entropy::EntropyBonus;
use crate::kl_controller::{KlInReward, token_level_rewards};
use crate::loss_sums::LossSums;
use crate::rejection::kept_tokens;
use crate::traits::{Needs, Objective, OptimizerStep};
use firebrick_core::rollout::Rollout;
use firebrick_sampler::FinishReason;
use std::collections::HashMap;

/// Metric: the mean entropy of the scored tokens.
pub(super) const ENTROPY: &str = "actor/entropy";

impl Objective for PolicyGradient {
    fn needs(&self) -> Needs {
        Needs {
            reference: self.kl_loss.is_some() || self.advantages.kl_in_reward().is_some(),
            greedy: self.advantages.estimator() == Some(AdvantageEstimator::Remax),
            values: self.advantages.gae().is_some(),
            scores: self.loss.formula().chooses_tokens() || self.top_entropy.is_some(),
            entropy: self.entropy_bonus.is_some(),
        }
    }

    /// A completion without a reward, or without the baseline that its reward is compared with, is left out: everything
    /// is computed as if the step did not have it.
    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        let lone = lone(rollouts);
        let greedy = self.needs().greedy;
        let (mut compared, mut rewards, mut is_lone) = (Vec::new(), Vec::new(), Vec::new());
        for (rollout, lone) in rollouts.iter_mut().zip(lone) {
            match rollout.reward.filter(|_| !greedy || rollout.baseline.is_some()) {
                Some(reward) => {
                    rewards.push(reward);
                    is_lone.push(lone);
                    compared.push(rollout);
                }
                None => rollout.leave_out(),
            }
        }
        if compared.is_empty() {
            return Vec::new();
        }
        let mut metrics = self.mask(&mut compared);
        metrics.extend(self.correct(&mut compared));
        let by_token = match self.advantages.kl_in_reward() {
            Some(kl) => penalized_rewards(kl, &compared, &rewards, coefficients, &mut metrics),
            None => {
                let pairs = compared.iter().zip(&rewards);
                pairs.map(|(r, &reward)| token_level_rewards(reward, &vec![0.0; r.completion.len()], 0.0)).collect()
            }
        };
        self.estimate(&mut compared, &by_token, &is_lone);
        metrics
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        self.prepare_step(step, coefficients);
    }

    fn update_coefficients(&self, sums: &LossSums, coefficients: &mut AdaptiveCoefficients) {
        let Some(EntropyBonus::Adaptive(by)) = &self.entropy_bonus else {
            return;
        };
        let mean_entropy = sums.values().find(|(name, _)| *name == ENTROPY);
        let measured = coefficients.measured.take().or(mean_entropy.map(|(_, v)| v));
        if let Some(entropy) = measured {
            coefficients.entropy_coefficient(by).update(entropy, by);
        }
    }
}

impl PolicyGradient {
    /// Advantages, and returns where a critic learns them, of completions with these rewards by token.
    fn estimate(&self, rollouts: &mut [&mut Rollout], rewards: &[Vec<f64>], lone: &[bool]) {
        let groups: Vec<u64> = rollouts.iter().map(|r| r.prompt_index).collect();
        let masks: Vec<Vec<bool>> = rollouts.iter().map(|r| r.mask.clone()).collect();
        let baselines: Vec<f64> = rollouts.iter().filter_map(|r| r.baseline).collect();
        let values = rollouts.iter().map(|r| r.columns.value.clone());
        let values: Vec<Vec<f64>> = values.map(Option::unwrap_or_default).collect();
        let inputs =
            AdvantageInputs { rewards, masks: &masks, groups: &groups, lone, baselines: &baselines, values: &values };
        let advantages = match self.advantages {
            Advantages::SumThenNormalize { estimator, eps, .. } => estimator.advantages(inputs, eps),
            Advantages::NormalizeThenSum { eps } => inputs.expand(&normalized_parts(rollouts, &groups, eps)),
        };
        if let Some(gae) = self.advantages.gae() {
            // returns are of the advantages before they are whitened
            for (i, rollout) in rollouts.iter_mut().enumerate() {
                let (_, returns) = gae.estimate(&rewards[i], &values[i], &masks[i]);
                rollout.columns.returns = Some(returns);
            }
        }
        for ((rollout, advantages), rewards) in rollouts.iter_mut().zip(advantages).zip(rewards) {
            rollout.columns.advantage = Some(advantages);
            rollout.penalized_reward = rewards.iter().sum();
        }
    }

    /// Sets the masks of scored tokens.
    fn mask(&self, rollouts: &mut [&mut Rollout]) -> Vec<(String, f64)> {
        // what an environment wrote has no part in the statistics of a sequence
        for rollout in rollouts.iter_mut() {
            rollout.mask = rollout.sampled();
        }
        let kept = (!self.rejections.is_empty()).then(|| {
            let differences = differences(rollouts);
            let pairs = rollouts.iter().zip(&differences);
            let sampled: Vec<Vec<f64>> = pairs.map(|(r, pairs)| r.scored(pairs)).collect();
            kept_tokens(&self.rejections, &sampled)
        });
        for (i, rollout) in rollouts.iter_mut().enumerate() {
            if self.mask_truncated_completions && rollout.finish == FinishReason::Length {
                rollout.mask.fill(false);
            } else if let Some(kept) = &kept {
                let mut kept = kept[i].iter();
                for scored in rollout.mask.iter_mut().filter(|scored| **scored) {
                    *scored = kept.next().copied().unwrap_or(false);
                }
            }
        }
        let Some(kept) = kept else {
            return Vec::new();
        };
        let out = |kept: &bool| f64::from(u8::from(!kept));
        let tokens: Vec<f64> = kept.iter().flatten().map(out).collect();
        let whole_row = |row: &Vec<bool>| out(&row.iter().all(|kept| *kept));
        let sequences: Vec<f64> = kept.iter().map(whole_row).collect();
        let name = |what: &str| format!("rollout_corr/rollout_rs_{what}");
        vec![(name("masked_fraction"), mean(&tokens)), (name("seq_masked_fraction"), mean(&sequences))]
    }

    /// Importance-sampling corrections of the scored tokens.
    fn correct(&self, rollouts: &mut [&mut Rollout]) -> Vec<(String, f64)> {
        let Some(correction) = &self.correction else {
            return Vec::new();
        };
        let scored: Vec<Vec<f64>> =
            differences(rollouts).iter().zip(rollouts.iter()).map(|(row, rollout)| rollout.scored(row)).collect();
        let (weights, metrics) = correction.weights(&scored);
        for (rollout, weights) in rollouts.iter_mut().zip(weights) {
            rollout.columns.correction = Some(rollout.unscored(weights, 1.0));
        }
        metrics
    }
}

/// True for completions that are the only ones with a reward in a group of several.
fn lone(rollouts: &[Rollout]) -> Vec<bool> {
    let mut counts: HashMap<u64, (usize, usize)> = HashMap::new();
    for rollout in rollouts {
        let (total, judged) = counts.entry(rollout.prompt_index).or_default();
        *total += 1;
        *judged += usize::from(rollout.reward.is_some());
    }
    let is_lone = |rollout: &Rollout| {
        let (total, judged) = counts[&rollout.prompt_index];
        total > 1 && judged == 1
    };
    rollouts.iter().map(is_lone).collect()
}

/// The reward of every token: the completion's on the last, less the KL penalty of each. Moves an adaptive coefficient,
/// and reports both.
fn penalized_rewards(
    by: KlInReward,
    rollouts: &[&mut Rollout],
    rewards: &[f64],
    coefficients: &mut AdaptiveCoefficients,
    metrics: &mut Vec<(String, f64)>,
) -> Vec<Vec<f64>> {
    let coefficient = coefficients.kl.unwrap_or(by.controller.start());
    let kls: Vec<Vec<f64>> = rollouts.iter().map(|r| token_kl(by, r)).collect();
    let scored = rollouts.iter().zip(&kls).map(|(r, kl)| r.scored(kl));
    // a completion that is masked as a whole has no mean
    let means: Vec<f64> = scored.filter(|kl| !kl.is_empty()).map(|kl| mean(&kl)).collect();
    if !means.is_empty() {
        let current = mean(&means);
        coefficients.kl = Some(by.controller.next(coefficient, current, means.len()));
        metrics.push(("actor/reward_kl_penalty".into(), current));
    }
    metrics.push(("actor/reward_kl_penalty_coeff".into(), coefficient));
    let pairs = rewards.iter().zip(&kls);
    pairs.map(|(&reward, kl)| token_level_rewards(reward, kl, coefficient)).collect()
}

/// The KL to the reference of each token of a completion; 0 for tokens that the policy did not sample, and for all
/// where no reference scored it.
fn token_kl(by: KlInReward, rollout: &Rollout) -> Vec<f64> {
    let Some(reference) = &rollout.columns.ref_logp else {
        return vec![0.0; rollout.completion.len()];
    };
    let pairs = rollout.old_logp().iter().zip(reference).zip(rollout.sampled());
    let kl = |((&old, &reference), sampled)| if sampled { by.estimator.estimate(old, reference) } else { 0.0 };
    pairs.map(kl).collect()
}

/// Advantages of completions with several rewards, each of them normalised by itself.
fn normalized_parts(rollouts: &[&mut Rollout], groups: &[u64], eps: f64) -> Vec<f64> {
    let parts =
        |r: &&mut Rollout| r.reward_parts.iter().map(|(_, value)| (!value.is_nan()).then_some(*value)).collect();
    let parts: Vec<Vec<Option<f64>>> = rollouts.iter().map(parts).collect();
    let weights = rollouts.first().map(|r| r.reward_weights.clone());
    normalize_then_sum(&parts, &weights.unwrap_or_default(), groups, eps)
}

/// The trainer's old log-probs less the sampler's, of every token: both under the full distribution.
fn differences(rollouts: &[&mut Rollout]) -> Vec<Vec<f64>> {
    let difference = |rollout: &&mut Rollout| {
        let pairs = rollout.old_logp().iter().zip(rollout.full_logp());
        pairs.map(|(&old, &sampler)| old - sampler).collect()
    };
    rollouts.iter().map(difference).collect()
}
