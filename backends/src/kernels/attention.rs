//! Causal attention over the packed rows of several sequences, with its gradient, and no `[heads, T, T]` anywhere.
//!
//! Queries are taken a block at a time; a block's scores against all keys that it sees fit in a core's cache. The gradient
//! computes them again (as `FlashAttention` does; Dao et al., 2022), so that nothing but queries, keys and values is kept.
//! The query heads of a group share their key head's rows in memory.

use super::linear::{Matrix, Size, Target, multiply};
use super::parallel::{Shared, dims, elements, tensor, vectorised};
use super::real::{Real, dot, largest};
use super::tape::{Kernel, each, input, knows, run};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use gemm::Parallelism;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Queries of a block.
const BLOCK: usize = 64;

/// Which rows belong together, and how scores are made.
#[derive(Clone, Debug)]
pub struct AttentionShape {
    /// Rows of each sequence; none overlap. Rows of none get zeros.
    pub sequences: Arc<[Range<usize>]>,
    /// A query sees itself and the `window − 1` keys before it; all keys before it where `None`.
    pub window: Option<usize>,
    /// What products are multiplied by.
    pub scale: f64,
    /// Scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f64>,
}

/// Attention of `q`, `[rows, heads, dim]`, over `k` and `v`, `[rows, kv_heads, dim]`: `[rows, heads, dim]`.
///
/// `None` where the kernels do not know the tensors.
#[must_use]
pub fn attention(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    shape: &AttentionShape,
) -> Option<Tensor<3>> {
    if ![q, k, v].iter().all(|t| knows(t) && t.dtype() == q.dtype()) {
        return None;
    }
    let inputs = [q, k, v].map(|t| input(t.clone()));
    Some(run(Attention(shape.clone()), inputs))
}

#[derive(Clone, Debug)]
struct Attention(AttentionShape);

impl Kernel<3> for Attention {
    type Saved = [FlexTensor; 3];

    fn forward(&self, inputs: [FlexTensor; 3]) -> (FlexTensor, Self::Saved) {
        let out = each!(inputs[0].dtype(), forward(&self.0, &inputs));
        (out, inputs)
    }

    fn backward(
        &self,
        inputs: Self::Saved,
        gradient: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let gradients = each!(inputs[0].dtype(), backward(&self.0, &inputs, &gradient));
        let mut wanted = wanted.into_iter();
        gradients.map(|g| wanted.next().unwrap_or(false).then_some(g))
    }
}

/// Where heads lie in rows of queries and of keys.
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

    /// First element of a head in a row of queries.
    fn query(self, row: usize, head: usize) -> usize {
        row * self.q_row() + head * self.dim
    }

    /// First element of a key head in a row of keys.
    fn key(self, row: usize, kv: usize) -> usize {
        row * self.kv_row() + kv * self.dim
    }
}

/// A block of queries and the keys that any of them sees, as rows.
#[derive(Clone)]
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
}

fn blocks(sequence: &Range<usize>, window: Option<usize>) -> impl Iterator<Item = Block> + use<> {
    let sequence = sequence.clone();
    sequence.clone().step_by(BLOCK).map(move |start| {
        let end = (start + BLOCK).min(sequence.end);
        let oldest = window.map_or(sequence.start, |w| (start + 1).saturating_sub(w));
        Block {
            queries: start..end,
            keys: oldest.max(sequence.start)..end,
        }
    })
}

