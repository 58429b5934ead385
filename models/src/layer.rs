//! The two halves of a transformer layer on packed rows `[tokens, hidden]`.

pub(crate) mod decode;
pub(crate) mod delta_net;
mod experts;

use crate::adapter::LoraForward;
use crate::arch::{Activation, Arch, QkNorm};
use crate::attention::{self, AttentionParams, Qkv};
use crate::cache::{AttentionMetadata, LayerCache};
use crate::forward_context::ForwardContext;
use crate::unit::Slot;
use crate::weights::Weights;
use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, Tensor};
use firebrick_backends::kernels::{self, rms_norm, rms_norm_add};
use firebrick_backends::precision::{stored_as, widened};

/// The attention half: norm, q/k/v, rotary embedding, attention, output projection, residual, all `[tokens, hidden]`.
///
/// With a cache, the keys and values of this forward pass are written to it, and attention runs over what it holds of
/// each sequence.
pub(crate) fn attention(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &ForwardContext,
    lora: Option<LoraForward<'_>>,
    cache: Option<(&mut LayerCache, &AttentionMetadata)>,
) -> Tensor<2> {
    let params = attention_params(arch, layer);
    if let Some((cache, metadata)) = cache {
        let (mixed, gate) = match cache.decoded(metadata, layer) {
            Some(decode) => {
                let scale = ctx.rotary().query_scale();
                let (qkv, gate) = project_unrotated(arch, w, x.clone(), scale, lora);
                let qkv = rotate_part(arch, layer, qkv, ctx);
                let sinks = w.get(Slot::Sinks);
                (cache.decode(params, qkv, sinks.as_ref(), decode), gate)
            }
            None => {
                let Projected { qkv, gate } = project(arch, layer, w, x.clone(), ctx, lora);
                (cache.attend(params, qkv, metadata), gate)
            }
        };
        return project_output(arch, w, x, &mixed, gate, lora);
    }
    let Projected { qkv, gate } = project(arch, layer, w, x.clone(), ctx, lora);
    let mixed = mix(params, qkv, ctx);
    project_output(arch, w, x, &mixed, gate, lora)
}

/// What attention mixes without a cache, `[tokens, heads · head_dim]`.
fn mix(params: AttentionParams, qkv: Qkv, ctx: &ForwardContext) -> Tensor<2> {
    let Some(sequences) = ctx.sequences() else {
        let sinks = qkv.sinks.clone();
        let [q, k, v] = by_head(qkv, ctx);
        let mask = ctx.mask(params.window);
        let mixed = attention::scaled_dot_product_attention(q, [k, v], sinks.as_ref(), params, mask);
        return rows(mixed);
    };
    attention::attend(&qkv, params, sequences)
}

/// The attention half of a share between its norm and its sum over the ranks: a part of the last product, `[tokens,
/// hidden]`.
pub(crate) fn attention_part(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    h: &Tensor<2>,
    ctx: &ForwardContext,
    lora: Option<LoraForward<'_>>,
) -> Tensor<2> {
    let Projected { qkv, .. } = project_normed(arch, layer, w, h, ctx, lora);
    let mixed = mix(attention_params(arch, layer), qkv, ctx);
    w.linear_part(&mixed, Slot::O, lora)
}

/// The same of the feed-forward half of a dense layer.
pub(crate) fn mlp_part(arch: &Arch, w: &Weights, h: &Tensor<2>, lora: Option<LoraForward<'_>>) -> Tensor<2> {
    w.linear_part(&gated(arch, w, h, lora), Slot::Down, lora)
}

/// Scale, soft-cap and window of a layer's attention.
pub(crate) fn attention_params(arch: &Arch, layer: usize) -> AttentionParams {
    AttentionParams { scale: arch.attention_scale, softcap: arch.attention_softcap, window: arch.windows[layer] }
}

/// Queries, keys and values as `[batch, heads, columns, head_dim]`.
fn by_head(qkv: Qkv, ctx: &ForwardContext) -> [Tensor<4>; 3] {
    [qkv.q, qkv.k, qkv.v].map(|t| {
        let [_, heads, dim] = t.dims();
        t.reshape([ctx.batch, ctx.len, heads, dim]).swap_dims(1, 2)
    })
}

/// `[batch, heads, columns, head_dim]` as rows `[tokens, heads · head_dim]`.
fn rows(mixed: Tensor<4>) -> Tensor<2> {
    let [batch, heads, len, dim] = mixed.dims();
    mixed.swap_dims(1, 2).reshape([batch * len, heads * dim])
}

