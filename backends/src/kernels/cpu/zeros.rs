//! Tensors of zeros.

use super::autodiff::to_tensor;
use super::parallel::tensor;
use crate::device::is_cpu;
use burn::tensor::{DType, Device, Tensor};

/// Zeros for keys or values. On the CPU zeroed pages come from the system: the backend's own function writes the zeros, twice.
pub(in crate::kernels) fn zeros<const D: usize>(
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    let n = shape.iter().product();
    let own = is_cpu(device) && !device.is_autodiff();
    match dtype {
        DType::F32 if own => to_tensor(tensor(vec![0.0_f32; n], shape)),
        DType::F64 if own => to_tensor(tensor(vec![0.0_f64; n], shape)),
        _ => Tensor::zeros(shape, (device, dtype)),
    }
}
