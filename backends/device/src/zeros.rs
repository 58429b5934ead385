//! Tensors of zeros that take memory only where they are written.

#![allow(unsafe_code, reason = "a tensor on pages of its own has no safe form")]

use crate::allocator::{CountedPages, map_pages};
use crate::device::is_cpu;
use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Device, Int, Shape, Tensor};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use std::mem::MaybeUninit;

/// Bytes from which a tensor gets pages of its own.
const LARGE: usize = 1 << 20;

/// A tensor of zeros. On the CPU a large one without autodiff gets pages from the system, which take memory as soon as
/// they are written: the global allocator would write zeros to memory that was used before, and so take all of it.
pub fn zeros<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    match pages(&shape, dtype, device) {
        Some(tensor) => Tensor::from_primitive::<Flex>(tensor),
        None => Tensor::zeros(shape, (device, dtype)),
    }
}

/// [`zeros`] in i32.
pub fn int_zeros<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    match pages(&shape, DType::I32, device) {
        Some(tensor) => Tensor::from_primitive::<Flex>(tensor),
        None => Tensor::zeros(shape, (device, DType::I32)),
    }
}

fn pages(shape: &[usize], dtype: DType, device: &Device) -> Option<FlexTensor> {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    if !is_cpu(device) || device.is_autodiff() || bytes < LARGE {
        return None;
    }
    // where the system refuses, the allocator is asked, whose failure ends the process with a report
    let pages = Box::new(Pages(map_pages(bytes).ok()?));
    // SAFETY: the mapping has `bytes` bytes, all zero.
    let bytes = unsafe { Bytes::from_controller(pages, bytes) };
    let layout = Layout::contiguous(Shape::from(shape.to_vec()));
    Some(FlexTensor::new(bytes, layout, dtype))
}

struct Pages(CountedPages);

impl AllocationController for Pages {
    fn alloc_align(&self) -> usize {
        // at most what tensors ask for; pages are aligned to more
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, _policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = self.0.bytes_mut();
        // SAFETY: the same bytes; the caller promises to write initialised ones.
        Ok(unsafe { &mut *(std::ptr::from_mut::<[u8]>(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: initialised bytes may be seen as bytes that may be uninitialised.
        Ok(unsafe { &*(std::ptr::from_ref::<[u8]>(self.0.bytes()) as *const [MaybeUninit<u8>]) })
    }
}
