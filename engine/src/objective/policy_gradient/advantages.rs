//! Masks, corrections, token-level rewards and advantages of a training step's rollouts.

use super::composition::{Advantages, PolicyGradient};
use crate::objective::advantage::{AdvantageInputs, mean, normalize_then_sum};
use crate::objective::coefficients::AdaptiveCoefficients;
use crate::objective::kl_controller::{KlInReward, token_level_rewards};
use crate::objective::rejection::kept_tokens;
use crate::rollout::Rollout;
use firebrick_models::generate::FinishReason;

impl PolicyGradient {
    /// Fills in masks, corrections and advantages; returns what to report.
    pub(super) fn advantages_of(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        let mut metrics = self.mask(rollouts);
        metrics.extend(self.correct(rollouts));
        let rewards = match self.advantages.kl_in_reward() {
            Some(kl) => penalized_rewards(kl, rollouts, coefficients, &mut metrics),
            None => {
                rollouts.iter().map(|r| token_level_rewards(r.reward, &vec![0.0; r.completion.len()], 0.0)).collect()
            }
        };
        let groups: Vec<u64> = rollouts.iter().map(|r| r.prompt_index).collect();
        let masks: Vec<Vec<bool>> = rollouts.iter().map(|r| r.mask.clone()).collect();
        let baselines: Vec<f64> = rollouts.iter().filter_map(|r| r.baseline).collect();
        let values = rollouts.iter().map(|r| r.columns.value.clone());
        let values: Vec<Vec<f64>> = values.map(Option::unwrap_or_default).collect();
        let inputs = AdvantageInputs {
            rewards: &rewards,
            masks: &masks,
            groups: &groups,
            baselines: &baselines,
            values: &values,
        };
        let advantages = match self.advantages {
            Advantages::SumThenNormalize { estimator, .. } => estimator.advantages(inputs),
            Advantages::NormalizeThenSum { eps } => inputs.expand(&normalized_parts(rollouts, &groups, eps)),
        };
        if let Some(gae) = self.advantages.gae() {
            // returns are of the advantages before they are whitened
            for (i, rollout) in rollouts.iter_mut().enumerate() {
                let (_, returns) = gae.estimate(&rewards[i], &values[i], &masks[i]);
                rollout.columns.returns = Some(returns);
            }
        }
        for ((rollout, advantages), rewards) in rollouts.iter_mut().zip(advantages).zip(&rewards) {
            rollout.columns.advantage = Some(advantages);
            rollout.penalized_reward = rewards.iter().sum();
        }
        metrics
    }

    /// Which tokens are scored.
    fn mask(&self, rollouts: &mut [Rollout]) -> Vec<(String, f64)> {
        // what an environment wrote has no part in the statistics of a sequence
        for rollout in rollouts.iter_mut() {
            rollout.mask = rollout.sampled();
        }
        let kept = (!self.rejections.is_empty()).then(|| {
            let differences = differences(rollouts);
            let own = rollouts.iter().zip(&differences);
            let sampled: Vec<Vec<f64>> = own.map(|(r, own)| r.scored(own)).collect();
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
        let whole = |own: &Vec<bool>| out(&own.iter().all(|kept| *kept));
        let sequences: Vec<f64> = kept.iter().map(whole).collect();
        let name = |what: &str| format!("rollout_corr/rollout_rs_{what}");
        vec![(name("masked_fraction"), mean(&tokens)), (name("seq_masked_fraction"), mean(&sequences))]
    }

    /// Importance-sampling corrections of the scored tokens.
    fn correct(&self, rollouts: &mut [Rollout]) -> Vec<(String, f64)> {
        let Some(correction) = &self.correction else {
            return Vec::new();
        };
        let scored: Vec<Vec<f64>> =
            differences(rollouts).iter().zip(rollouts.iter()).map(|(own, rollout)| rollout.scored(own)).collect();
        let (weights, metrics) = correction.weights(&scored);
        for (rollout, weights) in rollouts.iter_mut().zip(weights) {
            rollout.columns.correction = Some(rollout.unscored(weights, 1.0));
        }
        metrics
    }
}

/// The reward of every token: the completion's on the last, less the KL penalty of each. Moves an adaptive coefficient,
/// and reports both.
fn penalized_rewards(
    by: KlInReward,
    rollouts: &[Rollout],
    coefficients: &mut AdaptiveCoefficients,
    metrics: &mut Vec<(String, f64)>,
) -> Vec<Vec<f64>> {
    let coefficient = coefficients.kl.unwrap_or(by.controller.start());
    let kls: Vec<Vec<f64>> = rollouts.iter().map(|r| token_kl(by, r)).collect();
    let scored = rollouts.iter().zip(&kls).map(|(r, kl)| r.scored(kl));
    let means: Vec<f64> = scored.map(|kl| mean(&kl)).collect();
    let current = mean(&means);
    coefficients.kl = Some(by.controller.next(coefficient, current, rollouts.len()));
    metrics.push(("actor/reward_kl_penalty".into(), current));
    metrics.push(("actor/reward_kl_penalty_coeff".into(), coefficient));
    let all = rollouts.iter().zip(&kls);
    all.map(|(rollout, kl)| token_level_rewards(rollout.reward, kl, coefficient)).collect()
}

/// The KL to the reference of each token of a completion; zeros where no reference scored it.
fn token_kl(by: KlInReward, rollout: &Rollout) -> Vec<f64> {
    let Some(reference) = &rollout.columns.ref_logp else {
        return vec![0.0; rollout.completion.len()];
    };
    let pairs = rollout.old_logp().iter().zip(reference);
    pairs.map(|(&old, &reference)| by.estimator.estimate(old, reference)).collect()
}

/// Advantages of completions with several rewards, each of them normalised by itself.
fn normalized_parts(rollouts: &[Rollout], groups: &[u64], eps: f64) -> Vec<f64> {
    let parts = |r: &Rollout| r.reward_parts.iter().map(|(_, value)| (!value.is_nan()).then_some(*value)).collect();
    let parts: Vec<Vec<Option<f64>>> = rollouts.iter().map(parts).collect();
    let weights = rollouts.first().map(|r| r.reward_weights.clone());
    normalize_then_sum(&parts, &weights.unwrap_or_default(), groups, eps)
}

/// The trainer's old log-probs less the sampler's, of every token.
fn differences(rollouts: &[Rollout]) -> Vec<Vec<f64>> {
    let of = |rollout: &Rollout| {
        let pairs = rollout.old_logp().iter().zip(rollout.sampler_logp());
        pairs.map(|(&old, &sampler)| old - sampler).collect()
    };
    rollouts.iter().map(of).collect()
}