/// The first part of an attention half.
#[derive(Clone, Debug)]
pub struct Projected {
    /// Queries, keys and values.
    pub qkv: Qkv,
    /// What the mixed values are multiplied by the sigmoid of, `[tokens, heads · head_dim]`, where the architecture has
    /// that.
    pub gate: Option<Tensor<2>>,
}

/// Norm, q/k/v, rotary embedding.
pub(crate) fn project(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &ForwardContext,
    lora: Option<LoraForward<'_>>,
) -> Projected {
    let h = normed_input(arch, w, x);
    project_normed(arch, layer, w, &h, ctx, lora)
}

/// [`project`] of normed rows.
pub(crate) fn project_normed(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    h: &Tensor<2>,
    ctx: &ForwardContext,
    lora: Option<LoraForward<'_>>,
) -> Projected {
    let rotary = ctx.rotary();
    let (qkv, gate) = query_key_value(arch, w, h, rotary.query_scale(), lora);
    let [q, k, v] = qkv.map(|y| heads_apart(arch, y));
    let qkv = Qkv { q: rotary.of(layer).rotate(q), k: rotary.of(layer).rotate(k), v, sinks: w.get(Slot::Sinks) };
    Projected { qkv, gate }
}

/// `[tokens, heads · head_dim]` as `[tokens, heads, head_dim]`.
fn heads_apart(arch: &Arch, y: Tensor<2>) -> Tensor<3> {
    let [tokens, width] = y.dims();
    y.reshape([tokens, width / arch.head_dim, arch.head_dim])
}

/// Rotates what a kernel that rotates whole heads does not.
fn rotate_part(arch: &Arch, layer: usize, [q, k, v]: [Tensor<2>; 3], ctx: &ForwardContext) -> [Tensor<2>; 3] {
    let rotate = |y: Tensor<2>| {
        let shape = y.dims();
        let rotated = ctx.rotary().of(layer).rotate_part(heads_apart(arch, y));
        rotated.reshape(shape)
    };
    [rotate(q), rotate(k), v]
}

/// [`project`] before the rotary embedding: `[tokens, heads · head_dim]` each. Queries are multiplied by `scale`,
/// `[tokens, 1]`, here: a rotation does not change that.
fn project_unrotated(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    scale: Option<&Tensor<2>>,
    lora: Option<LoraForward<'_>>,
) -> ([Tensor<2>; 3], Option<Tensor<2>>) {
    let h = normed_input(arch, w, x);
    query_key_value(arch, w, &h, scale, lora)
}

/// The input of a half after its norm, where the architecture has one.
pub(crate) fn normed_input(arch: &Arch, w: &Weights, x: Tensor<2>) -> Tensor<2> {
    match w.get(Slot::InputNorm) {
        Some(norm) => rms_norm(&x, &norm, arch.norm_eps, arch.norm_offset),
        None => x,
    }
}

/// [`project_unrotated`] of normed rows, and the gate of what is mixed.
fn query_key_value(
    arch: &Arch,
    w: &Weights,
    h: &Tensor<2>,
    scale: Option<&Tensor<2>>,
    lora: Option<LoraForward<'_>>,
) -> ([Tensor<2>; 3], Option<Tensor<2>>) {
    let [q, k, v] = w.linear_each(h, [Slot::Q, Slot::K, Slot::V], lora);
    let (q, gate) = split_gate(arch, q);
    // a norm of each head has the weights of one head, a norm of all of them those of all
    let normed = |y: Tensor<2>, norm| match w.get(norm) {
        Some(weight) => {
            let ([tokens, width], [_, over]) = (y.dims(), weight.dims());
            let parts = y.reshape([tokens * width / over, over]);
            rms_norm(&parts, &weight, arch.norm_eps, arch.norm_offset).reshape([tokens, width])
        }
        None => y,
    };
    let [mut q, k] = match w.group() {
        Some(group) if arch.qk_norm == Some(QkNorm::Projection) => {
            let weights = [w.need(Slot::QNorm), w.need(Slot::KNorm)];
            group.norm_projections(arch, [q, k], weights)
        }
        _ => [normed(q, Slot::QNorm), normed(k, Slot::KNorm)],
    };
    if let Some(scale) = scale {
        let stored = q.dtype();
        q = stored_as(widened(q) * scale.clone(), stored);
    }
    ([q, k, v], gate)
}

