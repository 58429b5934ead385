//! Sums over rows, as the gradients of weights and biases are: sums of blocks of rows, then the sum of those, in a
//! fixed order without atomics.

use super::prelude::*;
use crate::gradient_sums;
use burn::backend::autodiff::NodeId;
use burn::tensor::Shape;

/// Term of a row in the sum of a column.
#[cube]
pub(crate) trait Term: LaunchArg + Send + Sync {
    /// The number of the element `i`, which is in `row`.
    fn at(this: &Self, i: usize, row: usize) -> f32;
}

/// The types that a term's tensors are stored in.
pub(super) type X = block_sums::X;
pub(super) type Z = block_sums::Z;

/// The sums of the columns of terms `[rows, n]`, by blocks of some rows, in a shape and type; `None` where a
/// backward pass adds them to the sum of a leaf's gradients. `types` are [`X`] and [`Z`].
pub(super) fn column_sums<T: Term>(
    like: &CubeTensor,
    terms: T::RuntimeArg,
    types: [ElemType; 2],
    [rows, n]: [usize; 2],
    block: usize,
    (shape, dtype): ([usize; 2], DType),
    leaf: Option<NodeId>,
) -> Option<CubeTensor> {
    let blocks = rows.div_ceil(block).max(1);
    let columns = n.div_ceil(UNITS);
    let partial = empty(like, [blocks, n], DType::F32);
    let grid = Grid::cubes([like], blocks * columns);
    launch!(block_sums::<T>, grid, [&partial], terms, rows, n, columns, block, types);
    let added = leaf.is_some_and(|leaf| {
        gradient_sums::add(leaf, |sum| {
            let (sum, add) = match sum {
                Some(sum) => (into_writable(detached(sum)), true),
                None => (empty(like, shape, DType::F32), false),
            };
            sum_rows_into(partial.clone(), &sum, add);
            Cube::tensor(sum)
        })
    });
    (!added).then(|| sum_rows(partial, shape, dtype))
}

/// The sums of the columns of f32 numbers `[rows, n]`, in a shape of n elements and a type.
pub(super) fn sum_rows(partial: CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let sums = empty(&partial, shape, dtype);
    sum_rows_into(partial, &sums, false);
    sums
}

/// [`sum_rows`] in place of a tensor's n elements, or added to these.
pub(super) fn sum_rows_into(partial: CubeTensor, sums: &CubeTensor, add: bool) {
    let [rows, n] = dims(&partial);
    launch!(sum_columns, Grid::elements([&partial], n), [partial, sums], rows, n, add, elem(sums));
}

/// A unit sums a column of a block of rows: `[blocks, n]`.
#[cube(launch, address_type = "dynamic")]
fn block_sums<X: Float, Z: Float, T: Term>(
    partial: &mut [f32],
    terms: &T,
    rows: usize,
    n: usize,
    columns: usize,
    height: usize,
    #[define(X, Z)] _dtypes: [ElemType; 2],
) {
    let block = CUBE_POS / columns;
    let column = (CUBE_POS % columns) * CUBE_DIM as usize + UNIT_POS as usize;
    let from = block * height;
    if from < rows && column < n {
        let to = min(from + height, rows);
        let mut sum = 0.0f32;
        for row in from..to {
            sum += T::at(terms, row * n + column, row);
        }
        partial[block * n + column] = sum;
    }
}

/// A unit sums a column.
#[cube(launch, address_type = "dynamic")]
fn sum_columns<F: Float>(
    partial: &[f32],
    out: &mut [F],
    rows: usize,
    n: usize,
    #[comptime] add: bool,
    #[define(F)] _dtype: ElemType,
) {
    let column = ABSOLUTE_POS;
    if column < n {
        let mut sum = 0.0f32;
        for row in 0..rows {
            sum += partial[row * n + column];
        }
        if add {
            sum += f32::cast_from(out[column]);
        }
        out[column] = F::cast_from(sum);
    }
}
