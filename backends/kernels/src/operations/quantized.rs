//! Products with frozen matrices in few bits.

use super::{on_backend, operations};
use burn::tensor::Tensor;
use firebrick_metadata::experts::{ExpertInput, ExpertRows};
use firebrick_spec::QuantizedLayout;

operations! {
    /// `x · Wᵀ` for `x` of shape `[rows, inputs]` and a frozen matrix `[outputs, inputs]` in few bits
    /// ([`firebrick_device::quantized`]), which is widened to the type of `x` as it is multiplied: the product with the
    /// [dequantized](crate::dequantize) matrix. Differentiable in `x`; nothing wide is kept for the backward pass,
    /// which widens again.
    ///
    /// On the CPU at most [`firebrick_spec::quantized::CPU_TILE`] numbers are wide at a time; elsewhere the whole
    /// matrix, for as long as the product takes.
    pub fn quantized_linear(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
        cpu: quantized_linear if alike(&[x]);
        else { on_backend!(&x.device(), crate::quantized_linear::linear(x, words, layout)) }
    }

    /// [`expert_linear`](crate::expert_linear) with frozen matrices in few bits, each expert's with a buffer of its
    /// own: `words` is `[experts, words]`. Otherwise as [`quantized_linear`]; the matrix of one expert at a time is
    /// wide, or on the CPU a tile of it.
    pub fn quantized_expert_linear(
        x: &Tensor<2>,
        words: &Tensor<2>,
        layout: QuantizedLayout,
        rows: &ExpertRows,
        reads: ExpertInput,
    ) -> Tensor<2> {
        cpu: quantized_experts if alike(&[x]);
        else { on_backend!(&x.device(), crate::quantized_experts::linear(x, words, layout, rows, reads)) }
    }
}
