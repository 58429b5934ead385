//! A segment: run without a graph, or under graphs and differentiated.
//!
//! Attention over packed rows, or over long sequences, is not traced: its scores are computed without a graph and once
//! more, a few sequences or a chunk of queries at a time, in the backward pass. So no `[heads, T, T]` tensor is kept,
//! and rows are gathered for attention and put back by gathers in both directions. Graphs also end at collectives.
//!
//! [`Sharding`] divides the arithmetic of embedding, layers and head over ranks. One rank has the default methods;
//! `tensor_parallel` and `sequence_parallel` implement the others, and `pipeline_parallel` divides whole layers. Data
//! parallel and `ZeRO` divide no arithmetic: they are in gradients and weights.

use super::gradients::{Gradients, TokenRows};
use super::leaves::{self, inner, qkv_root, take_gradient};
use super::runtime::Runtime;
use crate::batch::MicroBatch;
use burn::tensor::Tensor;
use firebrick_backends::kernels::backward_root;
use firebrick_core::Result;
use firebrick_models::attention::Qkv;
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::weights::Weights;
use firebrick_models::{Decoder, Projected};
use std::ops::Range;

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

/// Consecutive parts of a segment that one graph covers.
pub(super) enum Piece {
    /// Whole units.
    Units(Box<Graph>),
    /// A unit whose graphs leave out attention or collectives.
    Unit(Box<dyn UnitGraph>),
}

/// Leaves and root of a graph.
pub(super) struct Graph {
    input: Tensor<2>,
    units: Vec<(usize, Weights)>,
    output: Tensor<2>,
}

/// The projections of an attention unit under two graphs, around scores that are not kept.
struct SplitAttention {
    unit: usize,
    weights: Weights,
    input: Tensor<2>,
    qkv: Qkv,
    /// The gate of attention's output, and the same as a leaf of the second graph.
    gate: Option<[Tensor<2>; 2]>,
    residual: Tensor<2>,
    mixed: Tensor<2>,
    output: Tensor<2>,
    attended: Option<Attended>,
}

/// Runs a segment without a graph.
pub(super) fn run(at: PassContext<'_>, units: Range<usize>, weights: &[Weights], x: &mut Tensor<2>) -> Result<()> {
    for (unit, weights) in units.zip(weights) {
        *x = at.sharding.run(at, unit, weights, take(x))?;
    }
    Ok(())
}

/// Moves a tensor out of its place, so that it has one owner while it is used up.
pub(super) fn take(x: &mut Tensor<2>) -> Tensor<2> {
    let empty = Tensor::empty([0, 0], &x.device());
    std::mem::replace(x, empty)
}

/// Runs a segment with its input and weights as leaves; the output is off the graph.
pub(super) fn trace(
    at: PassContext<'_>,
    units: Range<usize>,
    weights: &[Weights],
    input: Tensor<2>,
) -> Result<(Vec<Piece>, Tensor<2>)> {
    let decoder = at.decoder;
    let splits = at.sharding.splits_attention(at.forward());
    let mut pieces: Vec<Piece> = Vec::new();
    let mut x = input;
    for (unit, weights) in units.zip(weights) {
        let traced = if splits && decoder.attends(unit) {
            SplitAttention::trace(at, unit, weights, x)?
        } else {
            at.sharding.trace(at, unit, weights, x)?
        };
        match traced {
            Traced::Unit(graph, y) => {
                pieces.push(Piece::Unit(graph));
                x = y;
            }
            Traced::Joins(input) => {
                if !matches!(pieces.last(), Some(Piece::Units(_))) {
                    let input = input.autodiff().require_grad();
                    pieces.push(Piece::Units(Box::new(Graph { output: input.clone(), input, units: Vec::new() })));
                }
                let Some(Piece::Units(graph)) = pieces.last_mut() else { unreachable!("pushed above") };
                let leaves = decoder.units()[unit].leaves(weights);
                graph.output = decoder.run(unit, &leaves, graph.output.clone(), at.forward());
                graph.units.push((unit, leaves));
                x = graph.output.clone().inner();
            }
        }
    }
    Ok((pieces, x))
}

