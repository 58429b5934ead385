//! What a device is: the CPU backend or a GPU, and the largest buffer that it allocates.

use burn::tensor::Device;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::{backend::Cube, tensor::Tensor};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn_cubecl::tensor::CubeTensor;

/// Whether a device is the CPU backend, whose tensors lie in host memory.
#[must_use]
pub fn is_cpu(device: &Device) -> bool {
    device.clone().inner() == Device::flex()
}

/// Whether a device is hardware of its own that computes asynchronously: neither the CPU backend nor a software driver.
#[must_use]
pub fn is_accelerator(device: &Device) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    let software = device
        .identity()
        .is_some_and(|identity| identity.physical.is_none());
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    let software = false;
    !is_cpu(device) && !software
}

/// A tensor of one number on a GPU, for its `CubeCL` client and device; `None` on the CPU.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn cube_probe(device: &Device) -> Option<CubeTensor> {
    if is_cpu(device) {
        return None;
    }
    let probe = Tensor::<1>::empty([1], &device.clone().inner());
    let probe = probe.try_into_primitive::<Cube>();
    Some(probe.expect("every device but the CPU is CubeCL's"))
}

/// Bytes of the largest buffer, and so of the largest tensor, that a device allocates; `None` on the CPU, which has no such limit.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[must_use]
pub fn largest_buffer(device: &Device) -> Option<u64> {
    let probe = cube_probe(device)?;
    Some(probe.client.properties().memory.max_page_size)
}

/// Bytes of the largest buffer, and so of the largest tensor, that a device allocates; `None` on the CPU, which has no such limit.
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
#[must_use]
pub fn largest_buffer(_device: &Device) -> Option<u64> {
    None
}
