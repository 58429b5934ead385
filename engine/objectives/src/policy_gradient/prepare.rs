//! Values of an optimizer step that are fixed before its first backward: token weights with their normalizers, and
//! tokens selected from the whole step.

use super::composition::PolicyGradient;
use crate::advantage::mean;
use crate::coefficients::AdaptiveCoefficients;
use crate::entropy::{EntropyBonus, high_entropy_mask};
use crate::loss_sums::MicroScores;
use crate::policy::{ClipCov, PolicyLoss, cov};
use crate::traits::OptimizerStep;
use firebrick_core::sequence::{Sequence, TokenColumns};
use firebrick_models::random::Stream;

/// Stream of Clip-Cov's draws; the optimizer step is added.
const CLIP_COV_STREAM: u64 = 3 << 32;

impl PolicyGradient {
    pub(super) fn prepare_step(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        step.set_weights(self.aggregation);
        if self.kl_loss.is_none() && self.entropy_bonus.is_none() && step.sequences.iter().all(is_masked_out) {
            // nothing of the loss is left
            for weight in step.sequences.iter_mut().flat_map(|s| s.columns.weight.iter_mut().flatten()) {
                *weight = 0.0;
            }
        }
        if self.off_policy_mask.is_none() {
            for sequence in step.sequences.iter_mut() {
                sequence.columns.full_logp = None;
            }
        }
        if let Some(share) = self.top_entropy {
            let entropies = scores(step, |scores| &scores.entropy);
            let kept = high_entropy_mask(&entropies, share);
            assign(step.sequences, &kept, |columns| &mut columns.keep);
        }
        if let Some(chosen) = self.chosen(step) {
            assign(step.sequences, &chosen, |columns| &mut columns.chosen);
        }
        if let Some(bonus) = &self.entropy_bonus {
            self.set_entropy_bonus(bonus, step, coefficients);
        }
    }

    /// The tokens that KL-Cov or Clip-Cov acts on.
    fn chosen(&self, step: &OptimizerStep<'_>) -> Option<Vec<bool>> {
        match self.loss {
            PolicyLoss::KlCov(by) => Some(cov::kl_cov_mask(&StepTokens::new(step).covariances, by.kl_cov_ratio)),
            PolicyLoss::ClipCov(by) => Some(clip_cov_tokens(by, step)),
            _ => None,
        }
    }

    /// Weights of the entropy bonus: those of a loss over the tokens that it acts on, times the coefficient of this
    /// step.
    fn set_entropy_bonus(
        &self,
        bonus: &EntropyBonus,
        step: &mut OptimizerStep<'_>,
        coefficients: &mut AdaptiveCoefficients,
    ) {
        let kept: Vec<usize> = step.sequences.iter().map(|s| kept_tokens(s).count()).collect();
        let coefficient = match bonus {
            EntropyBonus::Fixed { coef } => *coef,
            EntropyBonus::Adaptive(by) => coefficients.entropy_coefficient(by).applied(by.target),
        };
        let weights = self.aggregation.weights(&kept, step.max_length);
        for (sequence, weights) in step.sequences.iter_mut().zip(weights) {
            let mut bonus = vec![0.0; sequence.positions.len()];
            for (t, weight) in kept_tokens(sequence).zip(weights) {
                bonus[t] = weight * coefficient;
            }
            sequence.columns.bonus = Some(bonus);
        }
        // the controller measures the entropy of the tokens that the bonus acts on
        if let Some(scores) = step.scores.filter(|_| self.top_entropy.is_some()) {
            let pairs = step.sequences.iter().zip(&scores.entropy);
            let entropies: Vec<f64> = pairs.flat_map(|(s, row)| kept_tokens(s).map(|t| f64::from(row[t]))).collect();
            coefficients.measured = Some(mean(&entropies));
        }
    }
}

/// Log-probs, advantages and their covariances of all tokens of a step.
struct StepTokens {
    logp: Vec<f64>,
    advantages: Vec<f64>,
    covariances: Vec<f64>,
}

impl StepTokens {
    fn new(step: &OptimizerStep<'_>) -> Self {
        let logp = scores(step, |scores| &scores.logp);
        let advantages: Vec<f64> =
            step.sequences.iter().flat_map(|s| s.columns.advantage.iter().flatten().copied()).collect();
        let covariances = cov::covariances(&logp, &advantages);
        Self { logp, advantages, covariances }
    }
}

/// The tokens that Clip-Cov leaves out, drawn from those that the clip leaves alone.
fn clip_cov_tokens(by: ClipCov, step: &OptimizerStep<'_>) -> Vec<bool> {
    let StepTokens { logp, advantages, covariances } = StepTokens::new(step);
    let old: Vec<f64> = step.sequences.iter().flat_map(|s| s.columns.old_logp.iter().flatten().copied()).collect();
    let clipped: Vec<bool> = (0..logp.len())
        .map(|i| {
            let ratio = (logp[i] - old[i]).clamp(-20.0, 20.0).exp();
            let bounded = ratio.clamp(1.0 - by.range.clip_ratio_low, 1.0 + by.range.clip_ratio_high);
            -advantages[i] * bounded > -advantages[i] * ratio
        })
        .collect();
    let random = Stream::new(step.seed, CLIP_COV_STREAM + step.step);
    cov::clip_cov_mask(by, &covariances, &clipped, random)
}

/// Returns true if the correction masks all tokens of a sequence.
fn is_masked_out(sequence: &Sequence) -> bool {
    let correction = sequence.columns.correction.as_ref();
    correction.is_some_and(|weights| weights.iter().all(|weight| *weight == 0.0))
}

/// The scored tokens of a sequence that the policy loss and the entropy bonus look at.
fn kept_tokens(sequence: &Sequence) -> impl Iterator<Item = usize> {
    let tokens = 0..sequence.positions.len();
    let keep = sequence.columns.keep.as_ref();
    tokens.filter(move |&t| keep.is_none_or(|keep| keep[t] > 0.5))
}

/// Scores of all tokens of the step.
fn scores(step: &OptimizerStep<'_>, column: fn(&MicroScores) -> &Vec<Vec<f32>>) -> Vec<f64> {
    let scores = step.scores.expect("an objective that needs scores is prepared with them");
    column(scores).iter().flatten().map(|&v| f64::from(v)).collect()
}

/// Writes a choice among all tokens of the step into a column of their sequences.
fn assign(sequences: &mut [Sequence], choice: &[bool], into: fn(&mut TokenColumns<Vec<f64>>) -> &mut Option<Vec<f64>>) {
    let mut choice = choice.iter().map(|&c| f64::from(u8::from(c)));
    for sequence in sequences {
        let column = choice.by_ref().take(sequence.positions.len()).collect();
        *into(&mut sequence.columns) = Some(column);
    }
}
