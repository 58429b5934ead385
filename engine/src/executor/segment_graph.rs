//! A segment under a graph, and its gradient.
//!
//! Attention over packed rows, or over long sequences, is not traced: its scores are computed without a graph and once more,
//! a few sequences or a chunk of queries at a time, on the way back. So no `[heads, T, T]` tensor is kept, and rows are
//! gathered for attention and put back by gathers in both directions.

use super::gradients::Gradients;
use super::runtime::Runtime;
use crate::batch::MicroBatch;
use burn::tensor::{Gradients as Tape, Tensor};
use firebrick_models::Decoder;
use firebrick_models::Projected;
use firebrick_models::attention::Qkv;
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::weights::Weights;
use std::ops::Range;

/// Consecutive parts of a segment that one graph covers.
pub(super) enum Piece {
    /// Whole units.
    Units(Box<Graph>),
    /// An attention unit whose scores are left out of the graph.
    Attention(Box<SplitAttention>),
}

/// Leaves and root of a graph.
pub(super) struct Graph {
    input: Tensor<2>,
    units: Vec<(usize, Weights)>,
    output: Tensor<2>,
}

/// The two ends of an attention unit under graphs of their own, around scores that are not kept.
pub(super) struct SplitAttention {
    unit: usize,
    weights: Weights,
    input: Tensor<2>,
    qkv: Qkv,
    /// The gate of what is mixed, and the same as a leaf of the second graph.
    gate: Option<[Tensor<2>; 2]>,
    residual: Tensor<2>,
    mixed: Tensor<2>,
    output: Tensor<2>,
}

/// Runs a segment with its input and weights as leaves; the output is off the graph.
pub(super) fn trace(
    decoder: &Decoder,
    units: Range<usize>,
    weights: &[Weights],
    input: Tensor<2>,
    micro: &MicroBatch,
) -> (Vec<Piece>, Tensor<2>) {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut x = input;
    for (unit, weights) in units.zip(weights) {
        if decoder.attends(unit) && micro.ctx.recomputes_attention() {
            let piece = SplitAttention::trace(decoder, unit, weights, x, &micro.ctx);
            x = piece.output.clone().inner();
            pieces.push(Piece::Attention(Box::new(piece)));
            continue;
        }
        if !matches!(pieces.last(), Some(Piece::Units(_))) {
            let input = x.clone().autodiff().require_grad();
            pieces.push(Piece::Units(Box::new(Graph {
                output: input.clone(),
                input,
                units: Vec::new(),
            })));
        }
        if let Some(Piece::Units(graph)) = pieces.last_mut() {
            let own = decoder.units()[unit].leaves(weights);
            graph.output = decoder.run(unit, &own, graph.output.clone(), &micro.ctx);
            graph.units.push((unit, own));
            x = graph.output.clone().inner();
        }
    }
    (pieces, x)
}

/// Gradient of a segment's input, given its output's; adds those of its weights to `gradients`.
pub(super) fn backward(
    decoder: &Decoder,
    pieces: Vec<Piece>,
    d_output: Tensor<2>,
    micro: &MicroBatch,
    gradients: &mut Gradients,
    runtime: &Runtime,
) -> Tensor<2> {
    pieces
        .into_iter()
        .rev()
        .fold(d_output, |d, piece| match piece {
            Piece::Units(graph) => graph.backward(decoder, d, gradients, runtime),
            Piece::Attention(piece) => piece.backward(decoder, d, &micro.ctx, gradients, runtime),
        })
}

/// Gradients of leaves into the accumulators.
fn collect(
    decoder: &Decoder,
    unit: usize,
    leaves: &Weights,
    tape: &mut Tape,
    gradients: &mut Gradients,
) {
    let range = decoder.units()[unit].range.clone();
    for (index, leaf) in range.zip(leaves.tensors()) {
        if let Some(gradient) = leaf.grad_remove(tape) {
            gradients.add(index, gradient);
        }
    }
}

fn taken<const D: usize>(leaf: &Tensor<D>, tape: &mut Tape) -> Tensor<D> {
    leaf.grad_remove(tape)
        .unwrap_or_else(|| leaf.clone().inner().zeros_like())
}

impl Graph {
    fn backward(
        self,
        decoder: &Decoder,
        d_output: Tensor<2>,
        gradients: &mut Gradients,
        runtime: &Runtime,
    ) -> Tensor<2> {
        // a product with the incoming gradient as root: its own gradient is one
        let mut tape = (self.output * d_output).sum().backward();
        // all gradients of the graph beside those that they are added to
        runtime.raise_peak();
        for (unit, leaves) in &self.units {
            collect(decoder, *unit, leaves, &mut tape, gradients);
        }
        taken(&self.input, &mut tape)
    }
}

impl SplitAttention {
    fn trace(
        decoder: &Decoder,
        unit: usize,
        weights: &Weights,
        x: Tensor<2>,
        ctx: &ForwardContext,
    ) -> Self {
        let weights = decoder.units()[unit].leaves(weights);
        let input = x.clone().autodiff().require_grad();
        let Projected { qkv, gate } = decoder.project(unit, &weights, input.clone(), ctx);
        let mixed = decoder.attend(unit, &inner(&qkv), ctx);
        let mixed = mixed.autodiff().require_grad();
        let residual = x.autodiff().require_grad();
        let gate = gate.map(|gate| [gate.clone(), gate.inner().autodiff().require_grad()]);
        let own = (&mixed, gate.as_ref().map(|[_, leaf]| leaf.clone()));
        let output = decoder.project_output(unit, &weights, residual.clone(), own, ctx);
        Self {
            unit,
            weights,
            input,
            qkv,
            gate,
            residual,
            mixed,
            output,
        }
    }

    fn backward(
        self,
        decoder: &Decoder,
        d_output: Tensor<2>,
        ctx: &ForwardContext,
        gradients: &mut Gradients,
        runtime: &Runtime,
    ) -> Tensor<2> {
        let mut tape = (self.output * d_output).sum().backward();
        collect(decoder, self.unit, &self.weights, &mut tape, gradients);
        let d_residual = taken(&self.residual, &mut tape);
        let d_mixed = taken(&self.mixed, &mut tape);
        let gate = self.gate.map(|[gate, leaf]| gate * taken(&leaf, &mut tape));
        drop(tape);

        let (plain, mixed) = (inner(&self.qkv), self.mixed.inner());
        let d = decoder.attend_backward(self.unit, &plain, mixed, d_mixed, ctx);
        drop(plain);
        // queries, keys and values and their gradients beside the graph that they came from
        runtime.raise_peak();
        let root = (self.qkv.q * d.q).sum() + (self.qkv.k * d.k).sum() + (self.qkv.v * d.v).sum();
        let root = match gate {
            Some(gate) => root + gate.sum(),
            None => root,
        };
        let mut tape = root.backward();
        collect(decoder, self.unit, &self.weights, &mut tape, gradients);
        d_residual + taken(&self.input, &mut tape)
    }
}

fn inner(qkv: &Qkv) -> Qkv {
    Qkv {
        q: qkv.q.clone().inner(),
        k: qkv.k.clone().inner(),
        v: qkv.v.clone().inner(),
    }
}
