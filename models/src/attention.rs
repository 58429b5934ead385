//! Attention of whole sequences over themselves, on rows `[tokens, heads, head_dim]` that stand one sequence behind the
//! other. [`attend`] and [`attend_backward`] are the ways in for whole sequences, `attend_rows` for prompts that go into a cache: what
//! computes them knows nothing of layers, and a layer nothing of how they are computed.
//!
//! Products, norms and the MLP run on rows and need no padding. Attention alone wants `[sequences, heads, length, head_dim]`:
//! consecutive sequences of one length are that already, and others are gathered into padded rows where a [`Grouping`] allows
//! some. Rows go there and back by gathers, in the backward too: nothing is scattered.
//!
//! Scores of a sequence longer than `chunk` are computed `chunk` queries at a time, against the keys that any of them sees.
//! The backward computes them again instead of keeping them (Dao et al., arXiv:2205.14135): with P = softmax(S), O = P V,
//!
//! `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O))`, `dQ = s dS K`, `dK = s dSᵀ Q`,
//!
//! and under a soft-cap `S = c tanh(s Q Kᵀ / c)` dS is multiplied by `1 − (S / c)²`.

mod rows;

pub use rows::{Grouping, Sequences, Together};

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Tensor};
use firebrick_backends::kernels::{self, AttentionShape, Families};
use firebrick_backends::precision::{stored_as, widened};
use std::ops::Range;

/// Finite, so that a row that sees nothing (a padding query) stays finite too.
const HIDDEN_SCORE: f64 = -1e9;

/// What becomes of the product of a query and a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scoring {
    /// It is multiplied by this,
    pub scale: f64,
    /// goes through `c · tanh(score / c)`,
    pub softcap: Option<f64>,
    /// and is hidden where the key is this many tokens or more before the query, or after it.
    pub window: Option<usize>,
}

/// Queries, keys and values of the rows of a forward.
#[derive(Clone, Debug)]
pub struct Projected {
    /// Queries, `[tokens, heads, head_dim]`.
    pub q: Tensor<3>,
    /// Keys, `[tokens, kv_heads, head_dim]`.
    pub k: Tensor<3>,
    /// Values, the same shape.
    pub v: Tensor<3>,
}

/// Softmax attention of every sequence over itself: `[tokens, heads · head_dim]`.
///
/// Differentiable where [`Sequences::recomputes`] is false; elsewhere [`attend_backward`] has the gradient.
#[must_use]
pub fn attend(qkv: &Projected, scoring: Scoring, sequences: &Sequences) -> Tensor<2> {
    let [tokens, heads, dim] = qkv.q.dims();
    if let Some(families) = &sequences.fused {
        return attend_rows(qkv, scoring, families);
    }
    let groups = sequences.groups.iter().map(|group| {
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|t| group.by_head(t));
        let chunks = sequences.chunks(group.width, scoring.window);
        let mixed = chunks.iter().map(|chunk| {
            let mask = sequences.mask(scoring.window, chunk);
            let (k, v) = (columns(&k, &chunk.keys), columns(&v, &chunk.keys));
            mix(columns(&q, &chunk.queries), k, v, scoring, mask)
        });
        group.rows(joined(mixed.collect(), 2))
    });
    joined(groups.collect(), 0).reshape([tokens, heads * dim])
}

/// The same by the kernel, where the device has it, with zeros in rows of no sequence.
#[must_use]
pub(crate) fn attend_rows(qkv: &Projected, scoring: Scoring, families: &Families) -> Tensor<2> {
    let [tokens, heads, dim] = qkv.q.dims();
    let shape = AttentionShape {
        families: families.clone(),
        window: scoring.window,
        scale: scoring.scale,
        softcap: scoring.softcap,
    };
    kernels::attention(&qkv.q, &qkv.k, &qkv.v, &shape)
        .expect("tensors of the device that the sequences were laid out for")
        .reshape([tokens, heads * dim])
}

/// Gradients of queries, keys and values, given what [`attend`] made of them and its gradient, `[tokens, heads · head_dim]`
/// each. None of these is part of a graph.
#[must_use]
pub fn attend_backward(
    qkv: &Projected,
    mixed: Tensor<2>,
    d_mixed: Tensor<2>,
    scoring: Scoring,
    sequences: &Sequences,
) -> Projected {
    let shape = qkv.q.dims();
    let (mixed, d_mixed) = (mixed.reshape(shape), d_mixed.reshape(shape));
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    for group in &sequences.groups {
        let [q, k, v, o] = [&qkv.q, &qkv.k, &qkv.v, &mixed].map(|t| group.by_head(t));
        let d = group.by_head_or_zero(&d_mixed);
        let chunks = sequences.chunks(group.width, scoring.window);
        let mut d_q = Vec::with_capacity(chunks.len());
        let mut d_kv: Option<(Tensor<4>, Tensor<4>)> = None;
        for chunk in &chunks {
            let mask = sequences.mask(scoring.window, chunk);
            let queries = [&q, &o, &d].map(|t| columns(t, &chunk.queries));
            let keys = [&k, &v].map(|t| columns(t, &chunk.keys));
            let [own_q, own_k, own_v] = mix_backward(queries, keys, scoring, mask);
            d_q.push(own_q);
            d_kv = Some(if chunks.len() == 1 {
                (own_k, own_v)
            } else {
                let (d_k, d_v) = d_kv.unwrap_or_else(|| (k.zeros_like(), v.zeros_like()));
                (
                    add_columns(d_k, &chunk.keys, own_k),
                    add_columns(d_v, &chunk.keys, own_v),
                )
            });
        }
        let (d_k, d_v) = d_kv.unwrap_or_else(|| (k.zeros_like(), v.zeros_like()));
        for (sum, own) in all.iter_mut().zip([joined(d_q, 2), d_k, d_v]) {
            sum.push(group.rows(own));
        }
    }
    let [q, k, v] = all.map(|parts| joined(parts, 0));
    Projected { q, k, v }
}

