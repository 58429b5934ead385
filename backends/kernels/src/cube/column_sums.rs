//! Sums over rows, as the gradients of weights and biases are: sums of blocks of rows, then the sum of those, in a
//! fixed order without atomics.

use super::accumulate::add_to_sums;
use super::prelude::*;
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
    let partial = block_sums_of::<T>(like, terms, types, [rows, n], block);
    let added = leaf.is_some_and(|leaf| {
        add_to_sums(&[leaf], |mut sums| {
            let (sum, add) = match sums.remove(0) {
                Some(sum) => (sum, true),
                None => (empty(like, shape, DType::F32), false),
            };
            sum_rows_into(partial.clone(), &sum, add);
            vec![sum]
        })
    });
    (!added).then(|| sum_rows(partial, shape, dtype))
}

/// The sums of the columns of terms `[rows, n]`, by blocks of some rows: `[blocks, n]` in f32.
pub(super) fn block_sums_of<T: Term>(
    like: &CubeTensor,
    terms: T::RuntimeArg,
    types: [ElemType; 2],
    [rows, n]: [usize; 2],
    block: usize,
) -> CubeTensor {
    let blocks = rows.div_ceil(block).max(1);
    let columns = n.div_ceil(UNITS);
    let partial = empty(like, [blocks, n], DType::F32);
    let grid = Grid::cubes([like], blocks * columns);
    launch!(block_sums::<T>, grid, [&partial], terms, rows, n, columns, block, types);
    partial
}

/// The sums of the columns of f32 numbers `[rows, n]`, in a shape of n elements and a type.
pub(super) fn sum_rows(partial: CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    let sums = empty(&partial, shape, dtype);
    sum_rows_into(partial, &sums, false);
    sums
}

/// [`sum_rows`] in place of a tensor's n elements, or added to these. Where it has a multiple of n, the rows are as many
/// groups, each with a sum of its own.
pub(super) fn sum_rows_into(partial: CubeTensor, sums: &CubeTensor, add: bool) {
    let ([all, n], count) = (dims(&partial), sums.shape().num_elements());
    let rows = all * n / count.max(1);
    launch!(sum_columns, Grid::elements([&partial], count), [partial, sums], rows, n, count, add, elem(sums));
}

/// [`sum_rows`] of n elements into a matrix, each plus that of a contiguous matrix of its shape or one row.
pub(super) fn sum_rows_plus(partial: CubeTensor, plus: &CubeTensor, sums: &CubeTensor) {
    let ([rows, n], period) = (dims(&partial), plus.shape().num_elements());
    launch!(sum_columns_plus, Grid::elements([&partial], n), [partial, plus, sums], rows, n, period, elem(sums));
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

/// A unit sums a column of a group of rows.
#[cube(launch, address_type = "dynamic")]
fn sum_columns<F: Float>(
    partial: &[f32],
    out: &mut [F],
    rows: usize,
    n: usize,
    count: usize,
    #[comptime] add: bool,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < count {
        let first = i / n * rows * n + i % n;
        let mut sum = 0.0f32;
        for row in 0..rows {
            sum += partial[first + row * n];
        }
        if add {
            sum += f32::cast_from(out[i]);
        }
        out[i] = F::cast_from(sum);
    }
}

/// [`sum_columns`] plus elements that repeat after a period.
#[cube(launch, address_type = "dynamic")]
fn sum_columns_plus<F: Float>(
    partial: &[f32],
    plus: &[F],
    out: &mut [F],
    rows: usize,
    n: usize,
    period: usize,
    #[define(F)] _dtype: ElemType,
) {
    let column = ABSOLUTE_POS;
    if column < n {
        let mut sum = 0.0f32;
        for row in 0..rows {
            sum += partial[row * n + column];
        }
        out[column] = F::cast_from(sum + f32::cast_from(plus[column % period]));
    }
}
