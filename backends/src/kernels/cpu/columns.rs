//! Columns of one cache of keys or values, copied into rows of another.

use super::parallel::{Shared, dims, elements};
use super::real::Real;
use super::tape::{each, exact, plain, wrap};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;
use std::ops::Range;

/// Copies some columns of a row of `source`, `[rows, heads, columns, dim]`, into each of `rows` of `target`, from column `first`
/// on. The target comes back as it was where no kernel knows the tensors. Not differentiable.
pub fn copy_columns(
    target: Tensor<4>,
    rows: Range<usize>,
    first: usize,
    source: &Tensor<4>,
    (row, columns): (usize, Range<usize>),
) -> Result<Tensor<4>, Tensor<4>> {
    if !exact(&target) || !exact(source) || target.dtype() != source.dtype() {
        return Err(target);
    }
    let (target, source) = (plain(target), plain(source.clone()));
    let place = Place {
        rows,
        first,
        row,
        columns,
    };
    Ok(wrap(each!(source.dtype(), copy(target, &source, &place))))
}

/// What goes where.
struct Place {
    rows: Range<usize>,
    first: usize,
    row: usize,
    columns: Range<usize>,
}

fn copy<T: Real>(mut target: FlexTensor, source: &FlexTensor, place: &Place) -> FlexTensor {
    let [all, heads, capacity, dim] = dims(&target);
    let [_, same, wide, _] = dims(source);
    let (len, columns) = (place.columns.len(), &place.columns);
    assert!(
        heads == same
            && columns.end <= wide
            && place.first + len <= capacity
            && place.rows.end <= all,
        "columns outside a cache"
    );
    let from: &[T] = elements(source);
    let begin = target.layout().start_offset();
    let to = Shared(target.storage_mut::<T>()[begin..].as_mut_ptr());
    let one = |at: usize| {
        let (row, head) = (place.rows.start + at / heads, at % heads);
        let window = ((place.row * heads + head) * wide + columns.start) * dim;
        let window = &from[window..][..len * dim];
        let at = ((row * heads + head) * capacity + place.first) * dim;
        // SAFETY: inside the target, as asserted; no two tasks have the same row and head.
        #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
        let out = unsafe { std::slice::from_raw_parts_mut(to.get().add(at), len * dim) };
        out.copy_from_slice(window);
    };
    (0..place.rows.len() * heads).into_par_iter().for_each(one);
    target
}