/// Queries, and the gate that lies beside each head of them: `[tokens, heads · (head_dim + head_dim)]` as two of half
/// the width.
fn split_gate(arch: &Arch, q: Tensor<2>) -> (Tensor<2>, Option<Tensor<2>>) {
    if !arch.attention_gate {
        return (q, None);
    }
    let ([tokens, width], dim) = (q.dims(), arch.head_dim);
    let pairs = q.reshape([tokens, width / (2 * dim), 2 * dim]);
    let part = |first: usize| {
        let own = pairs.clone().narrow(2, first, dim);
        own.reshape([tokens, width / 2])
    };
    (part(0), Some(part(dim)))
}

/// Gate and output projection of attention, and residual.
pub(crate) fn project_output(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    mixed: &Tensor<2>,
    gate: Option<Tensor<2>>,
    lora: Option<LoraForward<'_>>,
) -> Tensor<2> {
    let mixed = match gate {
        Some(gate) => &(mixed.clone() * sigmoid(gate)),
        None => mixed,
    };
    add_to_residual(arch, w, x, mixed, Slot::O, lora)
}

/// The residual plus the last product of a half, which is normed first where the architecture does so.
fn add_to_residual(
    arch: &Arch,
    w: &Weights,
    residual: Tensor<2>,
    y: &Tensor<2>,
    matrix: Slot,
    lora: Option<LoraForward<'_>>,
) -> Tensor<2> {
    match w.get(Slot::PostNorm) {
        Some(_) => onto_residual(arch, w, residual, w.linear(y, matrix, lora)),
        None => w.linear_add(residual, y, matrix, lora),
    }
}

/// The feed-forward half: norm, gated MLP or experts, residual, `[tokens, hidden]`.
pub(crate) fn mlp(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &ForwardContext,
    lora: Option<LoraForward<'_>>,
) -> Tensor<2> {
    let h = normed_input(arch, w, x.clone());
    if let Some(own) = arch.experts(layer) {
        let mut y = experts::mixture(arch, layer, own, w, &h, ctx, lora);
        if own.shared.is_some() {
            y = y + shared_expert(arch, w, &h, lora);
        }
        return onto_residual(arch, w, x, y);
    }
    let gated = gated(arch, w, &h, lora);
    add_to_residual(arch, w, x, &gated, Slot::Down, lora)
}

/// What the expert of all tokens gives for normed rows, by the sigmoid of its gate.
fn shared_expert(arch: &Arch, w: &Weights, h: &Tensor<2>, lora: Option<LoraForward<'_>>) -> Tensor<2> {
    let gate = sigmoid(w.linear(h, Slot::SharedGate, None));
    w.linear(&gated(arch, w, h, lora), Slot::Down, lora) * gate
}

/// The residual plus what a half gives, which is normed first where the architecture does so.
pub(crate) fn onto_residual(arch: &Arch, w: &Weights, residual: Tensor<2>, y: Tensor<2>) -> Tensor<2> {
    match w.get(Slot::PostNorm) {
        Some(norm) => rms_norm_add(residual, y, &norm, arch.norm_eps, arch.norm_offset),
        None => residual + y,
    }
}

/// `act(gate(h)) ∘ up(h)`, `[tokens, intermediate]`.
fn gated(arch: &Arch, w: &Weights, h: &Tensor<2>, lora: Option<LoraForward<'_>>) -> Tensor<2> {
    let matrices = [Slot::Gate, Slot::Up];
    if arch.activation == Activation::Silu && matrices.iter().all(|&matrix| w.is_bare(matrix, lora)) {
        return w.linear_swiglu(h);
    }
    let [gate, up] = w.linear_each(h, matrices, lora);
    kernels::glu(gate, up, arch.activation)
}

/// Rows of the embedding matrix, `[tokens, hidden]`.
pub(crate) fn embed(arch: &Arch, w: &Weights, ids: Tensor<1, Int>) -> Tensor<2> {
    let table = w.need(Slot::Embedding);
    let rows = match w.group() {
        Some(group) => group.embed(arch, table, ids),
        None => table.select(0, ids),
    };
    scaled_embedding(arch, rows)
}

/// Rows of the embedding times its scale, where the architecture has one.
pub(crate) fn scaled_embedding(arch: &Arch, rows: Tensor<2>) -> Tensor<2> {
    match arch.embedding_scale {
        Some(scale) => rows * scale,
        None => rows,
    }
}
