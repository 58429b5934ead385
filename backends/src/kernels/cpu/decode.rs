//! Decode attention: attention of one new token per sequence over the KV cache, into which its key and value are written first.
//!
//! Completions of one prompt each have the prompt's keys and values in their own row. They are read from one of these rows for
//! all, as products of several queries, so that they come from memory once.

use super::autodiff::{detached, dispatch_float, is_full_precision, to_tensor};
use super::gemm::{Matrix, Size, Target, multiply};
use super::parallel::{CACHE_LINE, SharedPtr, dims, elements, prefetch, tensor, vectorised};
use super::real::{LANES, Real, dots, largest, sum, weighted};
use super::rotary::rotate_half;
use crate::kernels::shapes::{DecodeShape, Kin};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use gemm::Parallelism;
use rayon::prelude::*;
use std::ops::Range;

/// Members of a family in one task.
const TOGETHER: usize = 8;

/// Elements read from which the work runs in parallel.
const LARGE: usize = 1 << 15;

/// See [`crate::kernels::decode_attention`].
///
/// `None` where the tensors are not the CPU backend's f32 or f64.
pub(super) fn decode_attention(
    [q, k, v]: &[Tensor<2>; 3],
    [keys, values]: [Tensor<4>; 2],
    shape: &DecodeShape<'_>,
) -> Option<(Tensor<2>, [Tensor<4>; 2])> {
    let [cos, sin] = shape.angles;
    let same = |dtype| dtype == q.dtype();
    let known = [q, k, v]
        .iter()
        .all(|t| is_full_precision(t) && same(t.dtype()))
        && [&keys, &values]
            .iter()
            .all(|t| is_full_precision(t) && same(t.dtype()))
        && [cos, sin]
            .iter()
            .all(|t| is_full_precision(t) && same(t.dtype()));
    if !known {
        return None;
    }
    let _span = span("decode attention", 0.0);
    let fresh = [q, k, v].map(|t| detached(t.clone()));
    let angles = [cos, sin].map(|t| detached(t.clone()));
    let cache = [keys, values].map(detached);
    let (out, cache) = dispatch_float!(fresh[0].dtype(), attend(&fresh, &angles, cache, shape));
    Some((to_tensor(out), cache.map(to_tensor)))
}

/// The arguments of a step.
struct Step<'a, T> {
    shape: &'a DecodeShape<'a>,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    cos: &'a [T],
    sin: &'a [T],
    keys: SharedPtr<T>,
    values: SharedPtr<T>,
    out: SharedPtr<T>,
    heads: usize,
    kv: usize,
    dim: usize,
    columns: usize,
}

/// Buffers of one thread.
struct Scratch<T> {
    queries: Vec<T>,
    scores: Vec<T>,
    mixed: Vec<T>,
}

fn attend<T: Real>(
    [q, k, v]: &[FlexTensor; 3],
    [cos, sin]: &[FlexTensor; 2],
    mut cache: [FlexTensor; 2],
    shape: &DecodeShape<'_>,
) -> (FlexTensor, [FlexTensor; 2]) {
    let [rows, width] = dims(q);
    let [_, kv, columns, dim] = dims(&cache[0]);
    let mut out = vec![T::ZERO; rows * width];
    // copies a tensor that is shared, and writes in place otherwise
    let [keys, values] = cache.each_mut().map(|t| {
        let first = t.layout().start_offset();
        SharedPtr(t.storage_mut::<T>()[first..].as_mut_ptr())
    });
    let step = Step {
        shape,
        q: elements(q),
        k: elements(k),
        v: elements(v),
        cos: elements(cos),
        sin: elements(sin),
        keys,
        values,
        out: SharedPtr(out.as_mut_ptr()),
        heads: width / dim,
        kv,
        dim,
        columns,
    };
    // kin one after the other, so that what they share stays in a core's cache
    let tasks: Vec<(usize, &Kin, Range<usize>)> = shape
        .decoded
        .kin
        .iter()
        .flat_map(|kin| (0..kv).map(move |head| (head, kin)))
        .flat_map(|(head, kin)| {
            let firsts = (0..kin.members.len()).step_by(TOGETHER);
            firsts.map(move |first| (head, kin, first..(first + TOGETHER).min(kin.members.len())))
        })
        .collect();
    let read =
        |kin: &Kin| kin.prefix.1.len() + kin.members.iter().map(|m| m.1.len()).sum::<usize>();
    let size = shape.decoded.kin.iter().map(read).sum::<usize>() * width;
    let empty = || Scratch {
        queries: Vec::new(),
        scores: Vec::new(),
        mixed: Vec::new(),
    };
    let work = |scratch: &mut Scratch<T>, (head, kin, members): &(usize, &Kin, Range<usize>)| {
        let members = &kin.members[members.clone()];
        vectorised(
            #[inline(always)]
            || step.run(*head, &kin.prefix, members, scratch),
        );
    };
    if size < LARGE {
        let mut scratch = empty();
        for task in &tasks {
            work(&mut scratch, task);
        }
    } else {
        tasks.par_iter().for_each_init(empty, work);
    }
    (tensor(out, [rows, width]), cache)
}