/// Element `offset` of a tensor, its rows `row` apart and the elements of a row side by side.
fn rows_of<T>(values: &[T], offset: usize, row: usize) -> Matrix<T> {
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

fn local<T>(values: &mut [T], row: usize) -> Target<T> {
    Target {
        start: values.as_mut_ptr(),
        row,
        add: false,
    }
}

/// Scores of a block become probabilities, row by row; keys that a query does not see get 0.
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
    let target = Shared(out.as_mut_ptr());
    let tasks: Vec<(usize, Block)> = shape
        .sequences
        .iter()
        .flat_map(|s| blocks(s, shape.window))
        .flat_map(|block| (0..heads.query).map(move |head| (head, block.clone())))
        .collect();
    tasks
        .par_iter()
        .for_each_init(Vec::new, |scores, (head, block)| {
            let (head, kv) = (*head, head / heads.group());
            let (m, n) = (block.queries.len(), block.keys.len());
            scores.resize(m * n, T::ZERO);
            let queries = rows_of(q, heads.query(block.queries.start, head), heads.q_row());
            let keys = rows_of(k, heads.key(block.keys.start, kv), heads.kv_row());
            let values = rows_of(v, heads.key(block.keys.start, kv), heads.kv_row());
            let size = Size { m, k: heads.dim, n };
            multiply(
                size,
                local(scores, n),
                queries,
                transposed(keys),
                Parallelism::None,
            );
            vectorised(|| probabilities(scores, block, shape));
            // SAFETY: no other task has this head of these rows.
            #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
            let start = unsafe { target.get().add(heads.query(block.queries.start, head)) };
            let mixed = Target {
                start,
                row: heads.q_row(),
                add: false,
            };
            let size = Size {
                m,
                k: n,
                n: heads.dim,
            };
            multiply(
                size,
                mixed,
                rows_of(scores, 0, n),
                values,
                Parallelism::None,
            );
        });
    tensor(out, dims)
}

/// Room for one block's work.
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
    let targets = [&mut dq, &mut dk, &mut dv].map(|t| Shared(t.as_mut_ptr()));
    let tasks: Vec<(usize, &Range<usize>)> = shape
        .sequences
        .iter()
        .flat_map(|s| (0..heads.kv).map(move |kv| (kv, s)))
        .collect();
    let empty = || Scratch {
        p: Vec::new(),
        ds: Vec::new(),
        raw: Vec::new(),
    };
    tasks
        .par_iter()
        .for_each_init(empty, |scratch, &(kv, sequence)| {
            for head in kv * heads.group()..(kv + 1) * heads.group() {
                for block in blocks(sequence, shape.window) {
                    differentiate(
                        shape,
                        heads,
                        (kv, head, &block),
                        [q, k, v, g],
                        targets,
                        scratch,
                    );
                }
            }
        });
    [tensor(dq, q_dims), tensor(dk, kv_dims), tensor(dv, kv_dims)]
}

/// One head's block of queries: its dQ, and what it adds to dK and dV.
fn differentiate<T: Real>(
    shape: &AttentionShape,
    heads: Heads,
    (kv, head, block): (usize, usize, &Block),
    [q, k, v, g]: [&[T]; 4],
    targets: [Shared<T>; 3],
    scratch: &mut Scratch<T>,
) {
    let (m, n, dim) = (block.queries.len(), block.keys.len(), heads.dim);
    let query = heads.query(block.queries.start, head);
    let key = heads.key(block.keys.start, kv);
    let queries = rows_of(q, query, heads.q_row());
    let keys = rows_of(k, key, heads.kv_row());
    let values = rows_of(v, key, heads.kv_row());
    let d_out = rows_of(g, query, heads.q_row());
    let Scratch { p, ds, raw } = scratch;
    p.resize(m * n, T::ZERO);
    ds.resize(m * n, T::ZERO);
    let one = Parallelism::None;
    let inner = Size { m, k: dim, n };
    multiply(inner, local(p, n), queries, transposed(keys), one);
    if shape.softcap.is_some() {
        raw.clear();
        raw.extend_from_slice(p);
    }
    multiply(inner, local(ds, n), d_out, transposed(values), one);
    vectorised(|| {
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
    });
    let [dq, dk, dv] = targets;
    // SAFETY: dQ has no other writer for this head and these rows; dK and dV of a key head are one task's alone.
    #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
    let (dq, dk, dv) = unsafe { (dq.get().add(query), dk.get().add(key), dv.get().add(key)) };
    let (p, ds) = (rows_of(p, 0, n), rows_of(ds, 0, n));
    let (q_row, kv_row) = (heads.q_row(), heads.kv_row());
    multiply(
        Size { m, k: n, n: dim },
        Target {
            start: dq,
            row: q_row,
            add: false,
        },
        ds,
        keys,
        one,
    );
    let outer = Size { m: n, k: m, n: dim };
    multiply(
        outer,
        Target {
            start: dk,
            row: kv_row,
            add: true,
        },
        transposed(ds),
        queries,
        one,
    );
    multiply(
        outer,
        Target {
            start: dv,
            row: kv_row,
            add: true,
        },
        transposed(p),
        d_out,
        one,
    );
}
