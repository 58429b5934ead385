//! How far the sampler and the trainer agree, where the update's own forward is the only one that can say so.

use super::{Loss, Metric, Reduce, Scores, TokenInputs, TokenLoss};

/// Largest difference between the sampler's and the trainer's probability of a token.
pub const DIFF_MAX: &str = "training/rollout_probs_diff_max";
/// The mean one.
pub const DIFF_MEAN: &str = "training/rollout_probs_diff_mean";

/// A loss that also compares the probabilities it is given with the old ones, which are the sampler's. That says something
/// before the first optimizer step after the rollout, and no later: then the policies are the same.
#[derive(Clone, Copy)]
pub struct Compared<'a>(pub &'a dyn TokenLoss);

impl TokenLoss for Compared<'_> {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let mut loss = self.0.loss(scores, inputs);
        if let Some(old) = &inputs.old_logp {
            let found = scores.logp.clone().inner().exp();
            let difference = (found - old.clone().exp()).abs();
            loss.metrics.push(Metric {
                name: DIFF_MAX,
                reduce: Reduce::Largest,
                sum: difference.clone().max(),
            });
            loss.metrics.push(Metric {
                name: DIFF_MEAN,
                reduce: Reduce::TokenMean,
                sum: difference.sum(),
            });
        }
        loss
    }

    fn separates(&self) -> bool {
        self.0.separates()
    }
}
