//! Attention of one new token a sequence over its cached keys and values: live columns alone are read.

use super::parallel::{Shared, dims, elements, tensor, vectorised};
use super::real::{Real, dot, largest, sum_of};
use super::tape::{each, exact, plain, wrap};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;
use std::ops::Range;

/// What each row sees of its cache, and how scores are made.
#[derive(Clone, Debug)]
pub struct DecodeShape<'a> {
    /// Slot of the cache that each row of queries reads.
    pub slots: &'a [usize],
    /// Live columns of that slot, for each row: those that the query sees. A row that sees none gets zeros.
    pub live: &'a [Range<usize>],
    /// What products are multiplied by.
    pub scale: f64,
    /// Scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f64>,
}

/// Attention of `q`, `[rows, heads, dim]`, over a cache of keys and values `[slots, kv_heads, columns, dim]`:
/// `[rows, heads · dim]`.
///
/// `None` where the tensors are not the CPU backend's f32 or f64. Not differentiable.
#[must_use]
pub fn decode_attention(
    q: &Tensor<3>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    shape: &DecodeShape<'_>,
) -> Option<Tensor<2>> {
    if !(exact(q) && exact(keys) && exact(values)) || q.dtype() != keys.dtype() {
        return None;
    }
    let _span = span("decode attention", 0.0);
    let (q, keys, values) = (plain(q.clone()), plain(keys.clone()), plain(values.clone()));
    Some(wrap(each!(q.dtype(), attend(&q, &keys, &values, shape))))
}

fn attend<T: Real>(
    q: &FlexTensor,
    keys: &FlexTensor,
    values: &FlexTensor,
    shape: &DecodeShape<'_>,
) -> FlexTensor {
    let [rows, heads, dim] = dims(q);
    let [_, kv, columns, _] = dims(keys);
    let group = heads / kv;
    let (q, keys, values): (&[T], &[T], &[T]) = (elements(q), elements(keys), elements(values));
    let mut out = vec![T::ZERO; q.len()];
    let target = Shared(out.as_mut_ptr());
    let work = |scores: &mut Vec<T>, task: usize| {
        let (row, head) = (task / kv, task % kv);
        let live = &shape.live[row];
        let slab = (shape.slots[row] * kv + head) * columns * dim;
        let (keys, values) = (
            &keys[slab..][..columns * dim],
            &values[slab..][..columns * dim],
        );
        let at = row * heads * dim + head * group * dim;
        let q = &q[at..][..group * dim];
        // SAFETY: no other task has these heads of this row.
        #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
        let out = unsafe { std::slice::from_raw_parts_mut(target.get().add(at), group * dim) };
        let (keys, values) = (
            &keys[live.start * dim..live.end * dim],
            &values[live.start * dim..live.end * dim],
        );
        vectorised(|| one_head(q, keys, values, out, dim, scores, shape));
    };
    let tasks = rows * kv;
    let live: usize = shape.live.iter().map(ExactSizeIterator::len).sum();
    if live * heads * dim < 1 << 15 {
        let mut scores = Vec::new();
        (0..tasks).for_each(|task| work(&mut scores, task));
    } else {
        (0..tasks).into_par_iter().for_each_init(Vec::new, work);
    }
    tensor(out, [rows, heads * dim])
}

/// The query heads of one key head.
#[inline(always)]
fn one_head<T: Real>(
    q: &[T],
    keys: &[T],
    values: &[T],
    out: &mut [T],
    dim: usize,
    scores: &mut Vec<T>,
    shape: &DecodeShape<'_>,
) {
    let n = keys.len() / dim;
    if n == 0 {
        return;
    }
    scores.resize(n, T::ZERO);
    for (q, out) in q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(dim)) {
            let s = dot(q, key) * T::of(shape.scale);
            *score = match shape.softcap {
                None => s,
                Some(cap) => (s / T::of(cap)).tanh() * T::of(cap),
            };
        }
        let max = largest(scores);
        for s in scores.iter_mut() {
            *s = (*s - max).exp();
        }
        for (&weight, value) in scores.iter().zip(values.chunks_exact(dim)) {
            for (out, &value) in out.iter_mut().zip(value) {
                *out += weight * value;
            }
        }
        let inverse = T::ONE / sum_of(n, |i| scores[i]);
        for o in out.iter_mut() {
            *o = *o * inverse;
        }
    }
}
