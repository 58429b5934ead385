//! Allocating KV caches, `[rows, heads, columns, dim]`, and copying columns between them.

use super::autodiff::{detached, dispatch_float, is_full_precision, to_tensor};
use super::parallel::{SharedPtr, dims, elements, tensor};
use super::real::Real;
use crate::device::is_cpu;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Columns of one row of a cache, and where to copy them in another.
#[derive(Clone, Debug)]
pub struct Window {
    /// The row they are in.
    pub row: usize,
    /// The columns.
    pub columns: Range<usize>,
    /// The target rows; each gets a copy. No two windows of a call share a row.
    pub rows: Range<usize>,
    /// The target column of the first.
    pub first: usize,
}

/// Zeros for a cache's keys or values. On the CPU zeroed pages come from the system: the backend's own function writes the zeros,
/// twice.
#[must_use]
pub fn zeros<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    let n = shape.iter().product();
    let own = is_cpu(device) && !device.is_autodiff();
    match dtype {
        DType::F32 if own => to_tensor(tensor(vec![0.0_f32; n], shape)),
        DType::F64 if own => to_tensor(tensor(vec![0.0_f64; n], shape)),
        _ => Tensor::zeros(shape, (device, dtype)),
    }
}

/// Copies columns of `source` into rows of `target`: in place where nobody else holds it. Not differentiable.
///
/// Gives `target` back unchanged where no kernel supports the tensors.
///
/// # Panics
/// Where a window is outside a cache, two windows share a row, or the caches have different heads.
pub fn copy_columns(
    target: Tensor<4>,
    source: &Tensor<4>,
    windows: &[Window],
) -> Result<Tensor<4>, Tensor<4>> {
    if !is_full_precision(&target) || !is_full_precision(source) || target.dtype() != source.dtype()
    {
        return Err(target);
    }
    let (target, source) = (detached(target), detached(source.clone()));
    Ok(to_tensor(dispatch_float!(
        source.dtype(),
        copy(target, &source, windows)
    )))
}

fn copy<T: Real>(mut target: FlexTensor, source: &FlexTensor, windows: &[Window]) -> FlexTensor {
    let [all, heads, capacity, dim] = dims(&target);
    let [sources, same, wide, _] = dims(source);
    let mut taken = vec![false; all];
    for window in windows {
        assert!(
            window.row < sources
                && window.columns.end <= wide
                && window.first + window.columns.len() <= capacity
                && window.rows.end <= all,
            "columns outside a cache"
        );
        for taken in &mut taken[window.rows.clone()] {
            assert!(!std::mem::replace(taken, true), "two windows share a row");
        }
    }
    assert_eq!(heads, same, "caches of different heads");
    let from: &[T] = elements(source);
    let begin = target.layout().start_offset();
    let to = SharedPtr(target.storage_mut::<T>()[begin..].as_mut_ptr());
    let copies: Vec<(&Window, usize)> = windows
        .iter()
        .flat_map(|window| window.rows.clone().map(move |row| (window, row)))
        .collect();
    copies.par_iter().for_each(|&(window, row)| {
        let (columns, len) = (&window.columns, window.columns.len());
        for head in 0..heads {
            let from = &from[((window.row * heads + head) * wide + columns.start) * dim..];
            let at = ((row * heads + head) * capacity + window.first) * dim;
            // SAFETY: inside the target, in a row of no other window, as asserted.
            #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
            let out = unsafe { std::slice::from_raw_parts_mut(to.get().add(at), len * dim) };
            out.copy_from_slice(&from[..len * dim]);
        }
    });
    target
}
