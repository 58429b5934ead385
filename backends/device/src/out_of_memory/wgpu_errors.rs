//! wgpu's own errors. They reach whoever opens an error scope on a device; `CubeCL` makes a panic of those that no
//! scope takes.

use super::kind::{MemoryErrorKind, OutOfMemory, one_line};
use cubecl::wgpu::wgpu::wgc::device::DeviceError;
use cubecl::wgpu::wgpu::wgc::resource::CreateBufferError;
use std::error::Error;

/// Memory that ran out according to an error of wgpu or wgpu-core.
pub(super) fn find(error: &(dyn Error + 'static)) -> Option<OutOfMemory> {
    let (kind, bytes, origin) = if let Some(CreateBufferError::MaxBufferSize { requested, .. }) = error.downcast_ref() {
        let origin = "wgpu-core, CreateBufferError::MaxBufferSize";
        (MemoryErrorKind::Buffer, Some(*requested), origin)
    } else if let Some(DeviceError::OutOfMemory) = error.downcast_ref() {
        (MemoryErrorKind::Driver, None, "wgpu-core, DeviceError::OutOfMemory")
    } else if let Some(cubecl::wgpu::wgpu::Error::OutOfMemory { .. }) = error.downcast_ref() {
        (MemoryErrorKind::Driver, None, "wgpu, Error::OutOfMemory")
    } else {
        return None;
    };
    Some(OutOfMemory { kind, bytes, origin, message: one_line(&error.to_string()), device_lost: false })
}
