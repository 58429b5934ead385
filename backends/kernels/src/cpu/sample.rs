//! Samples one token from every row of logits: the likeliest, or a random one of the whole distribution.

use super::prelude::*;
use super::real::sum;
use crate::shapes::SampledToken;

/// Tokens whose weights are summed at once while the sampled one is searched.
const STRIDE: usize = 256;

/// See [`crate::sample_rows`].
pub(crate) fn sample_rows(logits: &Tensor<2>, temperature: f64, uniforms: Option<&[f32]>) -> Vec<SampledToken> {
    let _span = span("draw", 0.0);
    let logits = detached(logits.clone());
    dispatch_float!(logits.dtype(), sample(&logits, temperature, uniforms))
}

fn sample<T: Real>(logits: &FlexTensor, temperature: f64, uniforms: Option<&[f32]>) -> Vec<SampledToken> {
    let [rows, vocab] = dims(logits);
    let logits: &[T] = elements(logits);
    let inverse = T::of(1.0 / temperature);
    let mut sampled = vec![SampledToken { token: 0, logp: 0.0 }; rows];
    let target = SharedPtr(sampled.as_mut_ptr());
    let one = |weights: &mut Vec<T>, row: usize| {
        weights.resize(vocab, T::ZERO);
        let z = &logits[row * vocab..][..vocab];
        let result = vectorised!({
            let likeliest = largest(z);
            let max = likeliest * inverse;
            for (weight, &z) in weights.iter_mut().zip(z) {
                *weight = (z * inverse - max).exp();
            }
            let total = sum(weights);
            let token = match uniforms {
                None => z.iter().position(|&v| v == likeliest).unwrap_or(0),
                Some(uniforms) => inverse_cdf(weights, total * T::of(f64::from(uniforms[row]))),
            };
            let logp = z[token] * inverse - (total.ln() + max);
            SampledToken { token: token as u32, logp: logp.elem() }
        });
        // SAFETY: each row is one task's.
        unsafe {
            target.get().add(row).write(result);
        }
    };
    for_each_init(rows, Vec::new, one);
    sampled
}

/// The first index at which the cumulative sum reaches a threshold; the last where rounding keeps it below.
#[inline(always)]
fn inverse_cdf<T: Real>(weights: &[T], threshold: T) -> usize {
    let mut before = T::ZERO;
    for (stride, part) in weights.chunks(STRIDE).enumerate() {
        let after = before + sum(part);
        if after >= threshold {
            let mut sum = before;
            for (i, &weight) in part.iter().enumerate() {
                sum += weight;
                if sum >= threshold {
                    return stride * STRIDE + i;
                }
            }
            return stride * STRIDE + part.len() - 1;
        }
        before = after;
    }
    weights.len() - 1
}
