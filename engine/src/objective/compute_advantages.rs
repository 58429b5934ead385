//! A training step's rollouts: which tokens are scored, their rewards, advantages and corrections.

use super::advantage::{
    AdvEstimator, AdvantageInputs, MultiObjectiveAggregation, estimate, mean, normalize_then_sum,
};
use super::coefficients::AdaptiveCoefficients;
use super::config::ObjectiveConfig;
use super::kl_controller::token_level_rewards;
use crate::rollout::Rollout;
use firebrick_models::generate::Finish;

impl ObjectiveConfig {
    /// Fills in masks, corrections and advantages; returns what to report.
    pub(super) fn advantages_of(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        let mut metrics = self.mask(rollouts);
        metrics.extend(self.correct(rollouts));
        let rewards = self.token_rewards(rollouts, coefficients, &mut metrics);
        let groups: Vec<u64> = rollouts.iter().map(|r| r.draw).collect();
        let masks: Vec<Vec<bool>> = rollouts.iter().map(|r| r.mask.clone()).collect();
        let baselines: Vec<f64> = rollouts.iter().filter_map(|r| r.baseline).collect();
        let wide = |values: &Vec<f32>| values.iter().map(|&v| f64::from(v)).collect();
        let values: Vec<Vec<f64>> = rollouts.iter().map(|r| wide(&r.values)).collect();
        let outcomes = AdvantageInputs {
            rewards: &rewards,
            masks: &masks,
            groups: &groups,
            baselines: &baselines,
            values: &values,
        };
        let advantages = match self.multi_objective_aggregation {
            MultiObjectiveAggregation::SumThenNormalize => estimate(self, outcomes),
            MultiObjectiveAggregation::NormalizeThenSum => {
                let parts: Vec<Vec<Option<f64>>> = rollouts
                    .iter()
                    .map(|r| {
                        r.reward_parts
                            .iter()
                            .map(|(_, value)| Some(*value))
                            .collect()
                    })
                    .collect();
                let weights = rollouts.first().map(|r| r.reward_weights.clone());
                let weights = weights.unwrap_or_default();
                outcomes.expand(&normalize_then_sum(&parts, &weights, &groups, self.adv_eps))
            }
        };
        if self.adv_estimator == AdvEstimator::Gae {
            // of the advantages as they are before they are normalised
            for (i, rollout) in rollouts.iter_mut().enumerate() {
                let (_, returns) = self.gae().estimate(&rewards[i], &values[i], &masks[i]);
                rollout.returns = returns;
            }
        }
        for ((rollout, advantages), rewards) in rollouts.iter_mut().zip(advantages).zip(&rewards) {
            rollout.advantages = advantages;
            rollout.penalised = rewards.iter().sum();
        }
        metrics
    }

    /// Which tokens are scored.
    fn mask(&self, rollouts: &mut [Rollout]) -> Vec<(String, f64)> {
        let agreed = self
            .rollout_rs
            .as_ref()
            .map(|_| self.agreed(&differences(rollouts)));
        for (i, rollout) in rollouts.iter_mut().enumerate() {
            let cut = self.mask_truncated_completions && rollout.finish == Finish::Length;
            rollout.mask = match &agreed {
                _ if cut => vec![false; rollout.completion.len()],
                Some(agreed) => agreed[i].clone(),
                None => vec![true; rollout.completion.len()],
            };
        }
        let Some(agreed) = agreed else {
            return Vec::new();
        };
        let out = |kept: &bool| f64::from(u8::from(!kept));
        let tokens: Vec<f64> = agreed.iter().flatten().map(out).collect();
        let whole = |own: &Vec<bool>| out(&own.iter().all(|kept| *kept));
        let sequences: Vec<f64> = agreed.iter().map(whole).collect();
        let name = |what: &str| format!("rollout_corr/rollout_rs_{what}");
        vec![
            (name("masked_fraction"), mean(&tokens)),
            (name("seq_masked_fraction"), mean(&sequences)),
        ]
    }

    /// Importance-sampling corrections of the scored tokens.
    fn correct(&self, rollouts: &mut [Rollout]) -> Vec<(String, f64)> {
        let Some(kind) = self.rollout_is else {
            return Vec::new();
        };
        let scored: Vec<Vec<f64>> = differences(rollouts)
            .iter()
            .zip(rollouts.iter())
            .map(|(own, rollout)| rollout.scored(own))
            .collect();
        let (weights, metrics) = self.corrections(kind, &scored);
        for (rollout, weights) in rollouts.iter_mut().zip(weights) {
            rollout.correction = weights;
        }
        metrics
    }

    /// The reward of every token: the completion's at its end, and off each of them the KL to the reference where that is
    /// asked for. The coefficient follows the KL from step to step where it is adaptive.
    fn token_rewards(
        &self,
        rollouts: &[Rollout],
        coefficients: &mut AdaptiveCoefficients,
        metrics: &mut Vec<(String, f64)>,
    ) -> Vec<Vec<f64>> {
        let coefficient = coefficients.kl.unwrap_or(self.kl_ctrl.kl_coef);
        let kls: Vec<Vec<f64>> = rollouts.iter().map(|r| self.reward_kl(r)).collect();
        if self.use_kl_in_reward {
            let scored = rollouts.iter().zip(&kls).map(|(r, kl)| r.scored(kl));
            let means: Vec<f64> = scored.map(|kl| mean(&kl)).collect();
            let current = mean(&means);
            coefficients.kl = Some(self.kl_ctrl.next(coefficient, current, rollouts.len()));
            metrics.push(("actor/reward_kl_penalty".into(), current));
            metrics.push(("actor/reward_kl_penalty_coeff".into(), coefficient));
        }
        let all = rollouts.iter().zip(&kls);
        all.map(|(rollout, kl)| token_level_rewards(rollout.reward, kl, coefficient))
            .collect()
    }

    /// The KL that a completion's token rewards are less by; zeros where they are not.
    fn reward_kl(&self, rollout: &Rollout) -> Vec<f64> {
        match rollout.ref_logp.as_ref().filter(|_| self.use_kl_in_reward) {
            None => vec![0.0; rollout.completion.len()],
            Some(reference) => {
                let pairs = rollout.old().iter().zip(reference);
                let wide = |(&old, &reference)| (f64::from(old), f64::from(reference));
                pairs
                    .map(wide)
                    .map(|(old, reference)| self.kl_penalty.estimate(old, reference))
                    .collect()
            }
        }
    }
}

/// Old log-probs of the trainer less those that the tokens were drawn with.
fn differences(rollouts: &[Rollout]) -> Vec<Vec<f64>> {
    let of = |rollout: &Rollout| {
        let pairs = rollout.old().iter().zip(&rollout.sampler_logp);
        pairs
            .map(|(&old, &sampler)| f64::from(old) - f64::from(sampler))
            .collect()
    };
    rollouts.iter().map(of).collect()
}
