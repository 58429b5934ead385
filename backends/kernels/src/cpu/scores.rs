//! Log-probabilities and entropies of rows of logits, and the gradient of both, in one pass each.
//!
//! With z = softcap(logits) / τ and p = softmax(z): log-prob of token t is `z_t − logsumexp(z)`, entropy is
//! `H = logsumexp(z) − Σ p z`, and `∂/∂z = g_logp (1_t − p) − g_H p (z − Σ p z)`.

use super::prelude::*;
use super::real::reduce_lanes;
use crate::shapes::{RowScores, Scaling, ScoreGradients};
use burn::tensor::Int;

/// Rows of a task.
const ROWS: usize = 4;

/// See [`crate::score_rows`].
pub(crate) fn score_rows(logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> RowScores {
    let _span = span("scores", 0.0);
    let logits = detached(logits.clone());
    let [rows, _] = dims(&logits);
    let scored = dispatch_float!(logits.dtype(), score(&logits, &indices(targets), scaling));
    let scored: Tensor<2> = to_tensor(scored);
    let column = |i| scored.clone().narrow(0, i, 1).reshape([rows]);
    RowScores { logp: column(0), entropy: column(1), lse: column(2), mean: column(3) }
}

/// See [`crate::score_gradient`].
pub(crate) fn score_gradient(
    logits: Tensor<2>,
    targets: &Tensor<1, Int>,
    scores: &RowScores,
    upstream: ScoreGradients<'_>,
    scaling: Scaling,
) -> Tensor<2> {
    let _span = span("scores", 0.0);
    let row_inputs = [
        Some(scores.lse.clone()),
        Some(scores.mean.clone()),
        Some(upstream.d_logp.clone()),
        upstream.d_entropy.cloned(),
    ]
    .map(|t| t.map(detached));
    let logits = detached(logits);
    let targets = indices(targets);
    to_tensor(dispatch_float!(logits.dtype(), gradient(logits, &targets, &row_inputs, scaling)))
}

fn indices(targets: &Tensor<1, Int>) -> Vec<usize> {
    let data = targets.clone().into_data();
    data.iter::<i64>().map(|t| t as usize).collect()
}

/// Rows of log-probs, entropies, logsumexps and means, `[4, rows]`.
fn score<T: Real>(logits: &FlexTensor, targets: &[usize], scaling: Scaling) -> FlexTensor {
    let [rows, vocab] = dims(logits);
    let logits: &[T] = elements(logits);
    let mut scored = vec![T::ZERO; rows * 4];
    // the work is proportional to the logits, not to the output
    let parallel = rows * vocab > 1 << 15;
    let body = |block: usize, out: &mut [T]| {
        vectorised!({
            let mut z = vec![T::ZERO; vocab];
            for (i, out) in out.chunks_exact_mut(4).enumerate() {
                let row = block * ROWS + i;
                scale(&logits[row * vocab..][..vocab], &mut z, scaling);
                let max = largest(&z);
                let (mut sum, mut moment) = ([T::ZERO; 16], [T::ZERO; 16]);
                let whole = vocab - vocab % 16;
                for start in (0..whole).step_by(16) {
                    for lane in 0..16 {
                        let centred = z[start + lane] - max;
                        let e = centred.exp();
                        sum[lane] += e;
                        moment[lane] += e * centred;
                    }
                }
                let (mut sum_of_rest, mut moment_of_rest) = (T::ZERO, T::ZERO);
                for &value in &z[whole..] {
                    let e = (value - max).exp();
                    sum_of_rest += e;
                    moment_of_rest += e * (value - max);
                }
                // as `sum` adds the weights of a row from which a token is sampled
                let sum = reduce_lanes(sum) + sum_of_rest;
                let lse = sum.ln() + max;
                let mean = (reduce_lanes(moment) + moment_of_rest) / sum + max;
                out[0] = z[targets[row]] - lse;
                out[1] = lse - mean;
                out[2] = lse;
                out[3] = mean;
            }
        });
    };
    by_chunks(&mut scored, ROWS * 4, parallel, body);
    let by_column = (0..4).flat_map(|column| scored.iter().skip(column).step_by(4).copied()).collect();
    tensor::<T>(by_column, [4, rows])
}

#[inline(always)]
fn scale<T: Real>(logits: &[T], z: &mut [T], scaling: Scaling) {
    let inverse = T::of(1.0 / scaling.temperature);
    match scaling.softcap {
        None => {
            for (z, &logit) in z.iter_mut().zip(logits) {
                *z = logit * inverse;
            }
        }
        Some(cap) => {
            let (cap, shrink) = (T::of(cap), T::of(1.0 / cap));
            for (z, &logit) in z.iter_mut().zip(logits) {
                *z = (logit * shrink).tanh() * cap * inverse;
            }
        }
    }
}

fn gradient<T: Real>(
    mut logits: FlexTensor,
    targets: &[usize],
    inputs: &[Option<FlexTensor>; 4],
    scaling: Scaling,
) -> FlexTensor {
    let [rows, vocab] = dims(&logits);
    let [lse, mean, d_logp, d_entropy] = inputs.each_ref().map(|t| t.as_ref().map(|t| elements::<T>(t)));
    let (Some(lse), Some(mean), Some(d_logp)) = (lse, mean, d_logp) else {
        unreachable!("always given");
    };
    if !(logits.is_unique() && logits.layout().start_offset() == 0) {
        logits = tensor(elements::<T>(&logits).to_vec(), [rows, vocab]);
    }
    let inverse = T::of(1.0 / scaling.temperature);
    let values = &mut logits.storage_mut::<T>()[..rows * vocab];
    by_rows(values, vocab, ROWS, |block, out| {
        vectorised!({
            for (i, out) in out.chunks_exact_mut(vocab).enumerate() {
                let row = block * ROWS + i;
                let (lse, mean, d_logp) = (lse[row], mean[row], d_logp[row]);
                let d_entropy = d_entropy.map_or(T::ZERO, |d| d[row]);
                let target = targets[row];
                let one = |z: T| -((z - lse).exp() * (d_logp + d_entropy * (z - mean)));
                match scaling.softcap {
                    None => {
                        for out in out.iter_mut() {
                            *out = one(*out * inverse) * inverse;
                        }
                        out[target] += d_logp * inverse;
                    }
                    Some(cap) => {
                        let (cap, shrink) = (T::of(cap), T::of(1.0 / cap));
                        let slope = |t: T| (T::ONE - t * t) * inverse;
                        let t = (out[target] * shrink).tanh();
                        for out in out.iter_mut() {
                            let t = (*out * shrink).tanh();
                            *out = one(t * cap * inverse) * slope(t);
                        }
                        out[target] += d_logp * slope(t);
                    }
                }
            }
        });
    });
    logits
}
