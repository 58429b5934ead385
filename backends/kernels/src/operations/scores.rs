//! Log-probs and entropies of rows of logits, and the gradient of both.
//!
//! With z the logits after [`Scaling`] and p = softmax(z): the log-prob of token t is `z_t − logsumexp(z)`, the entropy
//! is `H = logsumexp(z) − Σ p z`, and `∂/∂z = g_logp (1_t − p) − g_H p (z − Σ p z)`.

use super::{available, no_kernel, operations};
use crate::choice::{Operation, TILE};
use crate::shapes::{RowGradients, RowScores, RunningScores, Scaling, ScoreGradients};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};
use firebrick_device::device::is_cpu;
use firebrick_device::precision::widened;

operations! {
    /// `cap · tanh(logits / cap)` of raw logits, `[rows, vocab]`, in f32 or wider, rounded as kernels that score logits
    /// cap them. Not differentiable on GPUs.
    pub fn softcap(logits: Tensor<2>, cap: f64) -> Tensor<2> {
        cube: scores if plain(Operation::Scores, &[&logits]);
        else { (widened(logits) * cap.recip()).tanh() * cap }
    }

    /// Log-probs of targets, `[rows]`, and entropies, given raw logits, `[rows, vocab]`. Not differentiable:
    /// [`score_gradient`] is its gradient.
    pub fn score_rows(logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> RowScores {
        cpu: scores if alike(&[logits]) && is_full_precision(logits);
        cube: scores if alike(Operation::Scores, &[logits]);
        else {
            let [rows, _] = logits.dims();
            let z = scaled(logits.clone(), scaling);
            let max = z.clone().max_dim(1);
            let exp = (z.clone() - max.clone()).exp();
            let sum = exp.clone().sum_dim(1);
            let lse = sum.clone().log() + max;
            let mean = (exp / sum * z.clone()).sum_dim(1);
            let target = z.gather(1, targets.clone().reshape([rows, 1]));
            let [logp, entropy, lse, mean] =
                [target - lse.clone(), lse.clone() - mean.clone(), lse, mean].map(|t| t.reshape([rows]));
            RowScores { logp, entropy, lse, mean }
        }
    }

    /// The gradient with respect to raw logits, given the gradients with respect to log-probs and, where the loss
    /// depends on them, entropies. Overwrites the logits where they are not shared. Logits and gradient are `[rows,
    /// vocab]`, targets `[rows]`.
    pub fn score_gradient(
        logits: Tensor<2>,
        targets: &Tensor<1, Int>,
        scores: &RowScores,
        upstream: ScoreGradients<'_>,
        scaling: Scaling,
    ) -> Tensor<2> {
        cpu: scores if alike(&[&logits]) && is_full_precision(&logits);
        cube: scores if alike(Operation::Scores, &[&logits]);
        else {
            let [rows, _] = logits.dims();
            let column = |t: &Tensor<1>| t.clone().reshape([rows, 1]);
            let logp = column(upstream.d_logp);
            let upstream =
                RowGradients { target: logp.clone(), logp, entropy: upstream.d_entropy.map(column) };
            let [lse, mean] = [&scores.lse, &scores.mean].map(column);
            logit_gradient(&scaled(logits, scaling), [lse, mean], targets, upstream, scaling)
        }
    }

    /// Updates the statistics of rows, `running`, by one more tile of their raw logits, `[rows, width]`, which begins
    /// at column `first` of the vocabulary. [`finish_scores`] ends them after the last tile.
    ///
    /// # Panics
    /// On devices without a [`vocabulary_tile`].
    pub fn score_tile(
        logits: &Tensor<2>,
        first: usize,
        targets: &Tensor<1, Int>,
        running: Option<RunningScores>,
        scaling: Scaling,
    ) -> RunningScores {
        cube: scores if alike(Operation::Scores, &[logits]);
        else { no_kernel("score_tile") }
    }

    /// Log-probs and entropies after the last tile of the vocabulary.
    pub fn finish_scores(running: RunningScores) -> RowScores {
        cube: scores;
        else { no_kernel("finish_scores") }
    }

    /// [`score_gradient`] of one tile of the logits, which begins at column `first` of the vocabulary. Logits and
    /// gradient are `[rows, tile]`, targets `[rows]`.
    ///
    /// # Panics
    /// On devices without a [`vocabulary_tile`].
    pub fn tile_gradient(
        logits: Tensor<2>,
        first: usize,
        targets: &Tensor<1, Int>,
        scores: &RowScores,
        upstream: ScoreGradients<'_>,
        scaling: Scaling,
    ) -> Tensor<2> {
        cube: scores if alike(Operation::Scores, &[&logits]);
        else { no_kernel("tile_gradient") }
    }
}

/// The columns of a tile where kernels score the vocabulary in tiles, so that never all logits exist at once. `None`
/// where they score whole rows, or not at all.
pub fn vocabulary_tile(device: &Device) -> Option<usize> {
    (!is_cpu(device) && available(Operation::Scores, device)).then_some(TILE)
}

/// The gradient with respect to raw logits in tensor operations, given logits after `scaling`, `[rows, vocab]`, and
/// their `logsumexp(z)` and `Σ p z`, `[rows, 1]` each.
pub fn logit_gradient(
    z: &Tensor<2>,
    [lse, mean]: [Tensor<2>; 2],
    targets: &Tensor<1, Int>,
    upstream: RowGradients,
    scaling: Scaling,
) -> Tensor<2> {
    let [rows, _] = z.dims();
    let probs = (z.clone() - lse).exp();
    let dz = match upstream.entropy {
        None => probs * upstream.logp.neg(),
        Some(entropy) => ((z.clone() - mean) * entropy + upstream.logp) * probs.neg(),
    };
    // one target a row, so no two additions meet
    let dz = dz.scatter(1, targets.clone().reshape([rows, 1]), upstream.target, IndexingUpdateOp::Add);
    raw_gradient(z, dz, scaling)
}

/// Logits after `scaling`, in tensor operations.
fn scaled(logits: Tensor<2>, scaling: Scaling) -> Tensor<2> {
    let capped = match scaling.softcap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits,
    };
    over_temperature(capped, scaling.temperature)
}

/// The gradient with respect to raw logits, given that of scaled ones, `z`.
fn raw_gradient(z: &Tensor<2>, dz: Tensor<2>, scaling: Scaling) -> Tensor<2> {
    let capped = match scaling.softcap {
        Some(cap) => {
            let t = z.clone() * (scaling.temperature / cap);
            dz * (t.clone() * t).neg().add_scalar(1.0)
        }
        None => dz,
    };
    over_temperature(capped, scaling.temperature)
}

fn over_temperature(x: Tensor<2>, temperature: f64) -> Tensor<2> {
    if (temperature - 1.0).abs() >= f64::EPSILON { x / temperature } else { x }
}
