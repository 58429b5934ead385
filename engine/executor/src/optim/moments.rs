//! Moments on the device, as they are stored: floats or 8-bit blocks, there or waiting on the host.

use super::block8::{DeviceBlock8, HostBlock8};
use burn::tensor::{DType, Device, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::transfer::Download;
use firebrick_core::Result;
use firebrick_core::error::device_error;
use firebrick_plan::MomentKind;
use std::sync::Arc;

/// One moment of a slice of a parameter.
#[derive(Debug)]
pub(super) enum DeviceMoment {
    Float(Tensor<2>),
    Block8(Box<DeviceBlock8>),
    /// An 8-bit moment of a device whose memory is the host's: host code is several times faster there than tensor
    /// operations.
    Near(Arc<HostBlock8>, [usize; 2]),
    /// A float moment on the host until the next update.
    ParkedFloat(TensorData),
    /// An 8-bit moment on the host, and its shape.
    ParkedBlock8(HostBlock8, [usize; 2]),
}

impl DeviceMoment {
    /// Stores a moment. First moments are signed, second ones are not.
    pub fn store(kind: MomentKind, value: Tensor<2>, signed: bool) -> Self {
        match kind {
            MomentKind::F32 => Self::Float(value),
            MomentKind::Bf16 => Self::Float(value.cast(DType::BF16)),
            MomentKind::Block8 if is_cpu(&value.device()) && value.dtype() == DType::F32 => Self::near(value, signed),
            MomentKind::Block8 => Self::Block8(Box::new(DeviceBlock8::quantise(&value, signed))),
        }
    }

    fn near(value: Tensor<2>, signed: bool) -> Self {
        let shape = value.dims();
        let data = value.into_data();
        match data.as_slice::<f32>() {
            Ok(values) => Self::Near(Arc::new(HostBlock8::quantise(values, signed)), shape),
            Err(e) => unreachable!("f32 was asked for: {e:?}"),
        }
    }

    /// The moment in the parameter's type.
    pub fn load(&self, dtype: DType, device: &Device) -> Tensor<2> {
        match self {
            Self::Near(blocks, shape) => Tensor::from_data(TensorData::new(blocks.dequantise(), *shape), device),
            Self::Float(value) if value.dtype() == dtype => value.clone(),
            Self::Float(value) => value.clone().cast(dtype),
            Self::Block8(blocks) => blocks.dequantise().cast(dtype),
            Self::ParkedFloat(_) | Self::ParkedBlock8(..) => {
                unreachable!("moments are woken before an update")
            }
        }
    }

    /// The moment in f32, or as it is stored where that is in floats.
    pub fn take(self, device: &Device) -> Tensor<2> {
        match self {
            Self::Float(value) => value,
            other => other.load(DType::F32, device),
        }
    }

    /// The moment in floats, where it is on the device.
    pub fn on_device(&self) -> Option<Tensor<2>> {
        match self {
            Self::Float(value) => Some(value.clone()),
            Self::Block8(blocks) => Some(blocks.dequantise()),
            Self::Near(..) | Self::ParkedFloat(_) | Self::ParkedBlock8(..) => None,
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Self::Float(value) => {
                let [rows, cols] = value.dims();
                rows * cols * value.dtype().size()
            }
            Self::Block8(blocks) => blocks.bytes(),
            Self::ParkedFloat(data) => data.as_bytes().len(),
            Self::Near(blocks, _) => blocks.bytes(),
            Self::ParkedBlock8(blocks, _) => blocks.bytes(),
        }
    }

    /// The same moment; `None` if it waits on the host.
    pub fn shared(&self) -> Option<Self> {
        Some(match self {
            Self::Float(value) => Self::Float(value.clone()),
            Self::Block8(blocks) => Self::Block8(blocks.clone()),
            Self::Near(blocks, shape) => Self::Near(Arc::clone(blocks), *shape),
            Self::ParkedFloat(_) | Self::ParkedBlock8(..) => return None,
        })
    }

    /// A copy of the moment on the host; nothing where it is there. It takes no memory of the device.
    pub fn parked(&self) -> Result<Option<Self>> {
        Ok(match self {
            Self::Float(value) => {
                let values = Download::matrix(value.clone()).finish()?;
                Some(Self::ParkedFloat(values))
            }
            Self::Block8(blocks) => Some(Self::ParkedBlock8(blocks.download()?, blocks.dims())),
            Self::Near(..) | Self::ParkedFloat(_) | Self::ParkedBlock8(..) => None,
        })
    }

    pub fn wake(self, device: &Device) -> Self {
        match self {
            Self::ParkedFloat(data) => {
                let dtype = data.dtype();
                Self::Float(Tensor::from_data(data, (device, dtype)))
            }
            Self::ParkedBlock8(blocks, shape) if is_cpu(device) => Self::Near(Arc::new(blocks), shape),
            Self::ParkedBlock8(blocks, shape) => Self::Block8(Box::new(DeviceBlock8::upload(&blocks, shape, device))),
            awake => awake,
        }
    }

    /// f32 values, wherever they are.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let value = match self {
            Self::ParkedFloat(data) => return Ok(data.iter::<f32>().collect()),
            Self::Near(blocks, _) => return Ok(blocks.dequantise()),
            Self::ParkedBlock8(blocks, _) => return Ok(blocks.dequantise()),
            Self::Float(value) => value.clone(),
            Self::Block8(blocks) => blocks.dequantise(),
        };
        Ok(read(value.try_into_data())?.iter::<f32>().collect())
    }
}

fn read<T, E: std::error::Error + 'static>(result: std::result::Result<T, E>) -> Result<T> {
    result.map_err(|e| device_error("reading the optimizer state", &e))
}
