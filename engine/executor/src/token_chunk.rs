//! A chunk of the head's rows with its scores: of one rank that has the whole vocabulary, or of several that share it.

use super::runtime::Runtime;
use super::tensor_parallel::{gather, sum};
use burn::tensor::{Int, Tensor};
use firebrick_core::Result;
use firebrick_models::head::{Head, HeadChunk, HeadGradients, MergedChunk, TokenScores};

/// A chunk and what its gradient needs.
pub(super) enum TokenChunk<'h> {
    /// With all logits.
    Whole(Box<HeadChunk<'h>>),
    /// With those of this rank's tokens.
    Shared(Box<MergedChunk<'h>>),
}

impl<'h> TokenChunk<'h> {
    /// Scores hidden rows `[rows, hidden]` at their targets `[rows]`. Ranks that share the vocabulary exchange one
    /// message.
    pub fn score(
        head: &'h Head<'_>,
        hidden: Tensor<2>,
        targets: Tensor<1, Int>,
        temperature: f64,
        runtime: &Runtime,
    ) -> Result<Self> {
        if head.local_tokens().is_none() {
            let chunk = head.chunk(hidden, targets, temperature);
            return Ok(Self::Whole(Box::new(chunk)));
        }
        let part = head.part(hidden, targets, temperature);
        let statistics = gather(part.statistics(), runtime)?;
        Ok(Self::Shared(Box::new(part.merged(&statistics))))
    }

    /// Its scores.
    pub fn scores(&self) -> &TokenScores {
        match self {
            Self::Whole(chunk) => &chunk.scores,
            Self::Shared(chunk) => &chunk.scores,
        }
    }

    /// Its gradients, given those of the scores, `[rows]` each. Ranks that share the vocabulary sum those of the normed
    /// rows.
    pub fn backward(
        self,
        d_logp: &Tensor<1>,
        d_entropy: Option<&Tensor<1>>,
        runtime: &Runtime,
    ) -> Result<HeadGradients> {
        match self {
            Self::Whole(chunk) => Ok(chunk.backward(d_logp, d_entropy)),
            Self::Shared(chunk) => {
                let part = chunk.backward(d_logp, d_entropy);
                let normed = sum(part.normed.clone(), runtime)?;
                Ok(part.finish(normed))
            }
        }
    }
}
