//! Matmuls by cuBLASLt in place of our kernels: on NVIDIA GPUs, in half precision.

use crate::exact::is_exact;
use crate::operations::by_device;
use crate::scoped::with;
use burn::tensor::Device;
use std::cell::Cell;

thread_local! {
    static LEAST: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Fewest operations, two for an input of an output, for which cuBLASLt's stream and `CubeCL`'s wait for each other: 20 µs
/// of our kernels on an H200.
pub const CUBLASLT_OPERATIONS: usize = 8_000_000_000;

/// Runs `work` on this thread with products of at least so many operations by cuBLASLt, in half precision on NVIDIA GPUs;
/// with none by it if `None`, within [`exact`](crate::exact()) and where a [`Graph`](crate::Graph) is recorded.
/// [`open_cublaslt`] tells whether it can be used.
///
/// # Panics
/// Within `work`, where the library fails.
pub fn with_cublaslt<R>(least_operations: Option<usize>, work: impl FnOnce() -> R) -> R {
    with(&LEAST, least_operations, work)
}

/// Opens cuBLASLt for a device and gives its version.
///
/// # Errors
/// Why it cannot be used, with what to do: the device is not an NVIDIA GPU, the library or a driver for CUDA 12.5 is
/// missing.
pub fn open_cublaslt(device: &Device) -> Result<String, String> {
    let none = || Err("the device is not an NVIDIA GPU".to_owned());
    by_device!(device, cpu => none(), cube => opened(device).unwrap_or_else(none))
}

#[cfg(feature = "cuda")]
fn opened(device: &Device) -> Option<Result<String, String>> {
    let probe = firebrick_device::device::cube_probe(device)?;
    Some(crate::cube::cublaslt::open(&probe))
}

#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
fn opened(_device: &Device) -> Option<Result<String, String>> {
    None
}

/// True if cuBLASLt makes a product of so many operations.
pub(crate) fn multiplies(operations: usize) -> bool {
    !is_exact() && LEAST.get().is_some_and(|least| operations >= least)
}
