//! Products with matrices: `linear`, `x · Wᵀ` of activations and weights, with what is added to it or gated by it; and
//! `matmul`, of any two matrices.

use super::operations;
use super::rows::glu;
use crate::formulas;
use crate::shapes::Transposed;
use burn::tensor::{DType, Tensor};
use firebrick_device::precision::{stored_as, widened};
use firebrick_spec::{Activation, QuantizedLayout};
use std::ops::Range;

operations! {
    /// `x · Wᵀ` for `x` of shape `[rows, inputs]` and `w` of shape `[outputs, inputs]`.
    ///
    /// `w` must be a leaf of the autodiff graph or a constant. With a constant `w` nothing of `x` is saved, since no
    /// gradient needs it.
    pub fn linear(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
        cpu: linear if alike(&[x, w]);
        cube: product if cube::product::takes(x, w);
        else { x.clone().matmul(w.clone().transpose()) }
    }

    /// [`linear`] in rows without padding, which on CUDA kernels read as they are and of Burn's own would copy. The
    /// kernel is not differentiable.
    pub fn linear_unpadded(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
        cube: product if cube::product::takes_plain(x, w);
        else { linear(x, w) }
    }

    /// [`linear`] in f32 or wider. Not differentiable.
    pub fn linear_wide(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
        cpu: linear if cpu::linear::takes(x, w);
        else { widened(linear(x, w)) }
    }

    /// `x · Wᵀ` plus a bias, `[1, outputs]`, of several matrices and one `x`; there is a bias for each matrix or for
    /// none. The CPU's kernel is for few rows without biases and not differentiable; the GPU's is for CUDA's tensor
    /// cores and many rows.
    ///
    /// Matrices and biases must be leaves of the autodiff graph or constants.
    pub fn linear_each<const N>(
        x: &Tensor<2>,
        w: [&Tensor<2>; N],
        biases: [Option<&Tensor<2>>; N],
    ) -> [Tensor<2>; N] {
        cpu: skinny_gemm if biases.iter().all(Option::is_none) && cpu::skinny_gemm::takes(x, &w);
        cube: product if cube::product::takes_several(x, &w, biases);
        else {
            if biases.iter().all(Option::is_none) {
                return w.map(|w| linear_unpadded(x, w));
            }
            let mut biases = biases.into_iter();
            linear_each(x, w, [None; N]).map(|y| match biases.next().flatten() {
                Some(bias) => add_bias(y, bias),
                None => y,
            })
        }
    }

    /// `base + x · Wᵀ`, with `base` of the result's shape, and `w` a leaf of the autodiff graph or a constant. The
    /// kernels are those of [`linear_each`].
    pub fn linear_add(base: Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
        cpu: skinny_gemm if cpu::skinny_gemm::takes(x, &[w, &base]);
        cube: product if cube::product::takes_several(x, &[w], [Some(&base)]);
        else {
            let [y] = linear_each(x, [w], [None]);
            base + y
        }
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)`, `[rows, outputs]`, the gated half of an MLP. The kernel is that of
    /// [`linear_each`].
    pub fn linear_swiglu(x: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
        cpu: skinny_gemm if cpu::skinny_gemm::takes(x, &[gate, up]);
        else {
            let [gate, up] = linear_each(x, [gate, up], [None; 2]);
            glu(gate, up, Activation::Silu)
        }
    }

    /// `y + bias` for `y` of shape `[rows, n]` and a bias `[1, n]`, in place where `y` is not shared.
    pub fn add_bias(y: Tensor<2>, bias: &Tensor<2>) -> Tensor<2> {
        cube: bias if cube::bias::takes(&y, bias);
        else { y + bias.clone() }
    }

    /// `a · b` of matrices of which one may be transposed, computed in the type that `b` is stored in; of half
    /// precision an f32 result on the CPU. Not differentiable.
    pub fn matmul(a: &Tensor<2>, b: &Tensor<2>, transposed: Transposed) -> Tensor<2> {
        cpu: linear if cpu::linear::takes(a, b);
        cube: product if cube::product::takes_plain(a, b);
        else { plain_matmul(stored_as(a.clone(), b.dtype()), b.clone(), transposed) }
    }

    /// [`matmul`] added to some rows of a sum in f32 or wider, in place where the sum is not shared. Not
    /// differentiable.
    pub fn add_matmul(
        a: &Tensor<2>,
        b: &Tensor<2>,
        transposed: Transposed,
        sum: Tensor<2>,
        rows: Range<usize>,
    ) -> Tensor<2> {
        cube: product if cube::product::adds(a, b, transposed, &sum);
        else {
            let part = widened(matmul(a, b, transposed));
            if rows.len() == sum.dims()[0] {
                return sum + part;
            }
            let part = sum.clone().slice(rows.clone()) + part;
            sum.slice_assign(rows, part)
        }
    }

    /// `x · Wᵀ` with one frozen matrix in few bits; see [`crate::quantized_linear`]. Not differentiable.
    pub(crate) fn quantized_matmul(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
        cube: quantized_linear if cube::quantized_linear::takes(x, layout);
        else { matmul(x, &dequantize(words, layout, x.dtype()), Transposed::Right) }
    }

    /// The matrix `[outputs, inputs]` that a buffer in few bits stands for ([`firebrick_device::quantized`]), in a
    /// float type; those of several buffers one below the other. Not differentiable.
    pub fn dequantize(words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
        cube: quantized_linear if layout.matrices == 1 && cube::enabled_on(&words.device());
        else {
            if layout.matrices == 1 {
                return formulas::dequantize::dequantize(words, layout, dtype);
            }
            let one = |matrix| dequantize(&words.clone().narrow(0, matrix, 1), layout.one(), dtype);
            Tensor::cat((0..layout.matrices).map(one).collect(), 0)
        }
    }
}

/// [`matmul`] of matrices of one type, in tensor operations.
pub(crate) fn plain_matmul(a: Tensor<2>, b: Tensor<2>, transposed: Transposed) -> Tensor<2> {
    match transposed {
        Transposed::Neither => a.matmul(b),
        Transposed::Left => a.transpose().matmul(b),
        Transposed::Right => a.matmul(b.transpose()),
    }
}
