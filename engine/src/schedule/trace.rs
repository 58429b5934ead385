//! A segment under a graph, and its gradient.
//!
//! Attention over long sequences is not traced as one piece: its scores are computed chunk by chunk without a graph and
//! once more, chunk by chunk, on the way back, so that no `[heads, T, T]` tensor exists.

use crate::batch::MicroBatch;
use crate::gradients::Gradients;
use burn::tensor::{Gradients as Tape, Tensor};
use firebrick_models::Decoder;
use firebrick_models::layer::Projected;
use firebrick_models::unit::{UnitKind, Weights};
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
    qkv: Projected,
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
        let splits = matches!(decoder.kind(unit), UnitKind::Attention(_)) && micro.ctx.is_chunked();
        if splits {
            let piece = SplitAttention::trace(decoder, unit, weights, x, micro);
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
) -> Tensor<2> {
    pieces
        .into_iter()
        .rev()
        .fold(d_output, |d, piece| match piece {
            Piece::Units(graph) => graph.backward(decoder, d, gradients),
            Piece::Attention(piece) => piece.backward(decoder, d, micro, gradients),
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
    ) -> Tensor<2> {
        // a product with the incoming gradient as root: its own gradient is one
        let mut tape = (self.output * d_output).sum().backward();
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
    ) -> Self {
        let weights = decoder.units()[unit].leaves(weights);
        let input = x.clone().autodiff().require_grad();
        let qkv = decoder.project(unit, &weights, input.clone(), &micro.ctx);
        let plain = inner(&qkv);
        let chunks: Vec<Tensor<3>> = micro
            .ctx
            .chunks(decoder.window(unit))
            .iter()
            .map(|rows| decoder.attend(unit, plain.narrow(rows), &micro.ctx, rows))
            .collect();
        let mixed = Tensor::cat(chunks, 1);
        let [batch, len, width] = mixed.dims();
        let mixed = mixed
            .reshape([batch * len, width])
            .autodiff()
            .require_grad();
        let residual = x.autodiff().require_grad();
        let output = decoder.merge(unit, &weights, residual.clone(), mixed.clone(), &micro.ctx);
        Self {
            unit,
            weights,
            input,
            qkv,
            residual,
            mixed,
            output,
        }
    }

    fn backward(
        self,
        decoder: &Decoder,
        d_output: Tensor<2>,
        micro: &MicroBatch,
        gradients: &mut Gradients,
    ) -> Tensor<2> {
        let mut tape = (self.output * d_output).sum().backward();
        collect(decoder, self.unit, &self.weights, &mut tape, gradients);
        let d_residual = taken(&self.residual, &mut tape);
        let d_mixed = taken(&self.mixed, &mut tape);
        drop(tape);

        let d = scores_backward(decoder, self.unit, &inner(&self.qkv), d_mixed, micro);
        let root = (self.qkv.q * d.q).sum() + (self.qkv.k * d.k).sum() + (self.qkv.v * d.v).sum();
        let mut tape = root.backward();
        collect(decoder, self.unit, &self.weights, &mut tape, gradients);
        d_residual + taken(&self.input, &mut tape)
    }
}

fn inner(qkv: &Projected) -> Projected {
    Projected {
        q: qkv.q.clone().inner(),
        k: qkv.k.clone().inner(),
        v: qkv.v.clone().inner(),
    }
}

/// Gradients of queries, keys and values: the scores of each chunk are computed again, and dropped before the next.
fn scores_backward(
    decoder: &Decoder,
    unit: usize,
    qkv: &Projected,
    d_mixed: Tensor<2>,
    micro: &MicroBatch,
) -> Projected {
    let (batch, len) = (micro.ctx.batch, micro.ctx.len);
    let d_mixed = {
        let width = d_mixed.dims()[1];
        d_mixed.reshape([batch, len, width])
    };
    let mut d_q = Vec::new();
    let (mut d_k, mut d_v) = (qkv.k.zeros_like(), qkv.v.zeros_like());
    for rows in micro.ctx.chunks(decoder.window(unit)) {
        let own = qkv.narrow(&rows);
        let leaf = |t: Tensor<4>| t.autodiff().require_grad();
        let own = Projected {
            q: leaf(own.q),
            k: leaf(own.k),
            v: leaf(own.v),
        };
        let mixed = decoder.attend(unit, own.clone(), &micro.ctx, &rows);
        let d = d_mixed
            .clone()
            .narrow(1, rows.queries.start, rows.queries.len());
        let mut tape = (mixed * d).sum().backward();
        d_q.push(taken(&own.q, &mut tape));
        d_k = add_columns(d_k, &rows.keys, taken(&own.k, &mut tape));
        d_v = add_columns(d_v, &rows.keys, taken(&own.v, &mut tape));
    }
    Projected {
        q: Tensor::cat(d_q, 2),
        k: d_k,
        v: d_v,
    }
}

/// Adds to some columns of `[batch, heads, columns, dim]`.
fn add_columns(sum: Tensor<4>, columns: &Range<usize>, part: Tensor<4>) -> Tensor<4> {
    let [batch, heads, _, dim] = sum.dims();
    let place = [0..batch, 0..heads, columns.clone(), 0..dim];
    let own = sum.clone().slice(place.clone());
    sum.slice_assign(place, own + part)
}
