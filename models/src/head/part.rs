//! The head of a vocabulary that ranks share (Shoeybi et al., 2019, arXiv:1909.08053): each has the logits of some
//! tokens.
//!
//! With z of its own tokens, each rank gives of every row `m = max z`, `s = Σ e^(z−m)`, `e = Σ e^(z−m) z`, and the
//! target's z where the target is its own. Of all ranks together `M = max m`, `logsumexp = M + log Σ s e^(m−M)` and `Σ
//! p z = Σ e e^(m−M) / Σ s e^(m−M)`, from which each has the scores of all tokens and differentiates its own logits.

use super::{Head, HeadGradients, TokenScores};
use crate::tensor_group::local_ids;
use burn::tensor::{Int, Tensor};
use firebrick_backends::kernels::{RowGradients, logit_gradient};
use std::ops::Range;

/// Numbers that a rank gives of a row.
const COLUMNS: usize = 4;

/// A chunk of rows with the logits of this rank's tokens.
#[derive(Debug)]
pub struct PartChunk<'a> {
    head: &'a Head<'a>,
    temperature: f64,
    hidden: Tensor<2>,
    normed: Tensor<2>,
    /// Targets counted from the first own token, 0 for those of other ranks.
    targets: Tensor<1, Int>,
    /// One where the target is this rank's own, `[rows, 1]`.
    is_own: Tensor<2>,
    z: Tensor<2>,
    /// `m`, `s`, `e`, and the target's z or 0: `[rows, 4]`.
    statistics: Tensor<2>,
}

/// A chunk with the scores of the whole vocabulary, and what their gradient needs.
#[derive(Debug)]
pub struct MergedChunk<'a> {
    part: PartChunk<'a>,
    log_sum: Tensor<2>,
    mean_z: Tensor<2>,
    /// The chunk's scores.
    pub scores: TokenScores,
}

/// A rank's gradients of a chunk before those of the normed rows are summed over the ranks.
#[derive(Debug)]
pub struct PartGradients<'a> {
    head: &'a Head<'a>,
    hidden: Tensor<2>,
    /// A part of the gradient of the normed rows, `[rows, hidden]`.
    pub normed: Tensor<2>,
    projection: Option<Tensor<2>>,
}

impl<'a> Head<'a> {
    /// The tokens whose logits this rank has, where ranks share the vocabulary.
    pub fn local_tokens(&self) -> Option<&Range<usize>> {
        self.local_tokens.as_ref()
    }

    /// [`Self::chunk`] of a rank that has some of the tokens.
    ///
    /// # Panics
    /// If it has all of them.
    pub fn part(&'a self, hidden: Tensor<2>, targets: Tensor<1, Int>, temperature: f64) -> PartChunk<'a> {
        let tokens = self.local_tokens.clone().expect("a share of the vocabulary");
        let normed = self.normed(&hidden);
        let logits = self.cap(self.raw(&normed));
        let z = if (temperature - 1.0).abs() < f64::EPSILON { logits } else { logits / temperature };
        let [rows, _] = z.dims();
        let (targets, others) = local_ids(tokens, targets);
        let is_own = Tensor::<2>::ones([rows, 1], (&z.device(), z.dtype())).mask_fill(others.reshape([rows, 1]), 0.0);
        let max = z.clone().max_dim(1);
        let exp = (z.clone() - max.clone()).exp();
        let sum = exp.clone().sum_dim(1);
        let weighted = (exp * z.clone()).sum_dim(1);
        let target = z.clone().gather(1, targets.clone().reshape([rows, 1])) * is_own.clone();
        PartChunk {
            head: self,
            temperature,
            hidden,
            normed,
            targets,
            is_own,
            z,
            statistics: Tensor::cat(vec![max, sum, weighted, target], 1),
        }
    }
}

impl<'a> PartChunk<'a> {
    /// Statistics of this rank's logits for the other ranks, `[rows, 4]`.
    pub fn statistics(&self) -> &Tensor<2> {
        &self.statistics
    }

    /// The scores of the whole vocabulary, from what all ranks give, by rank: `[rows, 4]` each.
    ///
    /// # Panics
    /// If there is no rank.
    pub fn merged(self, ranks: &[Tensor<2>]) -> MergedChunk<'a> {
        let column = |rank: &Tensor<2>, place: usize| rank.clone().narrow(1, place, 1);
        let max = ranks.iter().map(|rank| column(rank, 0)).reduce(Tensor::max_pair).expect("this rank");
        let summed = |place: usize| {
            let parts = ranks.iter().map(|rank| {
                let scale = (column(rank, 0) - max.clone()).exp();
                column(rank, place) * scale
            });
            parts.reduce(|a, b| a + b).expect("this rank")
        };
        let (sum, weighted) = (summed(1), summed(2));
        let target = ranks.iter().map(|rank| column(rank, COLUMNS - 1)).reduce(|a, b| a + b).expect("this rank");
        let log_sum = sum.clone().log() + max.clone();
        let mean_z = weighted / sum;
        let [rows, _] = target.dims();
        let scores = TokenScores {
            logp: (target - log_sum.clone()).reshape([rows]),
            entropy: (log_sum.clone() - mean_z.clone()).reshape([rows]),
        };
        MergedChunk { part: self, log_sum, mean_z, scores }
    }
}

impl<'a> MergedChunk<'a> {
    /// This rank's part of the gradients, given those of the scores, `[rows]` each; `d_entropy` is `None` where the
    /// loss has no entropy term.
    pub fn backward(self, d_logp: &Tensor<1>, d_entropy: Option<&Tensor<1>>) -> PartGradients<'a> {
        let PartChunk { head, temperature, hidden, normed, targets, is_own, z, .. } = self.part;
        let [rows, _] = z.dims();
        let d_logp = d_logp.clone().reshape([rows, 1]);
        let d_target = d_logp.clone() * is_own;
        let d_entropy = d_entropy.map(|d| d.clone().reshape([rows, 1]));
        let upstream = RowGradients { logp: d_logp, target: d_target, entropy: d_entropy };
        let dz = logit_gradient(&z, [self.log_sum, self.mean_z], &targets, upstream, head.scaling(temperature));
        let (normed, projection) = head.product_gradients(&dz, &normed);
        PartGradients { head, hidden, normed, projection }
    }
}

impl PartGradients<'_> {
    /// The gradients, given that of the normed rows: the sum of the ranks' parts. That of the projection is of this
    /// rank's tokens.
    pub fn finish(self, d_normed: Tensor<2>) -> HeadGradients {
        let (hidden, norm) = self.head.norm_backward(self.hidden, d_normed);
        HeadGradients { hidden, norm, projection: self.projection, bias: None }
    }
}
