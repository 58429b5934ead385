//! Host copies of tensors, and copies between host and device.
//!
//! On CUDA the copies of a [`Copier`] run beside kernels, on streams of their own that events order with the stream of
//! the kernels (`copy_streams`). Elsewhere transfers are queued where kernels are; only the host's part of a copy runs
//! beside the computation, on the copier's thread.

mod copier;
#[cfg(feature = "cuda")]
mod copy_streams;
mod download;
mod host_tensor;
#[cfg(not(feature = "cuda"))]
mod no_copy_streams;
mod upload;

pub use copier::{Copier, Pending};
pub use download::Download;
pub use host_tensor::{HostTensor, HostValues};
pub use upload::Upload;

#[cfg(not(feature = "cuda"))]
use no_copy_streams as copy_streams;

use crate::device::is_cpu;
use crate::{Error, Result};
use burn::tensor::{DType, Tensor};

/// Waits until matrices are computed. A GPU whose memory ran out says so when something that depends on the memory is
/// read, and not when it is asked to finish; this reads a number of each. On the CPU nothing comes late. The matrices
/// are `[rows, columns]`, of any sizes above 0.
///
/// # Errors
/// If a matrix was never computed: memory ran out, or a kernel failed.
pub fn check_computed(matrices: impl IntoIterator<Item = Tensor<2>>) -> Result<()> {
    let late = matrices.into_iter().filter(|t| !is_cpu(&t.device()));
    let numbers = late.map(|t| t.slice([0..1, 0..1]).cast(DType::F32));
    // A sum depends on every one of them. Written side by side into one tensor they would not do: a tensor is as good
    // as the last that was written to it.
    let Some(sum) = numbers.reduce(Tensor::add) else {
        return Ok(());
    };
    let read = sum.try_into_data();
    read.map(drop).map_err(|e| Error::device(&e))
}
