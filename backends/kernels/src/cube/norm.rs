//! `RMSNorm` (Zhang & Sennrich, 2019): one pass over memory forward, two backward.

use super::launch::{RowGrid, UNITS, address, cubes, dims, elem, empty, output_arg, reuse_or_alloc, row_sum, supports};
use crate::autodiff::{self, Kernel, run};
use crate::choice::Operation;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Rows whose contributions to the weight's gradient a unit sums.
pub(super) const BLOCK: usize = 64;

/// `x / √(mean(x²) + eps) · (w + offset)`; see [`crate::rms_norm`].
pub(super) fn rms_norm(x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Option<Tensor<2>> {
    if !(supports(Operation::Norm, x) && supports(Operation::Norm, w)) || x.dtype() != w.dtype() {
        return None;
    }
    let kernel = Norm { eps, offset };
    Some(run(kernel, [autodiff::input(x.clone()), autodiff::input(w.clone())]))
}

/// The same, added to `base`; see [`crate::rms_norm_add`].
pub(super) fn rms_norm_add(
    base: Tensor<2>,
    x: &Tensor<2>,
    w: &Tensor<2>,
    eps: f64,
    offset: f64,
) -> Result<Tensor<2>, Tensor<2>> {
    let alike = |t: &Tensor<2>| supports(Operation::Norm, t) && t.dtype() == x.dtype();
    if ![&base, x, w].into_iter().all(alike) {
        return Err(base);
    }
    let inputs = [autodiff::input(base), autodiff::input(x.clone()), autodiff::input(w.clone())];
    Ok(run(NormAdd(Norm { eps, offset }), inputs))
}

#[derive(Clone, Debug)]
struct Norm {
    eps: f64,
    offset: f64,
}

/// A norm added to a residual.
#[derive(Clone, Debug)]
struct NormAdd(Norm);

impl Kernel<Cube, 3> for NormAdd {
    const NAME: &str = "norm";
    type Saved = [CubeTensor; 2];

    fn forward(&self, [base, x, w]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [rows, n] = dims(&x);
        let grid = RowGrid::of(n);
        let (out, in_place) = reuse_or_alloc(&base);
        normalise_add::launch(
            &out.client,
            grid.count(&x, rows),
            grid.dim(),
            address([&x]),
            base.into_buffer_arg(),
            x.clone().into_buffer_arg(),
            w.clone().into_buffer_arg(),
            output_arg(&out, in_place, 0),
            rows,
            n,
            self.0.eps as f32,
            self.0.offset as f32,
            grid.units,
            grid.rows,
            elem(&x),
        );
        (out, [x, w])
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, [base, x, w]: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let d_base = base.then(|| gradient.clone());
        if !(x || w) {
            return [d_base, None, None];
        }
        let [d_x, d_w] = self.0.backward(saved, gradient, [x, w]);
        [d_base, d_x, d_w]
    }
}

impl Kernel<Cube, 2> for Norm {
    const NAME: &str = "norm";
    type Saved = [CubeTensor; 2];

    fn forward(&self, inputs: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let [x, w] = inputs.clone();
        let [rows, n] = dims(&x);
        let y = empty(&x, [rows, n], x.dtype);
        let grid = RowGrid::of(n);
        normalise::launch(
            &y.client,
            grid.count(&x, rows),
            grid.dim(),
            address([&x]),
            x.into_buffer_arg(),
            w.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            rows,
            n,
            self.eps as f32,
            self.offset as f32,
            grid.units,
            grid.rows,
            elem(&y),
        );
        (y, inputs)
    }

    fn backward(&self, [x, w]: Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let [rows, n] = dims(&x);
        let reciprocals = empty(&x, [rows], DType::F32);
        let grid = RowGrid::of(n);
        // the weight's gradient reads the incoming gradient again
        let (dx, in_place) = if wanted[1] { (empty(&x, [rows, n], x.dtype), false) } else { reuse_or_alloc(&gradient) };
        input_gradient::launch(
            &x.client,
            grid.count(&x, rows),
            grid.dim(),
            address([&x]),
            x.clone().into_buffer_arg(),
            w.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            output_arg(&dx, in_place, 2),
            reciprocals.clone().into_buffer_arg(),
            rows,
            n,
            self.eps as f32,
            self.offset as f32,
            grid.units,
            grid.rows,
            elem(&x),
        );
        let dw = wanted[1].then(|| weight_gradient(&x, &gradient, reciprocals, w.shape().dims()));
        [wanted[0].then_some(dx), dw]
    }
}

/// Σ over rows of g x r: sums of blocks of rows, then the sum of those, in a fixed order without atomics.
fn weight_gradient(x: &CubeTensor, gradient: &CubeTensor, reciprocals: CubeTensor, shape: [usize; 2]) -> CubeTensor {
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
        gradient.clone().into_buffer_arg(),
        reciprocals.into_buffer_arg(),
        partial.clone().into_buffer_arg(),
        rows,
        n,
        columns,
        BLOCK,
        elem(x),
    );
    let dw = empty(x, shape, x.dtype);
    sum_rows::launch(
        &x.client,
        cubes(x, columns),
        CubeDim::new_1d(UNITS as u32),
        address([&partial]),
        partial.into_buffer_arg(),
        dw.clone().into_buffer_arg(),
        blocks,
        n,
        elem(x),
    );
    dw
}

