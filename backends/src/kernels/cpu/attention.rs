//! Causal attention over the packed rows of several sequences, with its gradient, and no `[heads, T, T]` anywhere.
//!
//! Queries are processed in blocks: a block's scores against all keys that it sees fit in a core's cache. The backward pass
//! computes them again (as `FlashAttention` does; Dao et al., 2022), so that only queries, keys and values are saved. The query
//! heads of a group share their key head's rows, and sequences with a common prefix share its rows: completions of one prompt
//! need its keys and values once.

use super::autodiff::{Kernel, all_saved, dispatch_float, input, run, supports};
use super::gemm::{Matrix, Size, Target, multiply};
use super::parallel::{SharedPtr, dims, elements, tensor, vectorised};
use super::real::{Real, dot, largest};
use crate::kernels::families::Family;
use crate::kernels::shapes::AttentionShape;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use gemm::Parallelism;
use rayon::prelude::*;
use std::ops::Range;

/// Queries of a block.
const BLOCK: usize = 64;

/// Attention of `q`, `[rows, heads, dim]`, over `k` and `v`, `[rows, kv_heads, dim]`: `[rows, heads, dim]`.
///
/// `None` where the kernels do not support the tensors.
pub(super) fn attention(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    shape: &AttentionShape,
) -> Option<Tensor<3>> {
    if ![q, k, v]
        .iter()
        .all(|t| supports(t) && t.dtype() == q.dtype())
    {
        return None;
    }
    let inputs = [q, k, v].map(|t| input(t.clone()));
    Some(run(Attention(shape.clone()), inputs))
}

#[derive(Clone, Debug)]
struct Attention(AttentionShape);

impl Kernel<3> for Attention {
    const NAME: &str = "attention";

    fn forward(&self, inputs: &[FlexTensor; 3]) -> FlexTensor {
        dispatch_float!(inputs[0].dtype(), forward(&self.0, inputs))
    }

    fn backward(
        &self,
        saved: [Option<FlexTensor>; 3],
        gradient: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let inputs = all_saved(saved);
        let gradients = dispatch_float!(inputs[0].dtype(), backward(&self.0, &inputs, &gradient));
        let mut wanted = wanted.into_iter();
        gradients.map(|g| wanted.next().unwrap_or(false).then_some(g))
    }
}

/// The layout of heads in rows of queries and of keys.
#[derive(Clone, Copy)]
struct Heads {
    query: usize,
    kv: usize,
    dim: usize,
}

impl Heads {
    fn of(q: &FlexTensor, k: &FlexTensor) -> Self {
        let ([_, heads, dim], [_, kv, _]) = (dims(q), dims(k));
        Self {
            query: heads,
            kv,
            dim,
        }
    }

    fn group(self) -> usize {
        self.query / self.kv
    }

    fn q_row(self) -> usize {
        self.query * self.dim
    }

    fn kv_row(self) -> usize {
        self.kv * self.dim
    }

    /// Offset of a head in a row of queries.
    fn query(self, row: usize, head: usize) -> usize {
        row * self.q_row() + head * self.dim
    }

    /// Offset of a key head in a row of keys.
    fn key(self, row: usize, kv: usize) -> usize {
        row * self.kv_row() + kv * self.dim
    }
}

/// The rows of one sequence: the shared prefix, then its own. Tokens are numbered through both.
#[derive(Clone, Debug)]
struct Rows {
    prefix: Range<usize>,
    own: Range<usize>,
}

impl Rows {
    /// The row of a token that is not in the prefix.
    fn own_row(&self, token: usize) -> usize {
        self.own.start + token - self.prefix.len()
    }

    /// Tokens as runs of consecutive rows: each run's tokens and its first row.
    fn runs(&self, tokens: &Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let shared = self.prefix.len();
        let first = tokens.start.min(shared)..tokens.end.min(shared);
        let second = tokens.start.max(shared)..tokens.end.max(shared);
        [
            (first.clone(), self.prefix.start + first.start),
            (second.clone(), self.own.start + second.start - shared),
        ]
        .into_iter()
        .filter(|(tokens, _)| !tokens.is_empty())
    }

