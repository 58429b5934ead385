//! Self-attention over whole sequences, on packed rows `[tokens, heads, head_dim]` (variable-length attention).
//! [`attend`] and [`attend_backward`] take whole sequences, `attend_rows` prompts that are written to a cache.
//!
//! Products, norms and the MLP run on rows and need no padding. Attention needs `[sequences, heads, length, head_dim]`:
//! consecutive sequences of one length have that shape already, and others are gathered into padded rows where a
//! [`Grouping`] allows padding. Rows are gathered there and back, in the backward pass too: nothing is scattered.
//!
//! Scores of a sequence longer than `chunk` are computed `chunk` queries at a time, against the keys that any of them
//! sees. The backward pass recomputes them (Dao et al., 2022, arXiv:2205.14135): with P = softmax(S), O = P V,
//!
//! `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O))`, `dQ = s dS K`, `dK = s dSᵀ Q`,
//!
//! and under a soft-cap `S = c tanh(s Q Kᵀ / c)` dS is multiplied by `1 − (S / c)²`.
//!
//! A sink (Xiao et al., 2023, arXiv:2309.17453, as a number a head in gpt-oss) is one more score of a row, whose
//! probability p is left out of O. All the formulas hold as they stand, and the sink's gradient is the sum of `−p
//! rowsum(dO ∘ O)` over the rows of its head.

mod sequence_layout;

pub use sequence_layout::{Grouping, PaddedGroup, SequenceLayout};

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Tensor};
use firebrick_backends::kernels::{self, AttentionShape, PrefixGroups};
use firebrick_backends::precision::{stored_as, widened};
use std::ops::Range;

/// Score of a hidden key. Finite, so that a query that sees no key (padding) has a finite softmax.
const HIDDEN_SCORE: f64 = -1e9;

/// Settings of attention scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    /// The product is multiplied by this.
    pub scale: f64,
    /// `c · tanh(score / c)` is applied, where given.
    pub softcap: Option<f64>,
    /// Sliding window: keys this many tokens or more before the query are hidden. Keys after the query always are.
    pub window: Option<usize>,
}

/// Queries, keys and values of the rows of a forward pass.
#[derive(Clone, Debug)]
pub struct Qkv {
    /// Queries, `[tokens, heads, head_dim]`.
    pub q: Tensor<3>,
    /// Keys, `[tokens, kv_heads, head_dim]`.
    pub k: Tensor<3>,
    /// Values, the same shape.
    pub v: Tensor<3>,
    /// A number for each query head that joins the softmax of its rows, `[1, heads]`, where the architecture has sinks.
    pub sinks: Option<Tensor<2>>,
}

/// Causal softmax attention within each sequence: `[tokens, heads · head_dim]`.
///
/// Differentiable by autodiff where [`SequenceLayout::recomputes`] is false; elsewhere [`attend_backward`] computes the
/// gradient.
pub fn attend(qkv: &Qkv, params: AttentionParams, sequences: &SequenceLayout) -> Tensor<2> {
    let [tokens, heads, dim] = qkv.q.dims();
    if let Some(groups) = &sequences.fused {
        return attend_rows(qkv, params, groups);
    }
    let groups = sequences.groups.iter().map(|group| {
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|t| group.by_head(t));
        let chunks = sequences.chunks(group.width, params.window);
        let mixed = chunks.iter().map(|chunk| {
            let mask = sequences.mask(params.window, chunk);
            let (k, v) = (columns(&k, &chunk.keys), columns(&v, &chunk.keys));
            let sinks = qkv.sinks.as_ref();
            let q = columns(&q, &chunk.queries);
            scaled_dot_product_attention(q, [k, v], sinks, params, mask)
        });
        group.rows(joined(mixed.collect(), 2))
    });
    joined(groups.collect(), 0).reshape([tokens, heads * dim])
}

/// [`attend`] by a fused kernel, on devices that have it. Rows that belong to no sequence are zero.
pub(crate) fn attend_rows(qkv: &Qkv, params: AttentionParams, groups: &PrefixGroups) -> Tensor<2> {
    let [tokens, heads, dim] = qkv.q.dims();
    let shape =
        AttentionShape { groups: groups.clone(), window: params.window, scale: params.scale, softcap: params.softcap };
    kernels::attention([&qkv.q, &qkv.k, &qkv.v], qkv.sinks.as_ref(), &shape).reshape([tokens, heads * dim])
}

