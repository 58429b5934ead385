//! Leaves of graphs: their gradients, and tensors off a graph that become leaves of the next.

use super::gradients::Gradients;
use burn::tensor::{Gradients as Tape, Tensor};
use firebrick_backends::kernels::{backward_root, backward_with_sums};
use firebrick_models::Decoder;
use firebrick_models::attention::Qkv;
use firebrick_models::weights::Weights;
use std::ops::Range;

/// Runs the backward pass of a graph from its root. Gradients of its units' leaves go into the accumulators: added there
/// by the product that computes one where it can, from the tape otherwise. `computed` is called while both exist.
pub(super) fn backward<'w>(
    root: Tensor<1>,
    decoder: &Decoder,
    units: impl IntoIterator<Item = (usize, &'w Weights)>,
    gradients: &mut Gradients,
    computed: impl FnOnce(),
) -> Tape {
    let of_unit = |(unit, weights): (usize, &'w Weights)| {
        let range: Range<usize> = decoder.units()[unit].range.clone();
        range.zip(weights.tensors()).filter(|(_, leaf)| leaf.is_require_grad())
    };
    let leaves: Vec<(usize, &Tensor<2>)> = units.into_iter().flat_map(of_unit).collect();
    let lent = leaves.iter().map(|&(index, leaf)| (leaf, gradients.lend(index))).collect();
    let (mut tape, sums) = backward_with_sums(root, lent);
    for ((index, _), sum) in leaves.iter().zip(sums) {
        gradients.put_back(*index, sum);
    }
    computed();
    for (index, leaf) in leaves {
        if let Some(gradient) = leaf.grad_remove(&mut tape) {
            gradients.add(index, gradient);
        }
    }
    tape
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