    /// Blocks of the sequence's own queries.
    fn blocks(&self, window: Option<usize>) -> impl Iterator<Item = Block> + use<> {
        let (first, end) = (self.prefix.len(), self.prefix.len() + self.own.len());
        (first..end).step_by(BLOCK).map(move |start| {
            let end = (start + BLOCK).min(end);
            let oldest = window.map_or(0, |w| (start + 1).saturating_sub(w));
            Block {
                queries: start..end,
                keys: oldest..end,
            }
        })
    }
}

impl Family {
    /// Every sequence of queries: the prefix by itself, then each member after it.
    fn sequences(&self) -> impl Iterator<Item = Rows> + '_ {
        let prefix = Rows {
            prefix: self.prefix.start..self.prefix.start,
            own: self.prefix.clone(),
        };
        std::iter::once(prefix).chain(self.members.iter().map(|own| Rows {
            prefix: self.prefix.clone(),
            own: own.clone(),
        }))
    }
}

/// A block of queries and the keys that any of them sees, as tokens of their sequence.
#[derive(Clone)]
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
}

/// A matrix that begins at an offset, with rows of stride `row` and contiguous elements.
fn row_major<T>(values: &[T], offset: usize, row: usize) -> Matrix<T> {
    Matrix {
        start: values[offset..].as_ptr(),
        row,
        column: 1,
    }
}

fn transposed<T>(m: Matrix<T>) -> Matrix<T> {
    Matrix {
        row: m.column,
        column: m.row,
        ..m
    }
}

fn as_target<T>(values: &mut [T], row: usize) -> Target<T> {
    Target {
        start: values.as_mut_ptr(),
        row,
        add: false,
    }
}

/// Turns the scores of a block into probabilities, row by row, in place; masked keys get 0.
#[inline(always)]
fn probabilities<T: Real>(scores: &mut [T], block: &Block, shape: &AttentionShape) {
    let width = block.keys.len();
    for (query, row) in block.queries.clone().zip(scores.chunks_exact_mut(width)) {
        let (seen, rest) = row.split_at_mut(query + 1 - block.keys.start);
        rest.fill(T::ZERO);
        let oldest = shape.window.map_or(0, |w| (query + 1).saturating_sub(w));
        let (unseen, seen) = seen.split_at_mut(oldest.saturating_sub(block.keys.start));
        unseen.fill(T::ZERO);
        softmax(seen, shape);
    }
}

#[inline(always)]
fn softmax<T: Real>(row: &mut [T], shape: &AttentionShape) {
    let scale = T::of(shape.scale);
    match shape.softcap {
        None => row.iter_mut().for_each(|s| *s = *s * scale),
        Some(cap) => {
            let (cap, shrink) = (T::of(cap), T::of(shape.scale / cap));
            for s in row.iter_mut() {
                *s = (*s * shrink).tanh() * cap;
            }
        }
    }
    let max = largest(row);
    let mut sums = [T::ZERO; 16];
    let mut chunks = row.chunks_exact_mut(16);
    for chunk in &mut chunks {
        for (s, sum) in chunk.iter_mut().zip(&mut sums) {
            *s = (*s - max).exp();
            *sum += *s;
        }
    }
    for s in chunks.into_remainder() {
        *s = (*s - max).exp();
        sums[0] += *s;
    }
    let inverse = T::ONE / sums.into_iter().sum::<T>();
    for s in row.iter_mut() {
        *s = *s * inverse;
    }
}

