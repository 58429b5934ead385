//! The softmax of attention, of whole sequences and of decoding: one order of additions.

use super::prelude::*;
use super::real::sum;

/// Tokens whose values one chain of fused multiply-adds sums, counted from the first of a sequence: sums of their
/// products are added in their order. Hidden tokens of a chain have weight 0, which changes no sum.
pub(super) const MIXED: usize = 128;

/// Tokens in parts that end at multiples of [`MIXED`].
#[inline(always)]
pub(super) fn mixed_parts(tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let ends = (tokens.start / MIXED..tokens.end.div_ceil(MIXED)).map(|part| (part + 1) * MIXED);
    ends.map(move |end| tokens.start.max(end - MIXED)..tokens.end.min(end))
}

/// How scores follow from products.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    pub(super) scale: f64,
    pub(super) softcap: Option<f64>,
}

/// Turns a query's products with keys into probabilities, in place; those outside `seen` become 0. A sink takes part,
/// and is left out: its share is the result. The products are of tokens from a multiple of [`LANES`] on, and as many as
/// a multiple of it, so that sums do not depend on which hidden tokens are there.
#[inline(always)]
pub(super) fn softmax<T: Real>(products: &mut [T], seen: &Range<usize>, scores: Scores, sink: Option<T>) -> Option<T> {
    debug_assert!(products.len().is_multiple_of(LANES), "whole vectors");
    let scale = T::of(scores.scale);
    match scores.softcap {
        None => products[seen.clone()].iter_mut().for_each(|s| *s = *s * scale),
        Some(cap) => {
            let (shrink, cap) = (T::of(scores.scale / cap), T::of(cap));
            for s in &mut products[seen.clone()] {
                *s = (*s * shrink).tanh() * cap;
            }
        }
    }
    fill_outside(products, seen, T::LOWEST);
    let max = largest(products);
    let max = sink.map_or(max, |sink| max.larger(sink));
    for s in products.iter_mut() {
        *s = (*s - max).exp();
    }
    fill_outside(products, seen, T::ZERO);
    let sink_weight = sink.map(|sink| (sink - max).exp());
    let inverse = T::ONE / (sum(products) + sink_weight.unwrap_or(T::ZERO));
    for s in products.iter_mut() {
        *s = *s * inverse;
    }
    sink_weight.map(|weight| weight * inverse)
}

/// Fills the elements outside a range.
#[inline(always)]
fn fill_outside<T: Copy>(values: &mut [T], range: &Range<usize>, value: T) {
    values[..range.start].fill(value);
    values[range.end..].fill(value);
}
