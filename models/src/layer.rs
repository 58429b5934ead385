//! The two halves of a transformer layer on packed rows `[tokens, hidden]`.

pub(crate) mod decode;
mod experts;

use crate::adapter::LoraForward;
use crate::arch::{Activation, Arch};
use crate::attention::{self, AttentionParams, Qkv};
use crate::cache::{AttentionMetadata, LayerCache};
use crate::forward_context::ForwardContext;
use crate::functional::{glu, rms_norm, rms_norm_onto};
use crate::unit::Slot;
use crate::weights::Weights;
use burn::tensor::{Int, Tensor};
use firebrick_backends::precision::{stored_as, widened};

/// The attention half: norm, q/k/v, rotary embedding, attention, output projection, residual, all `[tokens, hidden]`.
///
/// With a cache, the keys and values of this forward pass are written to it, and attention runs over what it holds of each sequence.
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
    let mixed = match (cache, ctx.sequences()) {
        (Some((cache, metadata)), _) => match cache.decoded(metadata, layer) {
            Some(decode) => {
                let scale = ctx.rotary().query_scale();
                let qkv = project_unrotated(arch, w, x.clone(), scale, lora);
                cache.decode(params, qkv, decode)
            }
            None => {
                let qkv = project(arch, layer, w, x.clone(), ctx, lora);
                cache.attend(params, qkv, metadata)
            }
        },
        (None, Some(sequences)) => {
            let qkv = project(arch, layer, w, x.clone(), ctx, lora);
            attention::attend(&qkv, params, sequences)
        }
        (None, None) => {
            let [q, k, v] = by_head(project(arch, layer, w, x.clone(), ctx, lora), ctx);
            let mask = ctx.mask(params.window);
            rows(attention::scaled_dot_product_attention(
                q, k, v, params, mask,
            ))
        }
    };
    project_output(arch, w, x, &mixed, lora)
}

/// Scale, soft-cap and window of a layer's attention.
pub(crate) fn attention_params(arch: &Arch, layer: usize) -> AttentionParams {
    AttentionParams {
        scale: arch.attention_scale,
        softcap: arch.attention_softcap,
        window: arch.windows[layer],
    }
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

/// Norm, q/k/v, rotary embedding.
pub(crate) fn project(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &ForwardContext,
    lora: Option<LoraForward<'_>>,
) -> Qkv {
    let rotary = ctx.rotary();
    let [q, k, v] = project_unrotated(arch, w, x, rotary.query_scale(), lora).map(|y| {
        let [tokens, width] = y.dims();
        y.reshape([tokens, width / arch.head_dim, arch.head_dim])
    });
    Qkv {
        q: rotary.of(layer).rotate(q),
        k: rotary.of(layer).rotate(k),
        v,
    }
}

/// [`project`] before the rotary embedding: `[tokens, heads · head_dim]` each. Queries are multiplied by `scale`, `[tokens, 1]`, here: a
/// rotation does not change that.
fn project_unrotated(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    scale: Option<&Tensor<2>>,
    lora: Option<LoraForward<'_>>,
) -> [Tensor<2>; 3] {
    let h = normed_input(arch, w, x);
    query_key_value(arch, w, &h, scale, lora)
}

/// The input of a half after its norm, where the architecture has one.
fn normed_input(arch: &Arch, w: &Weights, x: Tensor<2>) -> Tensor<2> {
    match w.get(Slot::InputNorm) {
        Some(norm) => rms_norm(arch, x, norm),
        None => x,
    }
}

/// [`project_unrotated`] of normed rows.
fn query_key_value(
    arch: &Arch,
    w: &Weights,
    h: &Tensor<2>,
    scale: Option<&Tensor<2>>,
    lora: Option<LoraForward<'_>>,
) -> [Tensor<2>; 3] {
    let [q, k, v] = w.linear_each(h, [Slot::Q, Slot::K, Slot::V], lora);
    // a norm of each head has the weights of one head, a norm of all of them those of all
    let normed = |y: Tensor<2>, norm| match w.get(norm) {
        Some(weight) => {
            let ([tokens, width], [_, over]) = (y.dims(), weight.dims());
            let parts = y.reshape([tokens * width / over, over]);
            rms_norm(arch, parts, weight).reshape([tokens, width])
        }
        None => y,
    };
    let mut q = normed(q, Slot::QNorm);
    if let Some(scale) = scale {
        let stored = q.dtype();
        q = stored_as(widened(q) * scale.clone(), stored);
    }
    [q, normed(k, Slot::KNorm), v]
}

/// Output projection of attention and residual.
pub(crate) fn project_output(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    mixed: &Tensor<2>,
    lora: Option<LoraForward<'_>>,
) -> Tensor<2> {
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
        Some(norm) => rms_norm_onto(arch, residual, w.linear(y, matrix, lora), norm),
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
        return onto_residual(arch, w, x, experts::mixture(arch, layer, own, w, &h, ctx));
    }
    let gated = gated(arch, w, &h, lora);
    add_to_residual(arch, w, x, &gated, Slot::Down, lora)
}

/// The residual plus what a half gives, which is normed first where the architecture does so.
fn onto_residual(arch: &Arch, w: &Weights, residual: Tensor<2>, y: Tensor<2>) -> Tensor<2> {
    match w.get(Slot::PostNorm) {
        Some(norm) => rms_norm_onto(arch, residual, y, norm),
        None => residual + y,
    }
}

/// `act(gate(h)) ∘ up(h)`, `[tokens, intermediate]`.
fn gated(arch: &Arch, w: &Weights, h: &Tensor<2>, lora: Option<LoraForward<'_>>) -> Tensor<2> {
    let matrices = [Slot::Gate, Slot::Up];
    if arch.activation == Activation::Silu
        && matrices.iter().all(|&matrix| w.is_plain(matrix, lora))
        && let Some(y) = w.linear_swiglu(h)
    {
        return y;
    }
    let [gate, up] = w.linear_each(h, matrices, lora);
    glu(arch, gate, up)
}

/// Rows of the embedding matrix, `[tokens, hidden]`.
pub(crate) fn embed(arch: &Arch, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
    let rows = table.select(0, ids);
    match arch.embedding_scale {
        Some(scale) => rows * scale,
        None => rows,
    }
}