fn forward<T: Real>(shape: &AttentionShape, [q, k, v]: &[FlexTensor; 3]) -> FlexTensor {
    let heads = Heads::of(q, k);
    let dims: [usize; 3] = dims(q);
    let (q, k, v): (&[T], &[T], &[T]) = (elements(q), elements(k), elements(v));
    let mut out = vec![T::ZERO; q.len()];
    let target = SharedPtr(out.as_mut_ptr());
    let sequences: Vec<Rows> = shape
        .families
        .all
        .iter()
        .flat_map(Family::sequences)
        .collect();
    let tasks: Vec<(usize, &Rows, Block)> = sequences
        .iter()
        .flat_map(|rows| rows.blocks(shape.window).map(move |block| (rows, block)))
        .flat_map(|(rows, block)| (0..heads.query).map(move |head| (head, rows, block.clone())))
        .collect();
    let one = Parallelism::None;
    tasks
        .par_iter()
        .for_each_init(Vec::new, |scores, (head, rows, block)| {
            let (head, kv) = (*head, head / heads.group());
            let (m, n) = (block.queries.len(), block.keys.len());
            scores.resize(m * n, T::ZERO);
            let query = heads.query(rows.own_row(block.queries.start), head);
            let queries = row_major(q, query, heads.q_row());
            for (tokens, row) in rows.runs(&block.keys) {
                let keys = row_major(k, heads.key(row, kv), heads.kv_row());
                let tile = as_target(&mut scores[tokens.start - block.keys.start..], n);
                let size = Size {
                    m,
                    k: heads.dim,
                    n: tokens.len(),
                };
                multiply(size, tile, queries, transposed(keys), one);
            }
            vectorised(
                #[inline(always)]
                || probabilities(scores, block, shape),
            );
            // SAFETY: no other task writes this head of these rows.
            #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
            let start = unsafe { target.get().add(query) };
            for (i, (tokens, row)) in rows.runs(&block.keys).enumerate() {
                let values = row_major(v, heads.key(row, kv), heads.kv_row());
                let weights = row_major(scores, tokens.start - block.keys.start, n);
                let mixed = Target {
                    start,
                    row: heads.q_row(),
                    add: i > 0,
                };
                let size = Size {
                    m,
                    k: tokens.len(),
                    n: heads.dim,
                };
                multiply(size, mixed, weights, values, one);
            }
        });
    tensor(out, dims)
}

/// Buffers of one thread.
struct Scratch<T> {
    /// Probabilities P.
    p: Vec<T>,
    /// dP, then dS.
    ds: Vec<T>,
    /// Scores before the soft-cap, where there is one.
    raw: Vec<T>,
}

/// With P = softmax(S): dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − rowsum(P ∘ dP)), dQ = dS K, dK = dSᵀ Q.
fn backward<T: Real>(
    shape: &AttentionShape,
    [q, k, v]: &[FlexTensor; 3],
    gradient: &FlexTensor,
) -> [FlexTensor; 3] {
    let heads = Heads::of(q, k);
    let (q_dims, kv_dims): ([usize; 3], [usize; 3]) = (dims(q), dims(k));
    let (q, k, v): (&[T], &[T], &[T]) = (elements(q), elements(k), elements(v));
    let g: &[T] = elements(gradient);
    let mut dq = vec![T::ZERO; q.len()];
    let mut dk = vec![T::ZERO; k.len()];
    let mut dv = vec![T::ZERO; v.len()];
    let targets = [&mut dq, &mut dk, &mut dv].map(|t| SharedPtr(t.as_mut_ptr()));
    // a family shares rows of keys, so one task accumulates their gradients
    let tasks: Vec<(usize, &Family)> = shape
        .families
        .all
        .iter()
        .flat_map(|family| (0..heads.kv).map(move |kv| (kv, family)))
        .collect();
    let empty = || Scratch {
        p: Vec::new(),
        ds: Vec::new(),
        raw: Vec::new(),
    };
    tasks
        .par_iter()
        .for_each_init(empty, |scratch, &(kv, family)| {
            let pass = BackwardPass {
                shape,
                heads,
                kv,
                inputs: [q, k, v, g],
                targets,
            };
            for head in kv * heads.group()..(kv + 1) * heads.group() {
                for rows in family.sequences() {
                    for block in rows.blocks(shape.window) {
                        pass.block(head, &rows, &block, scratch);
                    }
                }
            }
        });
    [tensor(dq, q_dims), tensor(dk, kv_dims), tensor(dv, kv_dims)]
}