/// Gradients of queries, keys, values and sinks, given the output of [`attend`] and its gradient, `[tokens, heads ·
/// head_dim]` each. No tensor is part of an autodiff graph.
pub fn attend_backward(
    qkv: &Qkv,
    mixed: Tensor<2>,
    d_mixed: Tensor<2>,
    params: AttentionParams,
    sequences: &SequenceLayout,
) -> Qkv {
    let shape = qkv.q.dims();
    let (mixed, d_mixed) = (mixed.reshape(shape), d_mixed.reshape(shape));
    let mut grads = [Vec::new(), Vec::new(), Vec::new()];
    let mut d_sinks: Option<Tensor<2>> = None;
    for group in &sequences.groups {
        let [q, k, v, o] = [&qkv.q, &qkv.k, &qkv.v, &mixed].map(|t| group.by_head(t));
        let d = group.by_head_or_zero(&d_mixed);
        let chunks = sequences.chunks(group.width, params.window);
        let mut d_q = Vec::with_capacity(chunks.len());
        let mut d_kv: Option<(Tensor<4>, Tensor<4>)> = None;
        for chunk in &chunks {
            let mask = sequences.mask(params.window, chunk);
            let queries = [&q, &o, &d].map(|t| columns(t, &chunk.queries));
            let keys = [&k, &v].map(|t| columns(t, &chunk.keys));
            let ([chunk_dq, chunk_dk, chunk_dv], chunk_dsinks) =
                scaled_dot_product_attention_backward(queries, keys, qkv.sinks.as_ref(), params, mask);
            d_q.push(chunk_dq);
            d_sinks = d_sinks.into_iter().chain(chunk_dsinks).reduce(|sum, grad| sum + grad);
            d_kv = Some(if chunks.len() == 1 {
                (chunk_dk, chunk_dv)
            } else {
                let (d_k, d_v) = d_kv.unwrap_or_else(|| (k.zeros_like(), v.zeros_like()));
                (add_columns(d_k, &chunk.keys, chunk_dk), add_columns(d_v, &chunk.keys, chunk_dv))
            });
        }
        let (d_k, d_v) = d_kv.unwrap_or_else(|| (k.zeros_like(), v.zeros_like()));
        for (sum, grad) in grads.iter_mut().zip([joined(d_q, 2), d_k, d_v]) {
            sum.push(group.rows(grad));
        }
    }
    let [q, k, v] = grads.map(|parts| joined(parts, 0));
    Qkv { q, k, v, sinks: d_sinks }
}

/// Softmax attention of queries `[batch, heads, queries, dim]` over keys and values `[batch, kv_heads, keys, dim]`; the
/// output has the shape of the queries. The query heads of a group are further rows of the product with their key head,
/// so that keys and values are not repeated. Softmax is in f32 or wider. `sinks`, `[1, heads]`, join it. `mask` is true
/// where a key is hidden.
pub(crate) fn scaled_dot_product_attention(
    q: Tensor<4>,
    [k, v]: [Tensor<4>; 2],
    sinks: Option<&Tensor<2>>,
    params: AttentionParams,
    mask: Option<Tensor<4, Bool>>,
) -> Tensor<4> {
    let shape = q.dims();
    let kv = k.dims()[1];
    let stored = v.dtype();
    let mut scores = widened((grouped(q, kv) * params.scale).matmul(k.swap_dims(2, 3)));
    if let Some(cap) = params.softcap {
        // not divided: Burn's gradient of a division by a number rounds it to f32
        scores = (scores * cap.recip()).tanh() * cap;
    }
    let sinks = sinks.map(|sinks| sink_scores(sinks, shape, kv));
    let (probs, _) = probabilities(hide(scores, shape, mask), sinks);
    stored_as(probs, stored).matmul(v).reshape(shape)
}

/// The softmax of each row of scores, and the share of the sink that joins it.
fn probabilities(scores: Tensor<4>, sinks: Option<Tensor<4>>) -> (Tensor<4>, Option<Tensor<4>>) {
    let Some(sinks) = sinks else {
        return (softmax(scores, 3), None);
    };
    let top = scores.clone().detach().max_dim(3).max_pair(sinks.clone().detach());
    let weights = (scores - top.clone()).exp();
    let sink = (sinks - top).exp();
    let sum = weights.clone().sum_dim(3) + sink.clone();
    (weights / sum.clone(), Some(sink / sum))
}

