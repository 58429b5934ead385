//! Products of few rows in Burn's kernels, whose results other kernels read as they are.

use super::launch::{empty, enabled_on};
use crate::kernels::autodiff::KernelBackend;
use crate::trace::span;
use burn::backend::Cube;
use burn::tensor::Tensor;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};

/// `x · Wᵀ` without padding between rows, which Burn's own result may have on CUDA, and which a kernel would copy first. `None` for
/// tensors with autodiff or of different types, and where kernels are off.
pub(super) fn product(x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    let (device, dtype) = (x.device(), x.dtype());
    let plain = !device.is_autodiff() && !w.device().is_autodiff();
    if !enabled_on(&device) || !plain || w.dtype() != dtype {
        return None;
    }
    let ([rows, inner], [outputs, _]) = (x.dims(), w.dims());
    let _span = span("product", 2.0 * (rows * inner * outputs) as f64);
    // Burn's kernel reads padded rows as they are
    let x = Cube::primitive(x.clone());
    let out = empty(&x, [rows, outputs], dtype);
    let w = Cube::primitive(w.clone().transpose());
    let product = matmul(x, w, Some(out), MatmulStrategy::default(), dtype);
    product.ok().map(Cube::tensor)
}