/// The backward pass of one key head.
struct BackwardPass<'a, T> {
    shape: &'a AttentionShape,
    heads: Heads,
    kv: usize,
    /// Queries, keys, values, and the gradient of the output.
    inputs: [&'a [T]; 4],
    /// dQ, dK, dV.
    targets: [SharedPtr<T>; 3],
}

impl<T: Real> BackwardPass<'_, T> {
    /// One head's block of queries: its dQ, and what it adds to dK and dV.
    fn block(&self, head: usize, rows: &Rows, block: &Block, scratch: &mut Scratch<T>) {
        let (heads, one) = (self.heads, Parallelism::None);
        let (q_row, kv_row) = (heads.q_row(), heads.kv_row());
        let [q, k, v, g] = self.inputs;
        let [dq, dk, dv] = self.targets;
        let (m, n) = (block.queries.len(), block.keys.len());
        let query = heads.query(rows.own_row(block.queries.start), head);
        let (queries, d_out) = (row_major(q, query, q_row), row_major(g, query, q_row));
        scratch.p.resize(m * n, T::ZERO);
        scratch.ds.resize(m * n, T::ZERO);
        for (tokens, row) in rows.runs(&block.keys) {
            let (column, key) = (tokens.start - block.keys.start, heads.key(row, self.kv));
            let size = Size {
                m,
                k: heads.dim,
                n: tokens.len(),
            };
            let keys = transposed(row_major(k, key, kv_row));
            multiply(
                size,
                as_target(&mut scratch.p[column..], n),
                queries,
                keys,
                one,
            );
            let values = transposed(row_major(v, key, kv_row));
            multiply(
                size,
                as_target(&mut scratch.ds[column..], n),
                d_out,
                values,
                one,
            );
        }
        self.score_gradients(block, scratch);
        // SAFETY: no other task writes dQ of this head and these rows.
        #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
        let dq = unsafe { dq.get().add(query) };
        for (i, (tokens, row)) in rows.runs(&block.keys).enumerate() {
            let (column, key) = (tokens.start - block.keys.start, heads.key(row, self.kv));
            let (p, ds) = (
                row_major(&scratch.p, column, n),
                row_major(&scratch.ds, column, n),
            );
            let keys = row_major(k, key, kv_row);
            let target = Target {
                start: dq,
                row: q_row,
                add: i > 0,
            };
            multiply(
                Size {
                    m,
                    k: tokens.len(),
                    n: heads.dim,
                },
                target,
                ds,
                keys,
                one,
            );
            // SAFETY: no other task writes dK and dV of this key head and this family's rows.
            #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
            let (dk, dv) = unsafe { (dk.get().add(key), dv.get().add(key)) };
            let size = Size {
                m: tokens.len(),
                k: m,
                n: heads.dim,
            };
            let target = |start| Target {
                start,
                row: kv_row,
                add: true,
            };
            multiply(size, target(dk), transposed(ds), queries, one);
            multiply(size, target(dv), transposed(p), d_out, one);
        }
    }

    /// Turns raw scores into probabilities and dP into the gradient of the raw scores, in place.
    fn score_gradients(&self, block: &Block, scratch: &mut Scratch<T>) {
        let (shape, n) = (self.shape, block.keys.len());
        let Scratch { p, ds, raw } = scratch;
        if shape.softcap.is_some() {
            raw.clear();
            raw.extend_from_slice(p);
        }
        vectorised(
            #[inline(always)]
            || {
                probabilities(p, block, shape);
                let scale = T::of(shape.scale);
                for (p, ds) in p.chunks_exact(n).zip(ds.chunks_exact_mut(n)) {
                    let mean = dot(p, ds);
                    for (ds, &p) in ds.iter_mut().zip(p) {
                        *ds = p * (*ds - mean) * scale;
                    }
                }
                if let Some(cap) = shape.softcap {
                    let shrink = T::of(shape.scale / cap);
                    for (ds, &raw) in ds.iter_mut().zip(raw.iter()) {
                        let t = (raw * shrink).tanh();
                        *ds = *ds * (T::ONE - t * t);
                    }
                }
            },
        );
    }
}
