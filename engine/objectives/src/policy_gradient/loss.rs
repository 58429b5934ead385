//! The implementation of [`TokenLoss`]: policy loss, KL to the reference, entropy bonus.

use super::advantages::ENTROPY;
use super::composition::PolicyGradient;
use crate::kl::kl_penalty;
use crate::policy::Ratios;
use crate::sequence_reduction::SequenceReduction;
use crate::token_loss::{Loss, Metric, Scores, TokenInputs, TokenLoss};
use burn::tensor::Tensor;

impl TokenLoss for PolicyGradient {
    fn separates(&self) -> bool {
        !self.looks_at_sequences()
    }

    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let logp = scores.logp.clone();
        let old = inputs.columns.old_logp.clone().unwrap_or_else(|| logp.clone().inner());
        let sequences = self.looks_at_sequences().then(|| SequenceReduction::new(&inputs.lengths, &logp.device()));
        let formula = self.loss.formula();
        let level = formula.level();
        let difference = logp.clone() - old.clone();
        let ratios = Ratios {
            logp: logp.clone(),
            log_ratio: level.log_ratio(difference.clone(), sequences.as_ref()),
            difference: difference.clone(),
            inputs,
            sequences: sequences.as_ref(),
            level,
        };
        let terms = formula.terms(&ratios);
        let mut policy = terms.loss * inputs.weight();
        if let Some(correction) = inputs.columns.correction.as_ref().filter(|_| !formula.takes_corrections()) {
            policy = policy * correction.clone();
        }
        if let Some(keep) = &inputs.columns.keep {
            policy = policy * keep.clone();
        }
        if let (Some(threshold), Some(sequences)) = (self.off_policy_mask, &sequences) {
            let sampler = inputs.columns.full_logp.clone().unwrap_or(old);
            policy = policy * on_policy(threshold, &logp, sampler, inputs, sequences);
        }
        let ppo_kl = formula.ppo_kl(difference);
        let mut metrics = vec![
            Metric::weighted_sum("actor/pg_loss", policy.clone()),
            Metric::token_mean("actor/pg_clipfrac", terms.clipped),
            Metric::token_mean("actor/pg_clipfrac_lower", terms.clipped_lower),
            Metric::token_mean("actor/ppo_kl", ppo_kl.clamp(-20.0, 20.0)),
            Metric::token_mean(ENTROPY, scores.entropy.clone()),
        ];
        metrics.extend(terms.metrics);
        let mut total = policy.sum();
        if let (Some(by), Some(reference)) = (self.kl_loss, &inputs.columns.ref_logp) {
            let mut kl = kl_penalty(by.estimator, logp, reference.clone());
            if by.bias_correction {
                kl = kl * ratios.log_ratio.exp();
            }
            let kl = kl * inputs.weight();
            metrics.push(Metric::weighted_sum("actor/kl_loss", kl.clone()));
            total = total + kl.sum() * by.coef;
        }
        if let Some(bonus) = &inputs.columns.bonus {
            total = total - (scores.entropy.clone() * bonus.clone()).sum();
        }
        Loss { total, metrics }
    }
}

/// 0 for tokens with a negative advantage in off-policy sequences, whose mean of sampler − logp is above the threshold
/// (DeepSeek-V3.2's sequence mask, arXiv:2512.02556). 1 for the others.
fn on_policy(
    threshold: f64,
    logp: &Tensor<1>,
    sampler: Tensor<1>,
    inputs: &TokenInputs,
    sequences: &SequenceReduction,
) -> Tensor<1> {
    let left = sequences.mean(sampler - logp.clone().inner()).greater_elem(threshold).float();
    let negative = inputs.advantage().lower_elem(0.0).float();
    (sequences.broadcast(left) * negative).neg() + 1.0
}
