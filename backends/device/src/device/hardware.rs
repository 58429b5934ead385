//! Kind of a device, the CPU backend or a GPU, and the largest buffer that it allocates.

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::{backend::Cube, tensor::Tensor};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn_cubecl::tensor::CubeTensor;

/// Returns true if a device is the CPU backend, whose tensors lie in host memory.
pub fn is_cpu(device: &Device) -> bool {
    device.clone().inner() == Device::flex()
}

/// Returns true if a device is hardware of its own that computes asynchronously: neither the CPU backend nor a software
/// driver.
pub fn is_accelerator(device: &Device) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    let software = device.identity().is_some_and(|identity| identity.physical.is_none());
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    let software = false;
    !is_cpu(device) && !software
}

/// Returns true if a device is an integrated GPU, whose memory is the host's. Opens nothing.
#[cfg(feature = "wgpu")]
pub fn is_integrated(device: &Device) -> bool {
    // more than a machine has
    const NUMBERS: std::ops::Range<usize> = 0..16;
    let device = device.clone().inner();
    let is = |open: fn(DeviceKind) -> Device| NUMBERS.map(DeviceKind::IntegratedGpu).any(|kind| open(kind) == device);
    #[cfg(feature = "vulkan")]
    if is(Device::vulkan) {
        return true;
    }
    is(Device::wgpu)
}

/// Returns true if a device is an integrated GPU: a build without wgpu knows none.
#[cfg(not(feature = "wgpu"))]
pub fn is_integrated(_device: &Device) -> bool {
    false
}

/// A tensor of one number on a GPU, for its `CubeCL` client and device; `None` on the CPU.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub fn cube_probe(device: &Device) -> Option<CubeTensor> {
    if is_cpu(device) {
        return None;
    }
    let probe = Tensor::<1>::empty([1], &device.clone().inner());
    let probe = probe.try_into_primitive::<Cube>();
    Some(probe.expect("every device but the CPU is CubeCL's"))
}

/// Bytes of the largest buffer, and so of the largest tensor, that a device allocates; `None` on the CPU, which has no
/// such limit.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub fn largest_buffer(device: &Device) -> Option<u64> {
    let probe = cube_probe(device)?;
    Some(probe.client.properties().memory.max_page_size)
}

/// Bytes of the largest buffer, and so of the largest tensor, that a device allocates; `None` on the CPU, which has no
/// such limit.
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
pub fn largest_buffer(_device: &Device) -> Option<u64> {
    None
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;

    #[test]
    fn integrated_gpus_are_told_apart_from_those_with_memory_of_their_own() {
        for index in [0, 1, 3] {
            assert!(is_integrated(&Device::wgpu(DeviceKind::IntegratedGpu(index))));
            assert!(!is_integrated(&Device::wgpu(DeviceKind::DiscreteGpu(index))));
        }
        assert!(!is_integrated(&Device::wgpu(DeviceKind::Cpu)));
        assert!(!is_integrated(&Device::flex()));
        #[cfg(feature = "vulkan")]
        {
            assert!(is_integrated(&Device::vulkan(DeviceKind::IntegratedGpu(0))));
            assert!(!is_integrated(&Device::vulkan(DeviceKind::DiscreteGpu(0))));
        }
    }
}
