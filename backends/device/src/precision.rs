//! [`Precision`] on a device: Burn's float types, matrices of it, casts.

use crate::{Error, Result};
use burn::tensor::{DType, Device, Element, FloatDType, Tensor, TensorCreationOptions, TensorData, bf16, f16};
use firebrick_spec::Precision;
use rayon::prelude::*;

/// A precision on Burn's devices.
pub trait PrecisionExt: Sized {
    /// Burn's name for it on a device.
    fn dtype(self, device: &Device) -> DType;

    /// A matrix of these values on a device, rounded on the host, so that the device never holds them wider. The values
    /// are in row-major order, the matrix is of shape `[rows, columns]`.
    fn matrix(self, values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2>;

    /// The precision of a tensor's type.
    fn of(dtype: DType) -> Self;

    /// Refuses a type that the device cannot compute in, and says which it can.
    ///
    /// # Errors
    /// `Error::Precision`, with the types that the device computes in.
    fn check(self, device: &Device) -> Result<()>;
}

/// A matrix on a device without padding between its rows. Burn's CUDA backend pads the rows of what it uploads in more
/// than one dimension, which takes memory, and which the kernels of few rows would copy away.
pub(crate) fn dense(data: TensorData, options: impl Into<TensorCreationOptions>) -> Tensor<2> {
    let (shape, dtype) = (data.shape().dims::<2>(), data.dtype());
    let flat = TensorData::from_bytes(data.into_bytes(), [shape.iter().product::<usize>()], dtype);
    Tensor::<1>::from_data(flat, options).reshape(shape)
}

impl PrecisionExt for Precision {
    fn dtype(self, device: &Device) -> DType {
        match self {
            Self::F32 => device.settings().float_dtype.into(),
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    fn matrix(self, values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2> {
        match self {
            Self::F32 => dense(TensorData::new(values, shape), device),
            Self::Bf16 => rounded(&values, bf16::from_f32, shape, device),
            Self::F16 => rounded(&values, f16::from_f32, shape, device),
        }
    }

    fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => Self::F32,
        }
    }

    fn check(self, device: &Device) -> Result<()> {
        let known = |precision: Self| match precision {
            Self::F32 => true,
            Self::Bf16 => device.supports_dtype(FloatDType::BF16),
            Self::F16 => device.supports_dtype(FloatDType::F16),
        };
        if known(self) {
            return Ok(());
        }
        let others = Self::ALL.into_iter().filter(|&other| known(other));
        Err(Error::Precision { precision: self.name(), known: others.map(Self::name).collect::<Vec<_>>().join(" or ") })
    }
}

/// A tensor to compute exactly with: f32 where it was stored in two bytes, itself elsewhere. Differentiable. A tensor
/// of any shape.
pub fn widened<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if Precision::of(tensor.dtype()).is_half() { tensor.cast(FloatDType::F32) } else { tensor }
}

/// A matrix of values that all cores round.
fn rounded<E: Element>(
    values: &[f32],
    round: impl Fn(f32) -> E + Sync + Send,
    shape: [usize; 2],
    device: &Device,
) -> Tensor<2> {
    let values: Vec<E> = values.par_iter().map(|&value| round(value)).collect();
    dense(TensorData::new(values, shape), (device, E::dtype()))
}

/// A tensor in the type that another one is stored in. Differentiable. A tensor of any shape.
pub fn stored_as<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(dtype) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_type_tells_its_precision() {
        for precision in Precision::ALL {
            assert_eq!(Precision::of(precision.dtype(&Device::flex())), precision);
        }
    }

    #[test]
    fn gradients_pass_a_cast_in_the_type_of_what_was_cast() {
        let device = Device::flex();
        let x = Precision::Bf16.matrix(vec![1.5, -2.0], [1, 2], &device);
        let leaf = x.autodiff().require_grad();
        let y = stored_as(widened(leaf.clone()) * 3.0, DType::BF16);
        assert_eq!(y.dtype(), DType::BF16);
        let gradient = leaf.grad(&y.sum().backward()).unwrap();
        assert_eq!(gradient.dtype(), DType::BF16);
        let values: Vec<f32> = gradient.into_data().iter::<f32>().collect();
        assert_eq!(values, [3.0, 3.0]);
    }
}