/// Softmax attention of queries `[batch, heads, queries, dim]` over keys and values, `[batch, kv_heads, keys, dim]`: mixed
/// values in the shape of the queries. The query heads of a group meet their key head as more rows of one product, so that
/// keys and values are never repeated. Softmax is at least in f32. `mask` is true where a key is hidden.
#[must_use]
pub(crate) fn mix(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scoring: Scoring,
    mask: Option<Tensor<4, Bool>>,
) -> Tensor<4> {
    let shape = q.dims();
    let kv = k.dims()[1];
    let stored = v.dtype();
    let mut scores = widened((grouped(q, kv) * scoring.scale).matmul(k.swap_dims(2, 3)));
    if let Some(cap) = scoring.softcap {
        // not divided: Burn's gradient of a division by a number rounds it to f32
        scores = (scores * cap.recip()).tanh() * cap;
    }
    let scores = hide(scores, shape, mask);
    stored_as(softmax(scores, 3), stored)
        .matmul(v)
        .reshape(shape)
}

/// Gradients of queries, keys and values, from `[queries, mixed values, their gradient]` and `[keys, values]`.
fn mix_backward(
    [q, o, d]: [Tensor<4>; 3],
    [k, v]: [Tensor<4>; 2],
    scoring: Scoring,
    mask: Option<Tensor<4, Bool>>,
) -> [Tensor<4>; 3] {
    let shape = q.dims();
    let kv = k.dims()[1];
    let q = grouped(q, kv) * scoring.scale;
    let (o, d) = (grouped(o, kv), grouped(d, kv));
    let stored = v.dtype();
    let mut scores = widened(q.clone().matmul(k.clone().swap_dims(2, 3)));
    let mut tanh = None;
    if let Some(cap) = scoring.softcap {
        let t = (scores * cap.recip()).tanh();
        scores = t.clone() * cap;
        tanh = Some(t);
    }
    let probs = softmax(hide(scores, shape, mask), 3);
    let d_v = stored_as(probs.clone(), stored)
        .swap_dims(2, 3)
        .matmul(d.clone());
    let shared = (widened(d.clone()) * widened(o)).sum_dim(3);
    let mut d_scores = probs * (widened(d.matmul(v.swap_dims(2, 3))) - shared);
    if let Some(t) = tanh {
        d_scores = d_scores * (t.clone() * t).neg().add_scalar(1.0);
    }
    let d_scores = stored_as(d_scores, stored);
    let d_k = d_scores.clone().swap_dims(2, 3).matmul(q);
    let d_q = d_scores.matmul(k) * scoring.scale;
    [d_q.reshape(shape), d_k, d_v]
}

/// `[batch, heads, queries, dim]` as `[batch, kv_heads, heads / kv_heads · queries, dim]`.
fn grouped(t: Tensor<4>, kv: usize) -> Tensor<4> {
    let [batch, heads, queries, dim] = t.dims();
    t.reshape([batch, kv, heads / kv * queries, dim])
}

/// Scores `[batch, kv_heads, heads / kv_heads · queries, keys]` with the hidden ones out of the way.
fn hide(scores: Tensor<4>, queries: [usize; 4], mask: Option<Tensor<4, Bool>>) -> Tensor<4> {
    let Some(mask) = mask else {
        return scores;
    };
    let grouped = scores.dims();
    let [batch, heads, len, _] = queries;
    let shape = [batch, heads, len, grouped[3]];
    scores
        .reshape(shape)
        .mask_fill(mask.expand(shape), HIDDEN_SCORE)
        .reshape(grouped)
}

/// Some columns of `[batch, heads, columns, dim]`.
fn columns(t: &Tensor<4>, which: &Range<usize>) -> Tensor<4> {
    if t.dims()[2] == which.len() {
        t.clone()
    } else {
        t.clone().narrow(2, which.start, which.len())
    }
}

/// Adds to some columns of `[batch, heads, columns, dim]`.
fn add_columns(sum: Tensor<4>, columns: &Range<usize>, part: Tensor<4>) -> Tensor<4> {
    let [batch, heads, _, dim] = sum.dims();
    let place = [0..batch, 0..heads, columns.clone(), 0..dim];
    let own = sum.clone().slice(place.clone());
    sum.slice_assign(place, own + part)
}

fn joined<const D: usize>(mut parts: Vec<Tensor<D>>, dim: usize) -> Tensor<D> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}
