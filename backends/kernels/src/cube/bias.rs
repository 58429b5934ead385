//! A bias added to every row. Burn's own gradient of it sums all rows of a column in one plane: 0.24 ms for 4,096 rows
//! of 128 columns on an H200.

use super::launch::{UNITS, address, cubes, dims, elem, elementwise, empty, output_arg, reuse_or_alloc, supports};
use super::norm::{BLOCK, sum_rows};
use crate::autodiff::{self, Kernel, run};
use crate::choice::Operation;
use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// `y + bias`, in place where `y` is not shared; see [`crate::add_bias`].
pub(super) fn add_bias(y: Tensor<2>, bias: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
    let alike = bias.dims() == [1, y.dims()[1]] && bias.dtype() == y.dtype();
    if !alike || !supports(Operation::Norm, &y) || y.shape().num_elements() == 0 {
        return Err(y);
    }
    let inputs = [autodiff::input(y), autodiff::input(bias.clone())];
    Ok(run(AddBias, inputs))
}

#[derive(Clone, Debug)]
struct AddBias;

impl Kernel<Cube, 2> for AddBias {
    const NAME: &str = "bias";
    type Saved = ();

    fn forward(&self, [y, bias]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let [rows, n] = dims(&y);
        let (out, in_place) = reuse_or_alloc(&y);
        let (count, dim) = elementwise(&out, rows * n);
        add::launch(
            &out.client,
            count,
            dim,
            address([&y]),
            y.into_buffer_arg(),
            bias.into_buffer_arg(),
            output_arg(&out, in_place, 0),
            rows * n,
            n,
            elem(&out),
        );
        (out, ())
    }

    fn backward(&self, (): Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let sums = wanted[1].then(|| column_sums(&gradient));
        [wanted[0].then_some(gradient), sums]
    }
}

/// The sums of columns, `[1, n]`: sums of blocks of rows, then the sum of those, in a fixed order without atomics.
fn column_sums(x: &CubeTensor) -> CubeTensor {
    let [rows, n] = dims(x);
    let blocks = rows.div_ceil(BLOCK).max(1);
    let columns = n.div_ceil(UNITS);
    let partial = empty(x, [blocks, n], DType::F32);
    block_sums::launch(
        &x.client,
        cubes(x, blocks * columns),
        CubeDim::new_1d(UNITS as u32),
        address([x]),
        x.clone().into_buffer_arg(),
        partial.clone().into_buffer_arg(),
        rows,
        n,
        columns,
        BLOCK,
        elem(x),
    );
    let sums = empty(x, [1, n], x.dtype);
    sum_rows::launch(
        &x.client,
        cubes(x, columns),
        CubeDim::new_1d(UNITS as u32),
        address([&partial]),
        partial.into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        blocks,
        n,
        elem(x),
    );
    sums
}

#[cube(launch, address_type = "dynamic")]
fn add<F: Float>(y: &[F], bias: &[F], out: &mut [F], length: usize, n: usize, #[define(F)] _dtype: ElemType) {
    let i = ABSOLUTE_POS;
    if i < length {
        out[i] = F::cast_from(f32::cast_from(y[i]) + f32::cast_from(bias[i % n]));
    }
}

/// A unit sums a column of a block of rows: `[blocks, n]`.
#[cube(launch, address_type = "dynamic")]
fn block_sums<F: Float>(
    x: &[F],
    partial: &mut [f32],
    rows: usize,
    n: usize,
    columns: usize,
    height: usize,
    #[define(F)] _dtype: ElemType,
) {
    let block = CUBE_POS / columns;
    let column = (CUBE_POS % columns) * CUBE_DIM as usize + UNIT_POS as usize;
    let from = block * height;
    if from < rows && column < n {
        let to = min(from + height, rows);
        let mut sum = 0.0f32;
        for row in from..to {
            sum += f32::cast_from(x[row * n + column]);
        }
        partial[block * n + column] = sum;
    }
}
