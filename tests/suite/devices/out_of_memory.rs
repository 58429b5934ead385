//! Memory that a GPU refuses: what Burn and wgpu report of it is told as such, with the bytes.

use burn::tensor::{Device, Tensor};
use firebrick_backends::out_of_memory::{MemoryErrorKind, OutOfMemory};
use firebrick_backends::transfer::{HostTensor, check_computed};
use firebrick_backends::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::on_gpus;
use crate::support::checked;

on_gpus!(a_tensor_that_no_device_holds_is_refused_with_its_bytes_and_the_device_goes_on);

/// A side of a matrix in f32 that takes a terabyte.
const SIDE: usize = 1 << 19;
const BYTES: u64 = 4 * (SIDE * SIDE) as u64;

fn refused<T>(work: impl FnOnce() -> Result<T>) -> OutOfMemory {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(_)) => panic!("a device that holds {BYTES} bytes"),
        Ok(Err(Error::OutOfMemory(what))) => what,
        Ok(Err(other)) => panic!("another error: {other}"),
        Err(panic) => OutOfMemory::in_panic(panic.as_ref()).expect("a panic that says so"),
    }
}

fn a_tensor_that_no_device_holds_is_refused_with_its_bytes_and_the_device_goes_on(device: &Device) {
    let device = &device.clone().inner();
    let small = || Tensor::<2>::ones([2, 3], device);
    check_computed([small()]).expect("a device in order");
    let what = refused(|| HostTensor::download(Tensor::empty([SIDE, SIDE], device)));
    assert_eq!((what.kind, what.bytes, what.device_lost), (MemoryErrorKind::Buffer, Some(BYTES), false), "{what}");
    check_computed([small()]).expect("the device goes on");
    let values = HostTensor::download(small()).expect("the device goes on");
    assert_eq!(values.to_f32(), [1.0; 6]);
    checked("refused allocations", 1);
}

#[cfg(feature = "wgpu")]
#[test]
fn what_wgpu_reports_of_a_buffer_over_its_limit_is_told_by_its_type() {
    use burn::tensor::read_sync;
    use burn::tensor::wgpu::wgpu;

    let Some((_, _alone)) = crate::devices::gpu("wgpu") else {
        return;
    };
    let description = wgpu::InstanceDescriptor::new_without_display_handle();
    let instance = wgpu::Instance::new(description);
    let adapter = read_sync(instance.request_adapter(&wgpu::RequestAdapterOptions::default()));
    let adapter = adapter.expect("the adapter that Burn has");
    let opened = read_sync(adapter.request_device(&wgpu::DeviceDescriptor::default()));
    let (device, _queue) = opened.expect("a device of its own");
    let size = device.limits().max_buffer_size + 4;
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let _buffer = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let error = read_sync(scope.pop()).expect("a buffer over the limit");
    let what = OutOfMemory::in_error(&error).expect("an error that says so");
    assert_eq!(
        (what.kind, what.bytes, what.origin),
        (MemoryErrorKind::Buffer, Some(size), "wgpu-core, CreateBufferError::MaxBufferSize"),
        "{what}"
    );
}