/// 1 / rms of the row that begins at `first`. All units of a cube must call this, also those without a row.
#[cube]
pub(super) fn reciprocal<F: Float>(
    lanes: &mut Shared<[f32]>,
    x: &[F],
    first: usize,
    is_row: bool,
    n: usize,
    eps: f32,
    #[comptime] units: usize,
) -> f32 {
    let mut squares = 0.0f32;
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < n {
            let value = f32::cast_from(x[first + i]);
            squares += value * value;
            i += units;
        }
    }
    let sum = row_sum(lanes, squares, units);
    1.0f32 / (sum / n as f32 + eps).sqrt()
}

#[cube(launch, address_type = "dynamic")]
fn normalise<F: Float>(
    x: &[F],
    w: &[F],
    y: &mut [F],
    rows: usize,
    n: usize,
    eps: f32,
    offset: f32,
    #[comptime] units: usize,
    #[comptime] height: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(units * height);
    let row = CUBE_POS * height + UNIT_POS_Y as usize;
    let first = row * n;
    let r = reciprocal::<F>(&mut lanes, x, first, row < rows, n, eps, units);
    if row < rows {
        let mut i = UNIT_POS_X as usize;
        while i < n {
            let value = f32::cast_from(x[first + i]) * r;
            y[first + i] = F::cast_from(value * (f32::cast_from(w[i]) + offset));
            i += units;
        }
    }
}

#[cube(launch, address_type = "dynamic")]
fn normalise_add<F: Float>(
    base: &[F],
    x: &[F],
    w: &[F],
    y: &mut [F],
    rows: usize,
    n: usize,
    eps: f32,
    offset: f32,
    #[comptime] units: usize,
    #[comptime] height: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(units * height);
    let row = CUBE_POS * height + UNIT_POS_Y as usize;
    let first = row * n;
    let r = reciprocal::<F>(&mut lanes, x, first, row < rows, n, eps, units);
    if row < rows {
        let mut i = UNIT_POS_X as usize;
        while i < n {
            let value = f32::cast_from(x[first + i]) * r * (f32::cast_from(w[i]) + offset);
            y[first + i] = F::cast_from(f32::cast_from(base[first + i]) + value);
            i += units;
        }
    }
}

/// With r = 1 / rms and ĝ = g · w: dx = r (ĝ − x r² mean(ĝ x)). Also keeps r.
#[cube(launch, address_type = "dynamic")]
fn input_gradient<F: Float>(
    x: &[F],
    w: &[F],
    g: &[F],
    dx: &mut [F],
    reciprocals: &mut [f32],
    rows: usize,
    n: usize,
    eps: f32,
    offset: f32,
    #[comptime] units: usize,
    #[comptime] height: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(units * height);
    let row = CUBE_POS * height + UNIT_POS_Y as usize;
    let first = row * n;
    let mut squares = 0.0f32;
    let mut products = 0.0f32;
    if row < rows {
        let mut i = UNIT_POS_X as usize;
        while i < n {
            let value = f32::cast_from(x[first + i]);
            let weighted = f32::cast_from(g[first + i]) * (f32::cast_from(w[i]) + offset);
            squares += value * value;
            products += weighted * value;
            i += units;
        }
    }
    let squares = row_sum(&mut lanes, squares, units);
    let products = row_sum(&mut lanes, products, units);
    if row < rows {
        let r = 1.0f32 / (squares / n as f32 + eps).sqrt();
        let pull = r * r * products / n as f32;
        let mut i = UNIT_POS_X as usize;
        while i < n {
            let value = f32::cast_from(x[first + i]);
            let weighted = f32::cast_from(g[first + i]) * (f32::cast_from(w[i]) + offset);
            dx[first + i] = F::cast_from(r * (weighted - value * pull));
            i += units;
        }
        if UNIT_POS_X == 0 {
            reciprocals[row] = r;
        }
    }
}

/// A unit sums a column of a block of rows: `[blocks, n]`.
#[cube(launch, address_type = "dynamic")]
fn block_sums<F: Float>(
    x: &[F],
    g: &[F],
    reciprocals: &[f32],
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
            let i = row * n + column;
            sum += f32::cast_from(g[i]) * f32::cast_from(x[i]) * reciprocals[row];
        }
        partial[block * n + column] = sum;
    }
}

/// A unit sums a column.
#[cube(launch, address_type = "dynamic")]
pub(super) fn sum_rows<F: Float>(partial: &[f32], out: &mut [F], rows: usize, n: usize, #[define(F)] _dtype: ElemType) {
    let column = ABSOLUTE_POS;
    if column < n {
        let mut sum = 0.0f32;
        for row in 0..rows {
            sum += partial[row * n + column];
        }
        out[column] = F::cast_from(sum);
    }
}
