//! An optimizer step before its first backward: weights with their normalisers, and choices out of the whole step.

use super::advantage::mean;
use super::aggregate::{Denominators, token_weights};
use super::coefficients::AdaptiveCoefficients;
use super::config::ObjectiveConfig;
use super::entropy;
use super::policy::{PolicyLoss, cov};
use super::traits::OptimizerStep;
use crate::sequence::Sequence;
use firebrick_models::random::Stream;

/// Stream of Clip-Cov's draws; the optimizer step is added.
const CLIP_COV_STREAM: u64 = 3 << 32;

impl ObjectiveConfig {
    pub(super) fn prepare_step(
        &self,
        step: &mut OptimizerStep<'_>,
        coefficients: &mut AdaptiveCoefficients,
    ) {
        let max_length = step.max_length;
        let lengths: Vec<usize> = step.sequences.iter().map(|s| s.positions.len()).collect();
        let weights = self.weights(&lengths, max_length);
        for (sequence, weights) in step.sequences.iter_mut().zip(weights) {
            sequence.weights = weights;
            if self.off_policy_mask_threshold.is_none() {
                sequence.sampler_logp = Vec::new();
            }
        }
        if self.top_entropy_quantile < 1.0 {
            let entropies = scores(step, |scores| &scores.entropy);
            let kept = entropy::high_entropy_mask(&entropies, self.top_entropy_quantile);
            hand_out(step.sequences, &kept, |sequence| &mut sequence.keep);
        }
        if let Some(chosen) = self.chosen(step) {
            hand_out(step.sequences, &chosen, |sequence| &mut sequence.chosen);
        }
        self.bonus(step, coefficients);
    }

    /// Weight of every scored token of sequences with these numbers of them.
    fn weights(&self, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>> {
        let mut by = Denominators::new(lengths, max_length);
        by.scale = self.loss_scale_factor.unwrap_or(by.sequences * by.scale);
        token_weights(self.loss_agg_mode, lengths, by)
    }

    /// The tokens that KL-Cov or Clip-Cov acts on.
    fn chosen(&self, step: &OptimizerStep<'_>) -> Option<Vec<bool>> {
        if !matches!(self.policy_loss, PolicyLoss::KlCov | PolicyLoss::ClipCov) {
            return None;
        }
        let logp = scores(step, |scores| &scores.logp);
        let all = |of: fn(&Sequence) -> Vec<f64>| -> Vec<f64> {
            step.sequences.iter().flat_map(of).collect()
        };
        let advantages = all(|s| s.advantages.clone());
        let covariances = cov::covariances(&logp, &advantages);
        if self.policy_loss == PolicyLoss::KlCov {
            return Some(cov::kl_cov_mask(&covariances, self.kl_cov_ratio));
        }
        let old = all(|s| s.old_logp.iter().map(|&l| f64::from(l)).collect());
        let clipped: Vec<bool> = (0..logp.len())
            .map(|i| {
                let ratio = (logp[i] - old[i]).clamp(-20.0, 20.0).exp();
                let bounded = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high);
                -advantages[i] * bounded > -advantages[i] * ratio
            })
            .collect();
        let random = Stream::new(step.seed, CLIP_COV_STREAM + step.step);
        Some(cov::clip_cov_mask(self, &covariances, &clipped, random))
    }

    /// Weights of the entropy bonus: those of a loss over the tokens that it acts on, times the coefficient of this step.
    fn bonus(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        if !self.has_bonus() {
            return;
        }
        let kept: Vec<usize> = step
            .sequences
            .iter()
            .map(|s| kept_tokens(s).count())
            .collect();
        let coefficient = if self.use_adaptive_entropy {
            coefficients.entropy_of(self).applied(self.entropy_target)
        } else {
            self.entropy_coeff
        };
        let weights = self.weights(&kept, step.max_length);
        for (sequence, weights) in step.sequences.iter_mut().zip(weights) {
            let mut bonus = vec![0.0; sequence.positions.len()];
            for (t, weight) in kept_tokens(sequence).zip(weights) {
                bonus[t] = weight * coefficient;
            }
            sequence.bonus = bonus;
        }
        // where the bonus looks at some tokens only, so does the controller
        if let Some(scores) = step.scores.filter(|_| self.top_entropy_quantile < 1.0) {
            let pairs = step.sequences.iter().zip(&scores.entropy);
            let of_kept: Vec<f64> = pairs
                .flat_map(|(s, own)| kept_tokens(s).map(|t| f64::from(own[t])))
                .collect();
            coefficients.measured = Some(mean(&of_kept));
        }
    }
}

/// Which of a sequence's scored tokens the policy term and the bonus look at.
fn kept_tokens(sequence: &Sequence) -> impl Iterator<Item = usize> {
    let all = 0..sequence.positions.len();
    all.filter(|&t| sequence.keep.get(t).is_none_or(|&keep| keep > 0.5))
}

/// Scores of all tokens of the step.
fn scores(
    step: &OptimizerStep<'_>,
    of: fn(&super::loss_sums::MicroScores) -> &Vec<Vec<f32>>,
) -> Vec<f64> {
    let scores = step
        .scores
        .expect("an objective that needs scores is prepared with them");
    of(scores).iter().flatten().map(|&v| f64::from(v)).collect()
}

/// A choice among all tokens of the step, to their sequences.
fn hand_out(sequences: &mut [Sequence], choice: &[bool], into: fn(&mut Sequence) -> &mut Vec<f64>) {
    let mut choice = choice.iter().map(|&c| f64::from(u8::from(c)));
    for sequence in sequences {
        let own = choice.by_ref().take(sequence.positions.len()).collect();
        *into(sequence) = own;
    }
}
