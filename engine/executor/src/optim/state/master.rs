//! Masters: the weights of a parameter that updates work on, where the parameter itself is stored as something else.

use burn::tensor::Tensor;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use std::sync::Arc;

/// Weights that an update works on, at least in f32.
#[derive(Debug)]
pub(super) enum Master {
    Device(Tensor<2>),
    Host(HostTensor),
}

impl Master {
    pub fn new(weight: HostTensor, accounts: &Arc<Accounts>) -> (Self, MemoryGuard) {
        let hold = accounts.hold(Category::MasterWeights, Home::Host, weight.bytes());
        (Self::Host(weight), hold)
    }

    pub fn on_device(weight: Tensor<2>, accounts: &Arc<Accounts>) -> (Self, MemoryGuard) {
        let [rows, cols] = weight.dims();
        let bytes = rows * cols * weight.dtype().size();
        let hold = accounts.hold(Category::MasterWeights, Home::Device, bytes);
        (Self::Device(weight), hold)
    }

    pub fn into_host(self) -> Result<HostTensor> {
        match self {
            Self::Device(tensor) => Ok(HostTensor::download(tensor)?),
            Self::Host(weight) => Ok(weight),
        }
    }
}