/// Sinks, `[1, heads]`, beside the scores of queries of this shape: `[batch, kv_heads, heads / kv_heads · queries, 1]`.
fn sink_scores(sinks: &Tensor<2>, [batch, heads, queries, _]: [usize; 4], kv: usize) -> Tensor<4> {
    let each = widened(sinks.clone()).reshape([1, heads, 1, 1]).expand([batch, heads, queries, 1]);
    each.reshape([batch, kv, heads / kv * queries, 1])
}

/// Gradients of queries, keys and values, and of sinks, given `[queries, output, gradient of the output]` and `[keys,
/// values]`.
fn scaled_dot_product_attention_backward(
    [q, o, d]: [Tensor<4>; 3],
    [k, v]: [Tensor<4>; 2],
    sinks: Option<&Tensor<2>>,
    params: AttentionParams,
    mask: Option<Tensor<4, Bool>>,
) -> ([Tensor<4>; 3], Option<Tensor<2>>) {
    let shape = q.dims();
    let kv = k.dims()[1];
    let q = grouped(q, kv) * params.scale;
    let (o, d) = (grouped(o, kv), grouped(d, kv));
    let stored = v.dtype();
    let mut scores = widened(q.clone().matmul(k.clone().swap_dims(2, 3)));
    let mut tanh = None;
    if let Some(cap) = params.softcap {
        let t = (scores * cap.recip()).tanh();
        scores = t.clone() * cap;
        tanh = Some(t);
    }
    let column = sinks.map(|sinks| sink_scores(sinks, shape, kv));
    let (probs, share) = probabilities(hide(scores, shape, mask), column);
    let d_v = stored_as(probs.clone(), stored).swap_dims(2, 3).matmul(d.clone());
    let shared = (widened(d.clone()) * widened(o)).sum_dim(3);
    let d_sinks = share.zip(sinks).map(|(share, sinks)| {
        let [batch, heads, queries, _] = shape;
        let each = (share * shared.clone()).reshape([batch, heads, queries]);
        let sum = each.sum_dim(2).sum_dim(0).neg();
        stored_as(sum.reshape([1, heads]), sinks.dtype())
    });
    let mut d_scores = probs * (widened(d.matmul(v.swap_dims(2, 3))) - shared);
    if let Some(t) = tanh {
        d_scores = d_scores * (t.clone() * t).neg().add_scalar(1.0);
    }
    let d_scores = stored_as(d_scores, stored);
    let d_k = d_scores.clone().swap_dims(2, 3).matmul(q);
    let d_q = d_scores.matmul(k) * params.scale;
    ([d_q.reshape(shape), d_k, d_v], d_sinks)
}

/// `[batch, heads, queries, dim]` as `[batch, kv_heads, heads / kv_heads · queries, dim]`.
fn grouped(t: Tensor<4>, kv: usize) -> Tensor<4> {
    let [batch, heads, queries, dim] = t.dims();
    t.reshape([batch, kv, heads / kv * queries, dim])
}

/// Scores `[batch, kv_heads, heads / kv_heads · queries, keys]` with those of hidden keys replaced.
fn hide(scores: Tensor<4>, queries: [usize; 4], mask: Option<Tensor<4, Bool>>) -> Tensor<4> {
    let Some(mask) = mask else {
        return scores;
    };
    let grouped = scores.dims();
    let [batch, heads, len, _] = queries;
    let shape = [batch, heads, len, grouped[3]];
    scores.reshape(shape).mask_fill(mask.expand(shape), HIDDEN_SCORE).reshape(grouped)
}

/// Some columns of `[batch, heads, columns, dim]`.
fn columns(t: &Tensor<4>, which: &Range<usize>) -> Tensor<4> {
    if t.dims()[2] == which.len() { t.clone() } else { t.clone().narrow(2, which.start, which.len()) }
}

/// Adds to some columns of `[batch, heads, columns, dim]`.
fn add_columns(sum: Tensor<4>, columns: &Range<usize>, part: Tensor<4>) -> Tensor<4> {
    let [batch, heads, _, dim] = sum.dims();
    let place = [0..batch, 0..heads, columns.clone(), 0..dim];
    let before = sum.clone().slice(place.clone());
    sum.slice_assign(place, before + part)
}

fn joined<const D: usize>(mut parts: Vec<Tensor<D>>, dim: usize) -> Tensor<D> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}
