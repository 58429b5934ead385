//! The gradient of an embedding: each unit sums one column of one token's rows, in the batch's order.

use super::prelude::*;
use crate::shapes::RowsByToken;

/// See [`crate::scatter_add_rows`].
pub(crate) fn scatter_add_rows(sum: Tensor<2>, groups: &RowsByToken, rows: &Tensor<2>) -> Tensor<2> {
    let _span = span("embedding gradient", 0.0);
    let rows = detached(rows.clone());
    let [_, width] = dims(&rows);
    // rows of other tokens stay unchanged
    let out = into_writable(detached(sum));
    let columns = width.div_ceil(UNITS);
    let [order, starts, ids] = [&groups.order, &groups.starts, &groups.ids].map(integers);
    let grid = Grid::cubes([&out, &rows], groups.count * columns);
    launch!(add, grid, [&out, rows, order, starts, ids], groups.count, width, columns, elem(&out));
    Cube::tensor(out)
}

/// A unit sums one column of one token's rows.
#[cube(launch, address_type = "dynamic")]
fn add<F: Float>(
    out: &mut [F],
    rows: &[F],
    order: &[i32],
    starts: &[i32],
    ids: &[i32],
    count: usize,
    width: usize,
    columns: usize,
    #[define(F)] _dtype: ElemType,
) {
    let segment = CUBE_POS / columns;
    let column = (CUBE_POS % columns) * UNITS + UNIT_POS as usize;
    if segment < count && column < width {
        let at = ids[segment] as usize * width + column;
        let from = starts[segment] as usize;
        let to = starts[segment + 1] as usize;
        let mut sum = 0.0f32;
        for i in from..to {
            sum += f32::cast_from(rows[order[i] as usize * width + column]);
        }
        out[at] = F::cast_from(f32::cast_from(out[at]) + sum);
    }
}
