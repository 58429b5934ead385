//! The forward pass of a decoder, whole and by unit.

use super::Decoder;
use crate::arch::Mixer;
use crate::attention::{self, AttentionParams, Qkv, SequenceLayout};
use crate::cache::{AttentionMetadata, KvCache};
use crate::forward_context::ForwardContext;
use crate::head::Head;
use crate::layer::{self, Projected};
use crate::routing::Routing;
use crate::unit::{Slot, UnitKind};
use crate::weights::Weights;
use burn::tensor::{Int, Tensor};
use firebrick_backends::kernels;
use std::ops::Range;

impl Decoder {
    /// The weights of a unit on the device: shared, or uploaded from the host.
    ///
    /// # Panics
    /// If the unit has [parts](Decoder::shard_unit) of them.
    pub fn weights(&self, unit: usize) -> Weights {
        assert!(
            !self.units[unit].is_sharded(),
            "unit {unit} has a part of its weights: they are gathered before it runs"
        );
        self.units[unit].store.fetch(&self.device).shared_by(self.tensor.as_ref())
    }

    /// Embeds token ids `[tokens]`: `[tokens, hidden]`.
    pub fn embed(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        self.embed_with(&self.weights(0), ids)
    }

    /// [`Self::embed`] with these weights of the embedding unit. Ids `[tokens]` become `[tokens, hidden]`.
    pub fn embed_with(&self, weights: &Weights, ids: Tensor<1, Int>) -> Tensor<2> {
        layer::embed(&self.arch, weights, ids)
    }

    /// Runs one unit of [`Self::body`] on rows `[tokens, hidden]` with these weights (leaves of a graph, or uploaded
    /// from the host): `[tokens, hidden]`.
    pub fn run(&self, unit: usize, weights: &Weights, x: Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        let sublayer = self.sublayer(unit, weights, ctx.dropout());
        kernels::exact(self.exact, || match self.mixer(unit) {
            Some(Mixer::Attention) => sublayer.attention(x, ctx, None),
            Some(Mixer::GatedDeltaNet) => sublayer.delta_net(x, ctx.delta(), None),
            None => sublayer.mlp(x, ctx),
        })
    }

    /// The mixer of a unit; `None` for other units.
    fn mixer(&self, unit: usize) -> Option<Mixer> {
        match self.units[unit].kind {
            UnitKind::Attention(layer) => Some(self.arch.mixers[layer]),
            _ => None,
        }
    }

    /// Indices of the units between embedding and head.
    pub fn body(&self) -> Range<usize> {
        1..self.units.len() - 1
    }

    /// Hidden states after the last layer, `[tokens, hidden]`, for token ids `[tokens]`, without an autodiff graph.
    pub fn hidden(&self, ids: Tensor<1, Int>, ctx: &ForwardContext) -> Tensor<2> {
        self.body().fold(self.embed(ids), |x, unit| self.run(unit, &self.weights(unit), x, ctx))
    }

    /// [`Self::hidden`] for some tokens of sequences whose earlier ones are in `cache`; these are written to it. Ids
    /// `[tokens]` become `[tokens, hidden]`.
    pub fn hidden_cached(&self, ids: Tensor<1, Int>, metadata: &AttentionMetadata, cache: &mut KvCache) -> Tensor<2> {
        kernels::exact(self.exact, || self.hidden_after(ids, metadata, cache))
    }

    fn hidden_after(&self, ids: Tensor<1, Int>, metadata: &AttentionMetadata, cache: &mut KvCache) -> Tensor<2> {
        cache.copy_shared_blocks();
        let routing = match &metadata.route_slots {
            Some(slots) => Routing::default().recorded(slots.len(), self.arch.route_width()),
            None => Routing::default(),
        };
        let ctx = &ForwardContext::cached(&metadata.rotary).with_routing(routing);
        let mut x = self.embed(ids);
        for index in self.body() {
            let weights = self.weights(index);
            let sublayer = self.sublayer(index, &weights, None);
            x = match self.mixer(index) {
                Some(Mixer::Attention) => sublayer.attention(x, ctx, Some((cache.layer(sublayer.layer), metadata))),
                Some(Mixer::GatedDeltaNet) => {
                    sublayer.delta_net(x, metadata.delta(), Some(cache.states(sublayer.layer)))
                }
                None => sublayer.mlp(x, ctx),
            };
        }
        if let (Some(slots), Some(routes)) = (&metadata.route_slots, ctx.routing().take_recorded()) {
            cache.write_routes(slots, &routes);
        }
        x
    }

