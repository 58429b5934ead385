//! Operations on rows, element by element.

use super::{on_backend, operations};
use crate::root::root;
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, gelu_approximate, silu};
use firebrick_device::precision::{stored_as, widened};
use firebrick_spec::Activation;

operations! {
    /// `activation(gate) · up`, element by element, of tensors of one shape, `[rows, width]`.
    pub fn glu(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
        cpu: glu if activation == Activation::Silu && alike(&[&gate, &up]);
        cube: glu if alike(Operation::Gate, &[&gate, &up]);
        else {
            let open = match activation {
                Activation::Silu => silu(gate),
                Activation::Gelu => gelu(gate),
                Activation::GeluTanh => gelu_approximate(gate),
            };
            open * up
        }
    }

    /// [`glu`] of rows `[gate | up]`: `[rows, n]` for `x` of shape `[rows, 2 n]`. The kernel is not differentiable.
    pub fn glu_joined(x: &Tensor<2>, activation: Activation) -> Tensor<2> {
        cube: glu if plain(Operation::Gate, &[x]);
        else {
            let width = x.dims()[1] / 2;
            let [gate, up] = [0, width].map(|first| x.clone().narrow(1, first, width));
            glu(gate, up, activation)
        }
    }

    /// Rotates each pair `(x[i], x[i + dim/2])` of `x`, `[tokens, heads, dim]`, by the token's angle i, whose cosines
    /// and sines are `cos` and `sin`, `[tokens, 1, dim/2]` each; computed in f32 or wider, stored as `x` is. On a GPU
    /// in place where `x` is not shared.
    pub fn rotary(x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Tensor<3> {
        cpu: rotary if cpu::rotary::takes(&x, cos, sin);
        cube: rotary if alike(Operation::Rotary, &[&x]);
        else {
            let (stored, half) = (x.dtype(), x.dims()[2] / 2);
            let x = widened(x);
            let [a, b] = [0, half].map(|first| x.clone().narrow(2, first, half));
            let first = a.clone() * cos.clone() - b.clone() * sin.clone();
            let second = b * cos.clone() + a * sin.clone();
            stored_as(Tensor::cat(vec![first, second], 2), stored)
        }
    }

    /// [`rotary`] of queries and keys, in one launch on a GPU.
    pub fn rotary_each(x: [Tensor<3>; 2], cos: &Tensor<3>, sin: &Tensor<3>) -> [Tensor<3>; 2] {
        cube: rotary if alike(Operation::Rotary, &[&x[0], &x[1]]);
        else { x.map(|x| rotary(x, cos, sin)) }
    }

    /// A copy of a tensor in a buffer of its own; on the CPU, where nothing overwrites what somebody else holds, the
    /// same. The tensor is `[rows, columns]`, of any type.
    pub fn duplicate(tensor: &Tensor<2>) -> Tensor<2> {
        cube: step;
        else { tensor.clone() }
    }
}

/// A number whose gradient by `output` is `gradient`, which has its shape: the root of a backward pass from a gradient
/// that is known, as `output.backward(gradient)` in `PyTorch`. `(output * gradient).sum()` has the same gradients and
/// computes a number; this one means nothing.
pub fn backward_root<const D: usize>(output: Tensor<D>, gradient: Tensor<D>) -> Tensor<1> {
    let dims = output.dims();
    let size = [dims[0], dims[1..].iter().product()];
    let (output, gradient) = (output.reshape(size), gradient.reshape(size));
    on_backend!(&output.device(), root(output, gradient))
}