impl<T: Real> Step<'_, T> {
    /// Offset of a column of a row's key head in the cache.
    fn offset(&self, row: usize, head: usize, column: usize) -> usize {
        ((row * self.kv + head) * self.columns + column) * self.dim
    }

    /// Columns of a key head, of the keys or of the values.
    #[inline(always)]
    fn read(&self, cache: SharedPtr<T>, row: usize, head: usize, columns: &Range<usize>) -> &[T] {
        assert!(columns.end <= self.columns, "a column outside the cache");
        // SAFETY: no task writes what another reads: a step writes only each row's new column, which is in no prefix.
        #[allow(
            unsafe_code,
            reason = "tasks read and write disjoint parts of one tensor"
        )]
        unsafe {
            let start = cache.get().add(self.offset(row, head, columns.start));
            std::slice::from_raw_parts(start, columns.len() * self.dim)
        }
    }

    /// A row's new column of a key head.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "only this task accesses the column")]
    fn new_column(&self, cache: SharedPtr<T>, row: usize, head: usize, column: usize) -> &mut [T] {
        assert!(column < self.columns, "a column outside the cache");
        // SAFETY: no other task accesses this head of this row.
        #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
        unsafe {
            let start = cache.get().add(self.offset(row, head, column));
            std::slice::from_raw_parts_mut(start, self.dim)
        }
    }

    /// How many columns of the prefix are outside a member's window, and its own columns inside it.
    fn seen(&self, prefix: usize, own: &Range<usize>) -> (usize, Range<usize>) {
        let hidden = match self.shape.window {
            Some(window) => (prefix + own.len()).saturating_sub(window),
            None => 0,
        };
        (
            hidden.min(prefix),
            own.start + hidden.saturating_sub(prefix)..own.end,
        )
    }

    /// Attention of some members' query heads of one key head.
    #[inline(always)]
    fn run(
        &self,
        head: usize,
        (twin, prefix): &(usize, Range<usize>),
        members: &[(usize, Range<usize>)],
        scratch: &mut Scratch<T>,
    ) {
        let (dim, group) = (self.dim, self.heads / self.kv);
        let queries = members.len() * group;
        let Scratch {
            queries: q,
            scores,
            mixed,
        } = scratch;
        q.resize(queries * dim, T::ZERO);
        for ((row, own), q) in members.iter().zip(q.chunks_exact_mut(group * dim)) {
            self.append_kv(head, *row, own.end - 1, q);
        }
        let hidden = |own: &Range<usize>| self.seen(prefix.len(), own).0;
        let unseen = members
            .iter()
            .map(|(_, own)| hidden(own))
            .min()
            .unwrap_or(0);
        let shared = prefix.start + unseen..prefix.end;
        let most = members.iter().map(|(_, own)| own.len()).max().unwrap_or(0);
        // whole vectors, so that no exponential is computed as a scalar
        let width = (shared.len() + most).next_multiple_of(LANES);
        scores.resize(queries * width, T::ZERO);
        mixed.clear();
        mixed.resize(queries * dim, T::ZERO);
        let (m, n) = (queries, shared.len());
        if n > 0 {
            let keys = self.read(self.keys, *twin, head, &shared);
            multiply(
                Size { m, k: dim, n },
                target(scores, width),
                row_major(q, dim),
                transposed(keys, dim),
                Parallelism::None,
            );
        }
        let each = |i: usize| {
            let (row, own) = &members[i / group];
            let (gone, own) = self.seen(prefix.len(), own);
            (*row, gone - unseen, own)
        };
        for i in 0..queries {
            let (row, gone, own) = each(i);
            if i % group == 0 {
                prefetch_slice(self.read(self.values, row, head, &own));
                if i + group < queries {
                    let (row, _, own) = each(i + group);
                    prefetch_slice(self.read(self.keys, row, head, &own));
                }
            }
            let seen = n + own.len();
            let scores = &mut scores[i * width..][..seen.next_multiple_of(LANES)];
            let keys = self.read(self.keys, row, head, &own);
            dots(&q[i * dim..][..dim], keys, &mut scores[n..seen]);
            self.softmax(scores, gone..seen);
        }
        if n > 0 {
            let values = self.read(self.values, *twin, head, &shared);
            multiply(
                Size { m, k: n, n: dim },
                target(mixed, dim),
                row_major(scores, width),
                row_major(values, dim),
                Parallelism::None,
            );
        }
        for i in 0..queries {
            let (row, _, own) = each(i);
            let mixed = &mut mixed[i * dim..][..dim];
            let values = self.read(self.values, row, head, &own);
            weighted(&scores[i * width + n..][..own.len()], values, mixed);
            let at = (row * self.heads + head * group + i % group) * dim;
            // SAFETY: no other task writes these heads of this row.
            #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), dim) };
            out.copy_from_slice(mixed);
        }
    }

    /// Rotates a row's queries and key, and writes key and value to a column of the cache.
    #[inline(always)]
    fn append_kv(&self, head: usize, row: usize, column: usize, queries: &mut [T]) {
        let (dim, half) = (self.dim, self.dim / 2);
        let (cos, sin) = (
            &self.cos[row * half..][..half],
            &self.sin[row * half..][..half],
        );
        let from = &self.q[row * self.heads * dim + head * queries.len()..][..queries.len()];
        for (out, x) in queries.chunks_exact_mut(dim).zip(from.chunks_exact(dim)) {
            rotate_half(out, x, cos, sin, T::ONE);
        }
        let at = (row * self.kv + head) * dim;
        rotate_half(
            self.new_column(self.keys, row, head, column),
            &self.k[at..][..dim],
            cos,
            sin,
            T::ONE,
        );
        self.new_column(self.values, row, head, column)
            .copy_from_slice(&self.v[at..][..dim]);
    }

    /// Turns products into probabilities, in place; those outside `seen` become 0.
    #[inline(always)]
    fn softmax(&self, scores: &mut [T], seen: Range<usize>) {
        let scale = T::of(self.shape.scale);
        for s in &mut scores[seen.clone()] {
            *s = *s * scale;
        }
        if let Some(cap) = self.shape.softcap.map(T::of) {
            for s in &mut scores[seen.clone()] {
                *s = (*s / cap).tanh() * cap;
            }
        }
        fill_outside(scores, &seen, T::LOWEST);
        let max = largest(scores);
        for s in scores.iter_mut() {
            *s = (*s - max).exp();
        }
        fill_outside(scores, &seen, T::ZERO);
        let inverse = T::ONE / sum(scores);
        for s in scores.iter_mut() {
            *s = *s * inverse;
        }
    }
}

/// Prefetches the beginning of a slice; the processor's own prefetcher follows.
#[inline(always)]
fn prefetch_slice<T>(values: &[T]) {
    const BYTES: usize = 1 << 13;
    let bytes = size_of_val(values).min(BYTES);
    for at in (0..bytes).step_by(CACHE_LINE) {
        prefetch(values.as_ptr().cast::<u8>().wrapping_add(at));
    }
}

/// Fills the elements outside a range.
#[inline(always)]
fn fill_outside<T: Copy>(values: &mut [T], range: &Range<usize>, value: T) {
    values[..range.start].fill(value);
    values[range.end..].fill(value);
}

fn row_major<T>(values: &[T], row: usize) -> Matrix<T> {
    Matrix {
        start: values.as_ptr(),
        row,
        column: 1,
    }
}

fn transposed<T>(values: &[T], row: usize) -> Matrix<T> {
    Matrix {
        start: values.as_ptr(),
        row: 1,
        column: row,
    }
}

fn target<T>(values: &mut [T], row: usize) -> Target<T> {
    Target {
        start: values.as_mut_ptr(),
        row,
        add: false,
    }
}
