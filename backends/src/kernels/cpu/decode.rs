//! Attention of one new token a sequence: its key and value go into the cache, and live columns alone are read.
//!
//! Sequences that begin alike, completions of one prompt, each have its keys and values in a row of their own. They are
//! read from one of these rows for all, as products of several queries, so that the others' are not fetched from memory.

use super::autodiff::{detached, dispatch_float, is_full_precision, to_tensor};
use super::gemm::{Matrix, Size, Target, multiply};
use super::parallel::{CACHE_LINE, Shared, dims, elements, prefetch, tensor, vectorised};
use super::real::{LANES, Real, dots, largest, sum, weighted};
use super::rotary::turn;
use crate::kernels::shapes::{DecodeShape, Kin};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use gemm::Parallelism;
use rayon::prelude::*;
use std::ops::Range;

/// Members of a family that one core takes at a time.
const TOGETHER: usize = 8;

/// Numbers read from which the work goes to all cores.
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

/// Where the numbers of a cache and of a step lie.
struct Step<'a, T> {
    shape: &'a DecodeShape<'a>,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    cos: &'a [T],
    sin: &'a [T],
    keys: Shared<T>,
    values: Shared<T>,
    out: Shared<T>,
    heads: usize,
    kv: usize,
    dim: usize,
    columns: usize,
}

/// Room for one core's work.
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
    // a tensor that somebody else holds is copied here, and written in place elsewhere
    let [keys, values] = cache.each_mut().map(|t| {
        let first = t.layout().start_offset();
        Shared(t.storage_mut::<T>()[first..].as_mut_ptr())
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
        out: Shared(out.as_mut_ptr()),
        heads: width / dim,
        kv,
        dim,
        columns,
    };
    // kin one after the other, so that a core finds what they share in its cache
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
    /// First number of a column of a row's key head.
    fn place(&self, row: usize, head: usize, column: usize) -> usize {
        ((row * self.kv + head) * self.columns + column) * self.dim
    }

    /// Some columns of a key head, of the keys or of the values.
    #[inline(always)]
    fn read(&self, cache: Shared<T>, row: usize, head: usize, columns: &Range<usize>) -> &[T] {
        assert!(columns.end <= self.columns, "a column outside the cache");
        // SAFETY: nobody writes what another task reads: a step writes each row's new column alone, which no prefix has.
        #[allow(
            unsafe_code,
            reason = "cores read and write disjoint places of one tensor"
        )]
        unsafe {
            let start = cache.get().add(self.place(row, head, columns.start));
            std::slice::from_raw_parts(start, columns.len() * self.dim)
        }
    }

    /// A row's new column of a key head.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "a place of this task alone")]
    fn fresh(&self, cache: Shared<T>, row: usize, head: usize, column: usize) -> &mut [T] {
        assert!(column < self.columns, "a column outside the cache");
        // SAFETY: no other task has this head of this row.
        #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
        unsafe {
            let start = cache.get().add(self.place(row, head, column));
            std::slice::from_raw_parts_mut(start, self.dim)
        }
    }

    /// Columns of the prefix that a member no longer sees, and those of its own that it does.
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

    /// The query heads of one key head, of some members.
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
            self.enter(head, *row, own.end - 1, q);
        }
        let hidden = |own: &Range<usize>| self.seen(prefix.len(), own).0;
        let unseen = members
            .iter()
            .map(|(_, own)| hidden(own))
            .min()
            .unwrap_or(0);
        let shared = prefix.start + unseen..prefix.end;
        let most = members.iter().map(|(_, own)| own.len()).max().unwrap_or(0);
        // whole vectors, so that exponentials are never taken one by one
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
                by_rows(q, dim),
                turned(keys, dim),
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
                near(self.read(self.values, row, head, &own));
                if i + group < queries {
                    let (row, _, own) = each(i + group);
                    near(self.read(self.keys, row, head, &own));
                }
            }
            let seen = n + own.len();
            let scores = &mut scores[i * width..][..seen.next_multiple_of(LANES)];
            let keys = self.read(self.keys, row, head, &own);
            dots(&q[i * dim..][..dim], keys, &mut scores[n..seen]);
            self.exponentials(scores, gone..seen);
        }
        if n > 0 {
            let values = self.read(self.values, *twin, head, &shared);
            multiply(
                Size { m, k: n, n: dim },
                target(mixed, dim),
                by_rows(scores, width),
                by_rows(values, dim),
                Parallelism::None,
            );
        }
        for i in 0..queries {
            let (row, _, own) = each(i);
            let mixed = &mut mixed[i * dim..][..dim];
            let values = self.read(self.values, row, head, &own);
            weighted(&scores[i * width + n..][..own.len()], values, mixed);
            let at = (row * self.heads + head * group + i % group) * dim;
            // SAFETY: no other task has these heads of this row.
            #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), dim) };
            out.copy_from_slice(mixed);
        }
    }

    /// Turns a row's queries, and writes its key and value to a column of the cache.
    #[inline(always)]
    fn enter(&self, head: usize, row: usize, column: usize, queries: &mut [T]) {
        let (dim, half) = (self.dim, self.dim / 2);
        let (cos, sin) = (
            &self.cos[row * half..][..half],
            &self.sin[row * half..][..half],
        );
        let from = &self.q[row * self.heads * dim + head * queries.len()..][..queries.len()];
        for (out, x) in queries.chunks_exact_mut(dim).zip(from.chunks_exact(dim)) {
            turn(out, x, cos, sin, T::ONE);
        }
        let at = (row * self.kv + head) * dim;
        turn(
            self.fresh(self.keys, row, head, column),
            &self.k[at..][..dim],
            cos,
            sin,
            T::ONE,
        );
        self.fresh(self.values, row, head, column)
            .copy_from_slice(&self.v[at..][..dim]);
    }

    /// Products become probabilities; those outside `seen` nothing.
    #[inline(always)]
    fn exponentials(&self, scores: &mut [T], seen: Range<usize>) {
        let scale = T::of(self.shape.scale);
        for s in &mut scores[seen.clone()] {
            *s = *s * scale;
        }
        if let Some(cap) = self.shape.softcap.map(T::of) {
            for s in &mut scores[seen.clone()] {
                *s = (*s / cap).tanh() * cap;
            }
        }
        outside(scores, &seen, T::LOWEST);
        let max = largest(scores);
        for s in scores.iter_mut() {
            *s = (*s - max).exp();
        }
        outside(scores, &seen, T::ZERO);
        let inverse = T::ONE / sum(scores);
        for s in scores.iter_mut() {
            *s = *s * inverse;
        }
    }
}

/// Asks for the beginning of what is read next; processors go on by themselves.
#[inline(always)]
fn near<T>(values: &[T]) {
    const BYTES: usize = 1 << 13;
    let bytes = size_of_val(values).min(BYTES);
    for at in (0..bytes).step_by(CACHE_LINE) {
        prefetch(values.as_ptr().cast::<u8>().wrapping_add(at));
    }
}

/// Fills what is not in a range.
#[inline(always)]
fn outside<T: Copy>(values: &mut [T], range: &Range<usize>, value: T) {
    values[..range.start].fill(value);
    values[range.end..].fill(value);
}

fn by_rows<T>(values: &[T], row: usize) -> Matrix<T> {
    Matrix {
        start: values.as_ptr(),
        row,
        column: 1,
    }
}

fn turned<T>(values: &[T], row: usize) -> Matrix<T> {
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
