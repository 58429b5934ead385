//! A gradient that is complete.

use burn::tensor::{Device, Tensor};
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;

/// Elements that a norm squares at a time: the square of a whole embedding would be half a gigabyte.
const NORM_CHUNK: usize = 1 << 23;

/// A complete gradient, where it was accumulated.
#[derive(Debug)]
pub enum Gradient {
    /// On the device.
    Device(Tensor<2>),
    /// On the host.
    Host(HostTensor),
}

impl Gradient {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Device(tensor) => tensor.dims().iter().product::<usize>() * tensor.dtype().size(),
            Self::Host(host) => host.bytes(),
        }
    }

    /// The gradient on the device. It is `[rows, columns]`.
    pub fn into_device(self, device: &Device) -> Tensor<2> {
        match self {
            Self::Device(tensor) => tensor,
            Self::Host(host) => host.into_device(device),
        }
    }

    /// The gradient on the host.
    ///
    /// # Errors
    /// `Error::Device` where the copy fails.
    pub fn into_host(self) -> Result<HostTensor> {
        match self {
            Self::Device(tensor) => Ok(HostTensor::download(tensor)?),
            Self::Host(host) => Ok(host),
        }
    }
}

/// Sums of squares of a matrix on a device, of some of its rows at a time.
pub(super) fn squares(matrix: &Tensor<2>) -> impl Iterator<Item = Tensor<1>> {
    let [rows, columns] = matrix.dims();
    let step = (NORM_CHUNK / columns.max(1)).max(1);
    (0..rows).step_by(step).map(move |start| {
        let part = matrix.clone().narrow(0, start, step.min(rows - start));
        (part.clone() * part).sum()
    })
}