    /// Final norm and projection.
    pub fn head(&self) -> Head<'_> {
        self.head_with(&self.weights(self.units.len() - 1))
    }

    /// [`Self::head`] with these weights of the head unit; a tied projection comes from the embedding unit.
    pub fn head_with(&self, weights: &Weights) -> Head<'_> {
        let (projection, panels) = match weights.get(Slot::Projection) {
            Some(projection) => (projection, weights.panels(Slot::Projection).cloned()),
            None => {
                let embedding = self.weights(0);
                let panels = embedding.panels(Slot::Embedding).cloned();
                (embedding.need(Slot::Embedding), panels)
            }
        };
        let tokens = self.projected_tokens();
        // rows of no token are no part of the distribution
        let projection = match &tokens {
            Some(tokens) => projection.narrow(0, 0, tokens.len()),
            None => projection,
        };
        let specs = &self.units[self.units.len() - 1].specs;
        let trainable = specs.iter().any(|s| s.slot == Slot::InputNorm && s.trainable);
        Head {
            arch: &self.arch,
            norm: weights.need(Slot::InputNorm),
            projection,
            panels,
            bias: weights.get(Slot::ProjectionBias),
            value: weights.get(Slot::Value),
            local_tokens: tokens,
            trainable,
            projection_trains: trainable,
            exact: self.exact,
        }
    }

    /// The kind of a unit.
    pub fn kind(&self, unit: usize) -> UnitKind {
        self.units[unit].kind
    }

    /// True if a unit attends: the mixer of a layer of linear attention does not.
    pub fn attends(&self, unit: usize) -> bool {
        self.mixer(unit) == Some(Mixer::Attention)
    }

    /// The first part of an attention unit: norm, q/k/v and rotary embedding, `[tokens, heads, head_dim]` each.
    pub fn project(&self, unit: usize, weights: &Weights, x: Tensor<2>, ctx: &ForwardContext) -> Projected {
        self.sublayer(unit, weights, ctx.dropout()).project(x, ctx)
    }

    /// The middle part, over whole sequences: the output of attention, `[tokens, heads · head_dim]`.
    pub fn attend(&self, unit: usize, qkv: &Qkv, ctx: &ForwardContext) -> Tensor<2> {
        let (params, sequences) = self.attention_of(unit, ctx);
        attention::attend(qkv, params, sequences)
    }

    /// Gradients of queries, keys and values, given the output of [`Self::attend`] and its gradient. Output and
    /// gradient are `[tokens, heads · head_dim]`; the gradients have the shapes of [`Qkv`].
    pub fn attend_backward(
        &self,
        unit: usize,
        qkv: &Qkv,
        mixed: Tensor<2>,
        d_mixed: Tensor<2>,
        ctx: &ForwardContext,
    ) -> Qkv {
        let (params, sequences) = self.attention_of(unit, ctx);
        attention::attend_backward(qkv, mixed, d_mixed, params, sequences)
    }

    fn attention_of<'c>(&self, unit: usize, ctx: &'c ForwardContext) -> (AttentionParams, &'c SequenceLayout) {
        match self.units[unit].kind {
            UnitKind::Attention(layer) => (layer::attention_params(&self.arch, layer), ctx.layout()),
            _ => unreachable!("attention of whole sequences is asked of an attention unit"),
        }
    }

    /// The last part: gate and output projection of `mixed`, `[tokens, heads · head_dim]`, and residual `x`: `[tokens,
    /// hidden]`.
    pub fn project_output(
        &self,
        unit: usize,
        weights: &Weights,
        x: Tensor<2>,
        mixed: &Tensor<2>,
        gate: Option<Tensor<2>>,
        ctx: &ForwardContext,
    ) -> Tensor<2> {
        self.sublayer(unit, weights, ctx.dropout()).project_output(x, mixed, gate)
    }
}
