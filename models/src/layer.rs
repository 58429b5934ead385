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
use firebrick_backends::kernels::{self, rms_norm, rms_norm_add, rms_norm_residual};
use firebrick_backends::precision::{stored_as, widened};

/// A half of a layer with its weights, and the adapters that run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sublayer<'a> {
    pub arch: &'a Arch,
    pub layer: usize,
    pub w: &'a Weights,
    pub lora: Option<LoraForward<'a>>,
    /// True if it runs the same kernels for few rows as for many; see [`kernels::exact()`].
    pub exact: bool,
}

/// The first part of an attention half.
#[derive(Clone, Debug)]
pub struct Projected {
    /// Queries, keys and values.
    pub qkv: Qkv,
    /// Gate whose sigmoid multiplies the output of attention, `[tokens, heads · head_dim]`, where the architecture has
    /// one.
    pub gate: Option<Tensor<2>>,
}

impl Sublayer<'_> {
    /// The attention half: norm, q/k/v, rotary embedding, attention, output projection, residual, all `[tokens,
    /// hidden]`.
    ///
    /// With a cache, the keys and values of this forward pass are written to it, and attention runs over what it holds
    /// of each sequence.
    pub fn attention(
        &self,
        x: Tensor<2>,
        ctx: &ForwardContext,
        cache: Option<(&mut LayerCache, &AttentionMetadata)>,
    ) -> Tensor<2> {
        let params = attention_params(self.arch, self.layer);
        let [h, x] = self.normed_residual(x);
        // normed rows are gone while attention runs
        let project = |h: Tensor<2>| self.project_normed(&h, ctx);
        let (mixed, gate) = match cache {
            Some((cache, metadata)) => match cache.decoded(metadata, self.layer) {
                Some(decode) => {
                    let (qkv, gate) = self.query_key_value(&h, ctx.rotary().query_scale());
                    drop(h);
                    let qkv = self.rotate_part(qkv, ctx);
                    (cache.decode(params, qkv, self.w.get(Slot::Sinks).as_ref(), decode), gate)
                }
                None => {
                    let Projected { qkv, gate } = project(h);
                    (cache.attend(params, qkv, metadata), gate)
                }
            },
            None => {
                let Projected { qkv, gate } = project(h);
                (attention::attend(&qkv, params, ctx.layout()), gate)
            }
        };
        self.project_output(x, &mixed, gate)
    }

    /// The attention half of a shard between its norm and its sum over the ranks: a part of the last product, `[tokens,
    /// hidden]`.
    pub fn attention_part(&self, h: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        let Projected { qkv, .. } = self.project_normed(h, ctx);
        let mixed = attention::attend(&qkv, attention_params(self.arch, self.layer), ctx.layout());
        self.w.linear_part(&mixed, Slot::O, self.lora)
    }

    /// [`Self::attention_part`] of the feed-forward half of a dense layer.
    pub fn mlp_part(&self, h: &Tensor<2>) -> Tensor<2> {
        self.w.linear_part(&self.gated(h), Slot::Down, self.lora)
    }

    /// Norm, q/k/v, rotary embedding.
    pub fn project(&self, x: Tensor<2>, ctx: &ForwardContext) -> Projected {
        self.project_normed(&self.normed_input(x), ctx)
    }

    /// [`Self::project`] of normed rows.
    pub fn project_normed(&self, h: &Tensor<2>, ctx: &ForwardContext) -> Projected {
        let rotary = ctx.rotary();
        let (qkv, gate) = self.query_key_value(h, rotary.query_scale());
        let [q, k, v] = qkv.map(|y| self.heads_apart(y));
        let [q, k] = rotary.layer(self.layer).rotate_each([q, k]);
        Projected { qkv: Qkv { q, k, v, sinks: self.w.get(Slot::Sinks) }, gate }
    }

    /// `[tokens, heads · head_dim]` as `[tokens, heads, head_dim]`.
    fn heads_apart(&self, y: Tensor<2>) -> Tensor<3> {
        let ([tokens, width], dim) = (y.dims(), self.arch.head_dim);
        y.reshape([tokens, width / dim, dim])
    }

    /// Rotates what a kernel that rotates whole heads does not.
    fn rotate_part(&self, [q, k, v]: [Tensor<2>; 3], ctx: &ForwardContext) -> [Tensor<2>; 3] {
        let rotate = |y: Tensor<2>| {
            let shape = y.dims();
            ctx.rotary().layer(self.layer).rotate_part(self.heads_apart(y)).reshape(shape)
        };
        [rotate(q), rotate(k), v]
    }

    /// The input of a half after its norm, where the architecture has one.
    pub fn normed_input(&self, x: Tensor<2>) -> Tensor<2> {
        match self.w.get(Slot::InputNorm) {
            Some(norm) => rms_norm(&x, &norm, self.arch.norm_eps, self.arch.norm_offset),
            None => x,
        }
    }

    /// [`Self::normed_input`], and the input for the residual connection.
    pub fn normed_residual(&self, x: Tensor<2>) -> [Tensor<2>; 2] {
        match self.w.get(Slot::InputNorm) {
            Some(norm) => rms_norm_residual(x, &norm, self.arch.norm_eps, self.arch.norm_offset),
            None => [x.clone(), x],
        }
    }

    /// Queries, keys and values of normed rows before the rotary embedding, `[tokens, heads · head_dim]` each, and the
    /// gate of attention's output. Queries are multiplied by `scale`, `[tokens, 1]`, here: a rotation does not change
    /// that.
    fn query_key_value(&self, h: &Tensor<2>, scale: Option<&Tensor<2>>) -> ([Tensor<2>; 3], Option<Tensor<2>>) {
        let Self { arch, w, .. } = self;
        let [q, k, v] = w.linear_each(h, [Slot::Q, Slot::K, Slot::V], self.lora);
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

    /// Gate and output projection of attention, and residual.
    pub fn project_output(&self, x: Tensor<2>, mixed: &Tensor<2>, gate: Option<Tensor<2>>) -> Tensor<2> {
        let mixed = match gate {
            Some(gate) => &(mixed.clone() * sigmoid(gate)),
            None => mixed,
        };
        self.add_to_residual(x, mixed, Slot::O)
    }

    /// The residual plus the last product of a half, which is normed first where the architecture does so.
    fn add_to_residual(&self, residual: Tensor<2>, y: &Tensor<2>, matrix: Slot) -> Tensor<2> {
        match self.w.get(Slot::PostNorm) {
            Some(_) => self.onto_residual(residual, self.w.linear(y, matrix, self.lora)),
            None => self.w.linear_add(residual, y, matrix, self.lora),
        }
    }

    /// The feed-forward half: norm, gated MLP or experts, residual, `[tokens, hidden]`.
    pub fn mlp(&self, x: Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        let Some(experts) = self.arch.experts(self.layer) else {
            return self.dense_mlp(x);
        };
        let [h, x] = self.normed_residual(x);
        let mut y = self.mixture(experts, &h, ctx);
        if experts.shared.is_some() {
            y = y + self.shared_expert(&h);
        }
        self.onto_residual(x, y)
    }

    /// [`Self::mlp`] of a dense layer.
    pub fn dense_mlp(&self, x: Tensor<2>) -> Tensor<2> {
        let [h, x] = self.normed_residual(x);
        self.add_to_residual(x, &self.gated(&h), Slot::Down)
    }

    /// Output of the shared expert for normed rows, times the sigmoid of its gate.
    fn shared_expert(&self, h: &Tensor<2>) -> Tensor<2> {
        let gate = sigmoid(self.w.linear(h, Slot::SharedGate, None));
        self.w.linear(&self.gated(h), Slot::Down, self.lora) * gate
    }

    /// The residual plus what a half gives, which is normed first where the architecture does so.
    pub fn onto_residual(&self, residual: Tensor<2>, y: Tensor<2>) -> Tensor<2> {
        match self.w.get(Slot::PostNorm) {
            Some(norm) => rms_norm_add(residual, y, &norm, self.arch.norm_eps, self.arch.norm_offset),
            None => residual + y,
        }
    }

    /// `act(gate(h)) ∘ up(h)`, `[tokens, intermediate]`.
    fn gated(&self, h: &Tensor<2>) -> Tensor<2> {
        let matrices = [Slot::Gate, Slot::Up];
        let bare = matrices.iter().all(|&matrix| self.w.is_bare(matrix, self.lora));
        if self.arch.activation == Activation::Silu && bare {
            return self.w.linear_swiglu(h);
        }
        let [gate, up] = self.w.linear_each(h, matrices, self.lora);
        kernels::glu(gate, up, self.arch.activation)
    }
}

/// Scale, soft-cap and window of a layer's attention.
pub(crate) fn attention_params(arch: &Arch, layer: usize) -> AttentionParams {
    AttentionParams { scale: arch.attention_scale, softcap: arch.attention_softcap, window: arch.windows[layer] }
}

/// Queries, and the gate that lies beside each head of them: `[tokens, heads · (head_dim + head_dim)]` as two of half
/// the width.
fn split_gate(arch: &Arch, q: Tensor<2>) -> (Tensor<2>, Option<Tensor<2>>) {
    if !arch.attention_gate {
        return (q, None);
    }
    let ([tokens, width], dim) = (q.dims(), arch.head_dim);
    let pairs = q.reshape([tokens, width / (2 * dim), 2 * dim]);
    let part = |first: usize| pairs.clone().narrow(2, first, dim).reshape([tokens, width / 2]);
    (part(0), Some(part(dim)))
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
