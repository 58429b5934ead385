//! The float type of parameters and activations.
//!
//! In half precision, weights and activations are stored in two bytes, and products take and give two bytes; whatever adds up
//! many numbers or sees their tails is computed in f32: norms, rotary angles, softmax, log-probs, losses, accumulated gradients,
//! master weights, moments.

use crate::{Error, Result};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The float type that a model's parameters and activations have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Four bytes, or the device's own type where that is another one (f64 in exactness tests).
    #[default]
    F32,
    /// Two bytes with the range of f32 and 8 bits of mantissa.
    Bf16,
    /// Two bytes with 11 bits of mantissa; gradients below 6e-8 vanish, so the loss is scaled.
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// How configurations spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Bytes of a number.
    #[must_use]
    pub fn width(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Whether it has two bytes.
    #[must_use]
    pub fn is_half(self) -> bool {
        self != Self::F32
    }

    /// Burn's name for it on a device.
    #[must_use]
    pub fn dtype(self, device: &Device) -> DType {
        match self {
            Self::F32 => device.settings().float_dtype.into(),
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// A matrix of these values on a device, rounded on the host, so that the device never holds them wider.
    #[must_use]
    pub fn matrix(self, values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2> {
        let data = TensorData::new(values, shape);
        if !self.is_half() {
            return Tensor::from_data(data, device);
        }
        let dtype = self.dtype(device);
        Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
    }

    /// The precision of a tensor's type.
    #[must_use]
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => Self::F32,
        }
    }

    /// Refuses a type that the device cannot compute in, and says which it can.
    pub fn check(self, device: &Device) -> Result<()> {
        let known = |precision: Self| match precision {
            Self::F32 => true,
            Self::Bf16 => device.supports_dtype(FloatDType::BF16),
            Self::F16 => device.supports_dtype(FloatDType::F16),
        };
        if known(self) {
            return Ok(());
        }
        let others = Self::ALL.into_iter().filter(|&other| known(other));
        Err(Error::Precision {
            asked: self.name(),
            known: others.map(Self::name).collect::<Vec<_>>().join(" or "),
        })
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor to compute exactly with: f32 where it was stored in two bytes, itself elsewhere. Differentiable.
#[must_use]
pub fn widened<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    if Precision::of(tensor.dtype()).is_half() {
        tensor.cast(FloatDType::F32)
    } else {
        tensor
    }
}

/// A tensor in the type that another one is stored in. Differentiable.
#[must_use]
pub fn stored_as<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        tensor.cast(dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_configurations() {
        for precision in Precision::ALL {
            let name = serde_json::to_string(&precision).unwrap();
            assert_eq!(name, format!("\"{precision}\""));
            assert_eq!(precision.width() == 2, precision.is_half());
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
