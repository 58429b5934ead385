//! `RMSNorm` with a gate, as gated `DeltaNet` ends, and its gradients: one pass over memory forward, two backward.

use super::glu::activation;
use super::launch::{RowGrid, UNITS, address, cubes, dims, elem, empty, row_sum, supports};
use super::norm::{reciprocal, sum_rows};
use crate::autodiff::{self, Kernel, run};
use crate::choice::Operation;
use crate::shapes::Gate;
use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Rows whose contributions to the weight's gradient a unit sums: heads are narrow and many.
const BLOCK: usize = 256;

/// See [`crate::gated_rms_norm`].
pub(super) fn gated_rms_norm(x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Option<Tensor<2>> {
    let known = [x, z, w].iter().all(|t| supports(Operation::DeltaNet, *t));
    let wide = x.dtype() == DType::F32 || x.dtype() == z.dtype();
    if !known || !wide || w.dtype() != z.dtype() {
        return None;
    }
    let inputs = [x, z, w].map(|t| autodiff::input(t.clone()));
    Some(run(GatedNorm { eps }, inputs))
}

#[derive(Clone, Debug)]
struct GatedNorm {
    eps: f64,
}

impl Kernel<Cube, 3> for GatedNorm {
    const NAME: &str = "gated norm";
    type Saved = [CubeTensor; 3];

    fn forward(&self, inputs: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [x, z, w] = inputs.clone();
        let [rows, n] = dims(&x);
        let y = empty(&z, [rows, n], z.dtype);
        let grid = RowGrid::of(n);
        let dtypes = [elem(&x), elem(&z)];
        gated_normalise::launch(
            &y.client,
            grid.count(&x, rows),
            grid.dim(),
            address([&x]),
            x.into_buffer_arg(),
            z.into_buffer_arg(),
            w.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            rows,
            n,
            self.eps as f32,
            grid.units,
            grid.rows,
            dtypes,
        );
        (y, inputs)
    }

    fn backward(&self, [x, z, w]: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let [rows, n] = dims(&x);
        let dx = empty(&x, [rows, n], x.dtype);
        let dz = empty(&z, [rows, n], z.dtype);
        let reciprocals = empty(&x, [rows], DType::F32);
        let grid = RowGrid::of(n);
        gated_norm_backward::launch(
            &x.client,
            grid.count(&x, rows),
            grid.dim(),
            address([&x]),
            x.clone().into_buffer_arg(),
            z.clone().into_buffer_arg(),
            w.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            dx.clone().into_buffer_arg(),
            dz.clone().into_buffer_arg(),
            reciprocals.clone().into_buffer_arg(),
            rows,
            n,
            self.eps as f32,
            grid.units,
            grid.rows,
            [elem(&x), elem(&z)],
        );
        let dw = wanted[2].then(|| weight_gradient([x, z, gradient, reciprocals], dims(&w)));
        [wanted[0].then_some(dx), wanted[1].then_some(dz), dw]
    }
}

/// Σ over rows of g x r silu(z): sums of blocks of rows, then the sum of those, in a fixed order without atomics.
fn weight_gradient([x, z, gradient, reciprocals]: [CubeTensor; 4], shape: [usize; 2]) -> CubeTensor {
    let [rows, n] = dims(&x);
    let blocks = rows.div_ceil(BLOCK).max(1);
    let columns = n.div_ceil(UNITS);
    let partial = empty(&x, [blocks, n], DType::F32);
    let dtypes = [elem(&x), elem(&z)];
    let dw = empty(&z, shape, z.dtype);
    gated_block_sums::launch(
        &dw.client,
        cubes(&x, blocks * columns),
        CubeDim::new_1d(UNITS as u32),
        address([&x]),
        x.into_buffer_arg(),
        z.into_buffer_arg(),
        gradient.into_buffer_arg(),
        reciprocals.into_buffer_arg(),
        partial.clone().into_buffer_arg(),
        rows,
        n,
        columns,
        BLOCK,
        dtypes,
    );
    sum_rows::launch(
        &dw.client,
        cubes(&dw, columns),
        CubeDim::new_1d(UNITS as u32),
        address([&partial]),
        partial.into_buffer_arg(),
        dw.clone().into_buffer_arg(),
        blocks,
        n,
        elem(&dw),
    );
    dw
}

#[cube(launch, address_type = "dynamic")]
fn gated_normalise<X: Float, Z: Float>(
    x: &[X],
    z: &[Z],
    w: &[Z],
    y: &mut [Z],
    rows: usize,
    n: usize,
    eps: f32,
    #[comptime] units: usize,
    #[comptime] height: usize,
    #[define(X, Z)] _dtypes: [ElemType; 2],
) {
    let mut lanes = Shared::<[f32]>::new_slice(units * height);
    let row = CUBE_POS * height + UNIT_POS_Y as usize;
    let first = row * n;
    let r = reciprocal::<X>(&mut lanes, x, first, row < rows, n, eps, units);
    if row < rows {
        let mut i = UNIT_POS_X as usize;
        while i < n {
            let (gate, _) = activation(f32::cast_from(z[first + i]), Gate::Silu);
            let value = f32::cast_from(x[first + i]) * r * f32::cast_from(w[i]) * gate;
            y[first + i] = Z::cast_from(value);
            i += units;
        }
    }
}

/// With u = x / rms(x) and s = silu(z): dz = g · u · w · s′, du = g · w · s, dx = (du − u mean(du · u)) / rms(x). Also
/// keeps 1 / rms(x).
#[cube(launch, address_type = "dynamic")]
fn gated_norm_backward<X: Float, Z: Float>(
    x: &[X],
    z: &[Z],
    w: &[Z],
    g: &[Z],
    dx: &mut [X],
    dz: &mut [Z],
    reciprocals: &mut [f32],
    rows: usize,
    n: usize,
    eps: f32,
    #[comptime] units: usize,
    #[comptime] height: usize,
    #[define(X, Z)] _dtypes: [ElemType; 2],
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
            let (gate, _) = activation(f32::cast_from(z[first + i]), Gate::Silu);
            squares += value * value;
            products += f32::cast_from(g[first + i]) * f32::cast_from(w[i]) * gate * value;
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
            let weighted = f32::cast_from(g[first + i]) * f32::cast_from(w[i]);
            let (gate, slope) = activation(f32::cast_from(z[first + i]), Gate::Silu);
            dz[first + i] = Z::cast_from(weighted * value * r * slope);
            dx[first + i] = X::cast_from(r * (weighted * gate - value * pull));
            i += units;
        }
        if UNIT_POS_X == 0 {
            reciprocals[row] = r;
        }
    }
}

/// A unit sums a column of a block of rows: `[blocks, n]`.
#[cube(launch, address_type = "dynamic")]
fn gated_block_sums<X: Float, Z: Float>(
    x: &[X],
    z: &[Z],
    g: &[Z],
    reciprocals: &[f32],
    partial: &mut [f32],
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
            let i = row * n + column;
            let (gate, _) = activation(f32::cast_from(z[i]), Gate::Silu);
            sum += f32::cast_from(g[i]) * f32::cast_from(x[i]) * reciprocals[row] * gate;
        }
        partial[block * n + column] = sum;
    }
}
