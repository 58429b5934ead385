//! A pool's tensors, as kernels take them.

use super::super::launch::{detached, into_writable};
use crate::autodiff::KernelBackend;
use crate::paged::KvPool;
use burn::backend::Cube;
use burn::tensor::{Int, Tensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

/// See [`KvPool`].
#[derive(Debug)]
pub(super) enum CubePool {
    Float { keys: CubeTensor, values: CubeTensor },
    Int8 { keys: CubeTensor, values: CubeTensor, scales: CubeTensor },
}

/// A tensor of integers, contiguous.
fn opened<const D: usize>(tensor: Tensor<D, Int>) -> CubeTensor {
    let opened = tensor.try_into_primitive::<Cube>();
    into_contiguous(opened.expect("the device was checked before"))
}

impl CubePool {
    /// To be read.
    pub(super) fn open(pool: KvPool) -> Self {
        match pool {
            KvPool::Float { keys, values } => Self::Float { keys: detached(keys), values: detached(values) },
            KvPool::Int8 { keys, values, scales } => {
                Self::Int8 { keys: opened(keys), values: opened(values), scales: opened(scales) }
            }
        }
    }

    /// To be written to.
    pub(super) fn open_writable(pool: KvPool) -> Self {
        match Self::open(pool) {
            Self::Float { keys, values } => Self::Float { keys: into_writable(keys), values: into_writable(values) },
            Self::Int8 { keys, values, scales } => {
                Self::Int8 { keys: into_writable(keys), values: into_writable(values), scales: into_writable(scales) }
            }
        }
    }

    pub(super) fn close(self) -> KvPool {
        match self {
            Self::Float { keys, values } => KvPool::Float { keys: Cube::tensor(keys), values: Cube::tensor(values) },
            Self::Int8 { keys, values, scales } => KvPool::Int8 {
                keys: Tensor::from_primitive::<Cube>(keys),
                values: Tensor::from_primitive::<Cube>(values),
                scales: Tensor::from_primitive::<Cube>(scales),
            },
        }
    }

    /// The tensor that has the keys.
    pub(super) fn keys(&self) -> &CubeTensor {
        match self {
            Self::Float { keys, .. } | Self::Int8 { keys, .. } => keys,
        }
    }
}
