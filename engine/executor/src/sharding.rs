//! Division of a model's arithmetic over ranks, which embedding, layers and head ask for. One rank has the default
//! methods; `tensor_parallel` and `sequence_parallel` implement the others, and `pipeline_parallel` divides whole
//! layers. Data parallel and `ZeRO` divide no arithmetic: they are in gradients and weights.

use super::gradients::{Gradients, TokenRows};
use super::runtime::Runtime;
use crate::batch::MicroBatch;
use burn::tensor::Tensor;
use firebrick_core::Result;
use firebrick_models::Decoder;
use firebrick_models::attention::Qkv;
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::weights::Weights;

/// A micro-batch in a pass through a model.
#[derive(Clone, Copy)]
pub(super) struct PassContext<'a> {
    pub decoder: &'a Decoder,
    pub micro: &'a MicroBatch,
    pub runtime: &'a Runtime,
    pub sharding: &'a dyn Sharding,
}

impl<'a> PassContext<'a> {
    /// The forward context of the micro-batch.
    pub fn forward(self) -> &'a ForwardContext {
        &self.micro.ctx
    }
}

/// A traced unit, or consecutive ones.
pub(super) trait UnitGraph {
    /// Gradient of the input, given the output's; adds those of the weights to `gradients`.
    fn backward(
        self: Box<Self>,
        at: PassContext<'_>,
        d_output: Tensor<2>,
        gradients: &mut Gradients,
    ) -> Result<Tensor<2>>;
}

/// Attention of some heads over all rows, as its backward pass needs it.
pub(super) struct Attended {
    /// `[all rows, heads of this rank, head_dim]` each; leaves of a graph if `mixed` has one.
    pub qkv: Qkv,
    /// `[all rows, heads of this rank · head_dim]`.
    pub mixed: Tensor<2>,
}

/// Division of a micro-batch's arithmetic over ranks.
pub(super) trait Sharding {
    /// Rows of a micro-batch's tokens, `[tokens, hidden]`.
    fn embed(&self, at: PassContext<'_>, weights: &Weights) -> Result<Tensor<2>> {
        Ok(at.decoder.embed_with(weights, at.micro.ids.clone()))
    }

    /// Adds the gradient of a micro-batch's rows, `[tokens, hidden]`, to that of the embedding.
    fn embedding_gradient(&self, at: PassContext<'_>, d: Tensor<2>, gradients: &mut Gradients) -> Result<()> {
        let PassContext { decoder, micro, runtime, .. } = at;
        let rows = TokenRows { ids: &micro.ids, sorted: micro.segments.as_ref() };
        gradients.add_rows(0, decoder.arch().vocab_size, rows, d, runtime)
    }

    /// A unit without a graph.
    fn run(&self, at: PassContext<'_>, unit: usize, weights: &Weights, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(at.decoder.run(unit, weights, x, at.forward()))
    }

    /// A unit with its weights as leaves.
    fn trace(&self, _at: PassContext<'_>, _unit: usize, _weights: &Weights, x: Tensor<2>) -> Result<Traced> {
        Ok(Traced::Joins(x))
    }

    /// True if attention runs outside the graphs of its block.
    fn splits_attention(&self, ctx: &ForwardContext) -> bool {
        ctx.recomputes_attention()
    }

    /// Attention without a graph, `[rows, heads · head_dim]`, and the part of it that the backward pass needs.
    fn attend(&self, at: PassContext<'_>, unit: usize, qkv: &Qkv) -> Result<(Tensor<2>, Option<Attended>)> {
        Ok((at.decoder.attend(unit, qkv, at.forward()), None))
    }

    /// Gradients of queries, keys and values, given the gradient of [`attend`](Self::attend)'s result, `mixed`.
    fn attend_backward(
        &self,
        at: PassContext<'_>,
        unit: usize,
        (qkv, mixed, _): (Qkv, Tensor<2>, Option<Attended>),
        d_mixed: Tensor<2>,
    ) -> Result<Qkv> {
        Ok(at.decoder.attend_backward(unit, &qkv, mixed, d_mixed, at.forward()))
    }

    /// Log-probs and entropies of all scored tokens of the micro-batch's sequences, given those of this rank's tokens
    /// by chunk.
    fn scores(&self, _at: PassContext<'_>, [logp, entropy]: [Vec<Tensor<1>>; 2]) -> Result<[Tensor<1>; 2]> {
        Ok([Tensor::cat(logp, 0), Tensor::cat(entropy, 0)])
    }
}

/// Result of [`Sharding::trace`].
pub(super) enum Traced {
    /// The unit under graphs that end at its collectives, and its output off the graph.
    Unit(Box<dyn UnitGraph>, Tensor<2>),
    /// The input of a unit without collectives, which can be part of the graph of the unit before it.
    Joins(Tensor<2>),
}

/// One rank, or ranks that divide the batch.
pub(super) struct Unsharded;

impl Sharding for Unsharded {}
