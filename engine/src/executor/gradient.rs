//! A gradient that is complete.

use crate::Result;
use burn::tensor::{Device, Tensor};
use firebrick_backends::transfer::HostTensor;

/// A complete gradient, where it was accumulated.
#[derive(Debug)]
pub enum Gradient {
    /// On the device.
    Device(Tensor<2>),
    /// On the host.
    Host(HostTensor),
}

impl Gradient {
    /// The gradient on the device.
    #[must_use]
    pub fn into_device(self, device: &Device) -> Tensor<2> {
        match self {
            Self::Device(tensor) => tensor,
            Self::Host(host) => host.into_device(device),
        }
    }

    /// The gradient on the host.
    pub fn into_host(self) -> Result<HostTensor> {
        match self {
            Self::Device(tensor) => Ok(HostTensor::download(tensor)?),
            Self::Host(host) => Ok(host),
        }
    }
}
