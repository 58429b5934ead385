//! Supervised fine-tuning: the weighted negative log-likelihood of the demonstration's tokens.

use super::token_loss::{Loss, Metric, Scores, TokenInputs, TokenLoss};

/// −Σ weight · logp.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nll;

impl TokenLoss for Nll {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let nll = scores.logp.clone().neg() * inputs.weight();
        let metrics = vec![
            Metric::weighted_sum("train/loss", nll.clone()),
            Metric::token_mean("train/entropy", scores.entropy.clone()),
        ];
        Loss { total: nll.sum(), metrics }
    }
}
