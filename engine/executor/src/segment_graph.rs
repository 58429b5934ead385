//! A segment under a graph, and its gradient.
//!
//! Attention over packed rows, or over long sequences, is not traced: its scores are computed without a graph and once
//! more, a few sequences or a chunk of queries at a time, on the way back. So no `[heads, T, T]` tensor is kept, and
//! rows are gathered for attention and put back by gathers in both directions. Nor is attention that ranks share: they
//! exchange what it takes and gives ([`sequence_parallel`](super::sequence_parallel)). Where ranks share matrices,
//! graphs end at the sums ([`tensor_parallel`](super::tensor_parallel)).

use super::gradients::Gradients;
use super::leaves::{collect, inner, qkv_root, taken};
use super::runtime::Runtime;
use super::sequence_parallel::{self, Attended, UlyssesAttention};
use super::tensor_parallel::{self, TpSublayer};
use crate::batch::MicroBatch;
use burn::tensor::Tensor;
use firebrick_backends::kernels::backward_root;
use firebrick_core::Result;
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
    /// A half of a layer whose matrices ranks share.
    Shared(Box<TpSublayer>),
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
    /// Attention of some heads over all rows, where ranks share the rows.
    shared: Option<Attended>,
}

/// Runs a segment without a graph.
pub(super) fn run(
    decoder: &Decoder,
    units: Range<usize>,
    weights: &[Weights],
    x: &mut Tensor<2>,
    micro: &MicroBatch,
    runtime: &Runtime,
) -> Result<()> {
    let ctx = &micro.ctx;
    for (unit, weights) in units.zip(weights) {
        *x = if decoder.share().is_some() {
            tensor_parallel::run(decoder, unit, weights, take(x), micro, runtime)?
        } else if micro.whole.is_some() && decoder.attends(unit) {
            let shared = UlyssesAttention { decoder, unit, ctx, runtime };
            sequence_parallel::run(shared, weights, take(x))?
        } else {
            decoder.run(unit, weights, take(x), ctx)
        };
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
    decoder: &Decoder,
    units: Range<usize>,
    weights: &[Weights],
    input: Tensor<2>,
    micro: &MicroBatch,
    runtime: &Runtime,
) -> Result<(Vec<Piece>, Tensor<2>)> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut x = input;
    for (unit, weights) in units.zip(weights) {
        if decoder.share().is_some() {
            let (half, y) = TpSublayer::trace(decoder, unit, weights, x, micro, runtime)?;
            x = y;
            pieces.push(Piece::Shared(Box::new(half)));
            continue;
        }
        let split = micro.whole.is_some() || micro.ctx.recomputes_attention();
        if decoder.attends(unit) && split {
            let piece = SplitAttention::trace(decoder, unit, weights, x, micro, runtime)?;
            x = piece.output.clone().inner();
            pieces.push(Piece::Attention(Box::new(piece)));
            continue;
        }
        if !matches!(pieces.last(), Some(Piece::Units(_))) {
            let input = x.clone().autodiff().require_grad();
            pieces.push(Piece::Units(Box::new(Graph { output: input.clone(), input, units: Vec::new() })));
        }
        if let Some(Piece::Units(graph)) = pieces.last_mut() {
            let own = decoder.units()[unit].leaves(weights);
            graph.output = decoder.run(unit, &own, graph.output.clone(), &micro.ctx);
            graph.units.push((unit, own));
            x = graph.output.clone().inner();
        }
    }
    Ok((pieces, x))
}

/// Gradient of a segment's input, given its output's; adds those of its weights to `gradients`.
pub(super) fn backward(
    decoder: &Decoder,
    pieces: Vec<Piece>,
    d_output: Tensor<2>,
    micro: &MicroBatch,
    gradients: &mut Gradients,
    runtime: &Runtime,
) -> Result<Tensor<2>> {
    pieces.into_iter().rev().try_fold(d_output, |d, piece| match piece {
        Piece::Units(graph) => Ok(graph.backward(decoder, d, gradients, runtime)),
        Piece::Attention(piece) => piece.backward(decoder, d, &micro.ctx, gradients, runtime),
        Piece::Shared(half) => half.backward(decoder, d, micro, gradients, runtime),
    })
}

impl Graph {
    fn backward(
        self,
        decoder: &Decoder,
        d_output: Tensor<2>,
        gradients: &mut Gradients,
        runtime: &Runtime,
    ) -> Tensor<2> {
        let mut tape = backward_root(self.output, d_output).backward();
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
        micro: &MicroBatch,
        runtime: &Runtime,
    ) -> Result<Self> {
        let ctx = &micro.ctx;
        let weights = decoder.units()[unit].leaves(weights);
        let input = x.clone().autodiff().require_grad();
        let Projected { qkv, gate } = decoder.project(unit, &weights, input.clone(), ctx);
        let (mixed, shared) = if micro.whole.is_some() {
            let shared = UlyssesAttention { decoder, unit, ctx, runtime };
            let (mixed, attended) = shared.attend(&inner(&qkv))?;
            (mixed, Some(attended))
        } else {
            (decoder.attend(unit, &inner(&qkv), ctx), None)
        };
        let mixed = mixed.autodiff().require_grad();
        let residual = x.autodiff().require_grad();
        let gate = gate.map(|gate| [gate.clone(), gate.inner().autodiff().require_grad()]);
        let leaf = gate.as_ref().map(|[_, leaf]| leaf.clone());
        let output = decoder.project_output(unit, &weights, residual.clone(), &mixed, leaf, ctx);
        Ok(Self { unit, weights, input, qkv, gate, residual, mixed, output, shared })
    }

    fn backward(
        self,
        decoder: &Decoder,
        d_output: Tensor<2>,
        ctx: &ForwardContext,
        gradients: &mut Gradients,
        runtime: &Runtime,
    ) -> Result<Tensor<2>> {
        let mut tape = backward_root(self.output, d_output).backward();
        collect(decoder, self.unit, &self.weights, &mut tape, gradients);
        let d_residual = taken(&self.residual, &mut tape);
        let d_mixed = taken(&self.mixed, &mut tape);
        let gate = self.gate.map(|[gate, leaf]| gate * taken(&leaf, &mut tape));
        drop(tape);

        let d = match self.shared {
            Some(attended) => {
                let shared = UlyssesAttention { decoder, unit: self.unit, ctx, runtime };
                shared.backward(attended, d_mixed)?
            }
            None => {
                let (plain, mixed) = (inner(&self.qkv), self.mixed.inner());
                decoder.attend_backward(self.unit, &plain, mixed, d_mixed, ctx)
            }
        };
        // queries, keys and values and their gradients beside the graph that they came from
        runtime.raise_peak();
        let root = qkv_root([self.qkv.q, self.qkv.k, self.qkv.v], [d.q, d.k, d.v]);
        // frozen ones are constants
        let sinks = self.qkv.sinks.filter(|own| own.device().is_autodiff());
        let root = match sinks.zip(d.sinks) {
            Some((sinks, d_sinks)) => root + backward_root(sinks, d_sinks),
            None => root,
        };
        let root = match gate {
            Some(gate) => root + gate.sum(),
            None => root,
        };
        let mut tape = root.backward();
        collect(decoder, self.unit, &self.weights, &mut tape, gradients);
        Ok(d_residual + taken(&self.input, &mut tape))
    }
}
