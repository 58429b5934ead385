//! Leaves of graphs: their gradients, and tensors off a graph that become leaves of the next.

use super::gradients::Gradients;
use burn::tensor::{Gradients as Tape, Tensor};
use firebrick_backends::kernels::backward_root;
use firebrick_models::Decoder;
use firebrick_models::attention::Qkv;
use firebrick_models::weights::Weights;

/// Gradients of leaves into the accumulators.
pub(super) fn collect(decoder: &Decoder, unit: usize, leaves: &Weights, tape: &mut Tape, gradients: &mut Gradients) {
    let range = decoder.units()[unit].range.clone();
    for (index, leaf) in range.zip(leaves.tensors()) {
        if let Some(gradient) = leaf.grad_remove(tape) {
            gradients.add(index, gradient);
        }
    }
}

/// The gradient of a leaf; zeros if nothing depends on it.
pub(super) fn take_gradient<const D: usize>(leaf: &Tensor<D>, tape: &mut Tape) -> Tensor<D> {
    leaf.grad_remove(tape).unwrap_or_else(|| leaf.clone().inner().zeros_like())
}

/// The root of a backward pass from the gradients of queries, keys and values.
pub(super) fn qkv_root([q, k, v]: [Tensor<3>; 3], [dq, dk, dv]: [Tensor<3>; 3]) -> Tensor<1> {
    backward_root(q, dq) + backward_root(k, dk) + backward_root(v, dv)
}

/// Queries, keys and values off their graph.
pub(super) fn inner(qkv: &Qkv) -> Qkv {
    Qkv {
        q: qkv.q.clone().inner(),
        k: qkv.k.clone().inner(),
        v: qkv.v.clone().inner(),
        sinks: qkv.sinks.clone().map(|sinks| if sinks.device().is_autodiff() { sinks.inner() } else { sinks }),
    }
}
