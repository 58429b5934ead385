//! A pool's tensors, as kernels take them.

use super::storage::{FloatPoolLaunch, Int8PoolLaunch};
use crate::cube::prelude::*;
use crate::paged::KvPool;
use burn::tensor::Int;
use burn_cubecl::kernel::into_contiguous;

/// See [`KvPool`]. A pool in 8 bits has scales.
#[derive(Debug)]
pub(super) struct CubePool {
    pub keys: CubeTensor,
    pub values: CubeTensor,
    pub scales: Option<CubeTensor>,
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
            KvPool::Float { keys, values } => Self { keys: detached(keys), values: detached(values), scales: None },
            KvPool::Int8 { keys, values, scales } => {
                Self { keys: opened(keys), values: opened(values), scales: Some(opened(scales)) }
            }
        }
    }

    /// To be written to.
    pub(super) fn open_writable(pool: KvPool) -> Self {
        let Self { keys, values, scales } = Self::open(pool);
        Self { keys: into_writable(keys), values: into_writable(values), scales: scales.map(into_writable) }
    }

    pub(super) fn close(self) -> KvPool {
        let Self { keys, values, scales } = self;
        match scales {
            None => KvPool::Float { keys: Cube::tensor(keys), values: Cube::tensor(values) },
            Some(scales) => KvPool::Int8 {
                keys: Tensor::from_primitive::<Cube>(keys),
                values: Tensor::from_primitive::<Cube>(values),
                scales: Tensor::from_primitive::<Cube>(scales),
            },
        }
    }

    /// All tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &CubeTensor> {
        [&self.keys, &self.values].into_iter().chain(&self.scales)
    }

    /// An argument of kernels over a [`FloatPool`](super::storage::FloatPool).
    pub(super) fn floats<F: Float>(&self) -> FloatPoolLaunch<F> {
        FloatPoolLaunch::new(buffer(&self.keys), buffer(&self.values))
    }

    /// An argument of kernels over an [`Int8Pool`](super::storage::Int8Pool).
    pub(super) fn codes(&self, scales: &CubeTensor) -> Int8PoolLaunch {
        Int8PoolLaunch::new(buffer(&self.keys), buffer(&self.values), buffer(scales))
    }
}