/// Gradient of a segment's input, given its output's; adds those of its weights to `gradients`.
pub(super) fn backward(
    at: PassContext<'_>,
    pieces: Vec<Piece>,
    d_output: Tensor<2>,
    gradients: &mut Gradients,
) -> Result<Tensor<2>> {
    pieces.into_iter().rev().try_fold(d_output, |d, piece| match piece {
        Piece::Units(graph) => Ok(graph.backward(at, d, gradients)),
        Piece::Unit(graph) => graph.backward(at, d, gradients),
    })
}

impl Graph {
    fn backward(self, at: PassContext<'_>, d_output: Tensor<2>, gradients: &mut Gradients) -> Tensor<2> {
        let root = backward_root(self.output, d_output);
        let units = self.units.iter().map(|(unit, leaves)| (*unit, leaves));
        // gradients of the graph beside those that they are added to
        let mut tape = leaves::backward(root, at.decoder, units, gradients, || at.runtime.raise_peak());
        take_gradient(&self.input, &mut tape)
    }
}

impl SplitAttention {
    fn trace(at: PassContext<'_>, unit: usize, weights: &Weights, x: Tensor<2>) -> Result<Traced> {
        let (decoder, ctx) = (at.decoder, at.forward());
        let weights = decoder.units()[unit].leaves(weights);
        let input = x.clone().autodiff().require_grad();
        let Projected { qkv, gate } = decoder.project(unit, &weights, input.clone(), ctx);
        let (mixed, attended) = at.sharding.attend(at, unit, &inner(&qkv))?;
        let mixed = mixed.autodiff().require_grad();
        let residual = x.autodiff().require_grad();
        let gate = gate.map(|gate| [gate.clone(), gate.inner().autodiff().require_grad()]);
        let leaf = gate.as_ref().map(|[_, leaf]| leaf.clone());
        let output = decoder.project_output(unit, &weights, residual.clone(), &mixed, leaf, ctx);
        let y = output.clone().inner();
        let graph = Self { unit, weights, input, qkv, gate, residual, mixed, output, attended };
        Ok(Traced::Unit(Box::new(graph), y))
    }
}

impl UnitGraph for SplitAttention {
    fn backward(
        self: Box<Self>,
        at: PassContext<'_>,
        d_output: Tensor<2>,
        gradients: &mut Gradients,
    ) -> Result<Tensor<2>> {
        let Self { unit, weights, input, qkv, gate, residual, mixed, output, attended } = *self;
        let root = backward_root(output, d_output);
        let mut tape = leaves::backward(root, at.decoder, [(unit, &weights)], gradients, || {});
        let d_residual = take_gradient(&residual, &mut tape);
        let d_mixed = take_gradient(&mixed, &mut tape);
        let gate = gate.map(|[gate, leaf]| gate * take_gradient(&leaf, &mut tape));
        drop(tape);

        let kept = (inner(&qkv), mixed.inner(), attended);
        let d = at.sharding.attend_backward(at, unit, kept, d_mixed)?;
        // queries, keys and values and their gradients beside the graph that they came from
        at.runtime.raise_peak();
        let root = qkv_root([qkv.q, qkv.k, qkv.v], [d.q, d.k, d.v]);
        // frozen ones are constants
        let sinks = qkv.sinks.filter(|sinks| sinks.device().is_autodiff());
        let root = match sinks.zip(d.sinks) {
            Some((sinks, d_sinks)) => root + backward_root(sinks, d_sinks),
            None => root,
        };
        let root = match gate {
            Some(gate) => root + gate.sum(),
            None => root,
        };
        let mut tape = leaves::backward(root, at.decoder, [(unit, &weights)], gradients, || {});
        Ok(d_residual + take_gradient(&input, &mut tape))
    }
}
