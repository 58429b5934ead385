//! Mismatch of sampler and trainer: how far apart their probabilities of the same tokens are, measured in the update's
//! own forward where no other pass computes them.

use super::token_loss::{Loss, Metric, Reduction, Scores, TokenInputs, TokenLoss};

/// Metric: the largest difference between the sampler's and the trainer's probability of a token.
pub const DIFF_MAX: &str = "training/rollout_probs_diff_max";
/// Metric: the mean difference.
pub const DIFF_MEAN: &str = "training/rollout_probs_diff_mean";

/// A loss that also reports how far the probabilities it is given are from the old ones, which are the sampler's. This
/// measures the mismatch in the first optimizer step after a rollout only: until then both have the same weights.
#[derive(Clone, Copy)]
pub struct MismatchMetrics<'a>(pub &'a dyn TokenLoss);

impl TokenLoss for MismatchMetrics<'_> {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let mut loss = self.0.loss(scores, inputs);
        if let Some(old) = &inputs.columns.old_logp {
            let current = scores.logp.clone().inner().exp();
            let difference = (current - old.clone().exp()).abs();
            loss.metrics.push(Metric { name: DIFF_MAX, reduction: Reduction::Max, sum: difference.clone().max() });
            loss.metrics.push(Metric { name: DIFF_MEAN, reduction: Reduction::TokenMean, sum: difference.sum() });
        }
        loss
    }

    fn separates(&self) -> bool {
        self.0.separates()
    }
}
