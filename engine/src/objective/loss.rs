//! The loss of tokens: policy term, KL to the reference, entropy bonus.

use super::coefficients::AdaptiveCoefficients;
use super::config::ObjectiveConfig;
use super::kl::kl_penalty;
use super::loss_sums::LossSums;
use super::policy::{PolicyLoss, Ratios};
use super::sequence_reduction::SequenceReduction;
use super::token_loss::{Loss, Scores, TokenInputs, TokenLoss, token_mean, weighted};
use super::traits::{Needs, Objective, OptimizerStep};
use crate::rollout::Rollout;
use burn::tensor::Tensor;

/// Mean entropy of the scored tokens.
const ENTROPY: &str = "actor/entropy";

impl TokenLoss for ObjectiveConfig {
    fn separates(&self) -> bool {
        !self.looks_at_sequences()
    }

    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let logp = scores.logp.clone();
        let old = inputs
            .old_logp
            .clone()
            .unwrap_or_else(|| logp.clone().inner());
        let segments = self
            .looks_at_sequences()
            .then(|| SequenceReduction::new(&inputs.lengths, &logp.device()));
        let difference = logp.clone() - old.clone();
        let ratios = Ratios {
            logp: logp.clone(),
            log_ratio: self.log_ratio(difference.clone(), segments.as_ref()),
            difference: difference.clone(),
            inputs,
            segments: segments.as_ref(),
            level: self.importance_sampling_level,
        };
        let terms = self.policy_terms(&ratios);
        let mut policy = terms.loss * inputs.weight.clone();
        if let Some(correction) = inputs
            .correction
            .as_ref()
            .filter(|_| !self.corrects_itself())
        {
            policy = policy * correction.clone();
        }
        if let Some(keep) = &inputs.keep {
            policy = policy * keep.clone();
        }
        if let (Some(threshold), Some(segments)) = (self.off_policy_mask_threshold, &segments) {
            let sampler = inputs.sampler_logp.clone().unwrap_or(old);
            policy = policy * on_policy(threshold, &logp, sampler, inputs, segments);
        }
        let ppo_kl = match self.policy_loss {
            PolicyLoss::KlCov => difference.abs(),
            _ => difference.neg(),
        };
        let mut metrics = vec![
            weighted("actor/pg_loss", policy.clone()),
            token_mean("actor/pg_clipfrac", terms.clipped),
            token_mean("actor/pg_clipfrac_lower", terms.clipped_lower),
            token_mean("actor/ppo_kl", ppo_kl.clamp(-20.0, 20.0)),
            token_mean(ENTROPY, scores.entropy.clone()),
        ];
        metrics.extend(terms.metrics);
        let mut total = policy.sum();
        if let (true, Some(reference)) = (self.kl_loss_coef != 0.0, &inputs.ref_logp) {
            let mut kl = kl_penalty(self.kl_loss_type, logp, reference.clone());
            if self.use_bias_correction_kl {
                kl = kl * ratios.log_ratio.exp();
            }
            let kl = kl * inputs.weight.clone();
            metrics.push(weighted("actor/kl_loss", kl.clone()));
            total = total + kl.sum() * self.kl_loss_coef;
        }
        if let Some(bonus) = &inputs.bonus {
            total = total - (scores.entropy.clone() * bonus.clone()).sum();
        }
        Loss { total, metrics }
    }
}

/// 0 for tokens with a negative advantage in sequences that the policy has left: whose mean of sampler − logp is above the
/// threshold (DeepSeek-V3.2's sequence mask, arXiv:2512.02556). 1 for the others.
fn on_policy(
    threshold: f64,
    logp: &Tensor<1>,
    sampler: Tensor<1>,
    inputs: &TokenInputs,
    segments: &SequenceReduction,
) -> Tensor<1> {
    let left = segments
        .mean(sampler - logp.clone().inner())
        .greater_elem(threshold)
        .float();
    let negative = inputs.advantage.clone().lower_elem(0.0).float();
    (segments.spread(left) * negative).neg() + 1.0
}

impl ObjectiveConfig {
    /// Whether the policy term takes the importance-sampling correction in itself.
    fn corrects_itself(&self) -> bool {
        matches!(self.policy_loss, PolicyLoss::GeoMean | PolicyLoss::Vespo)
    }
}

impl Objective for ObjectiveConfig {
    fn needs(&self) -> Needs {
        self.needed()
    }

    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        self.advantages_of(rollouts, coefficients)
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        self.prepare_step(step, coefficients);
    }

    fn update_coefficients(&self, sums: &LossSums, coefficients: &mut AdaptiveCoefficients) {
        if !self.use_adaptive_entropy {
            return;
        }
        let of_all = sums.values().find(|(name, _)| *name == ENTROPY);
        let measured = coefficients.measured.take().or(of_all.map(|(_, v)| v));
        if let Some(entropy) = measured {
            coefficients.entropy_of(self).update(entropy, self);
        }
    }
}
