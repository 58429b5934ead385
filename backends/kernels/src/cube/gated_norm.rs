//! `RMSNorm` with a gate, as gated `DeltaNet` ends, and its gradients: one pass over memory forward, two backward.

use super::column_sums::{Term, X, Z, column_sums};
use super::glu::activation;
use super::norm::{NormShape, NormShapeLaunch};
use super::prelude::*;
use crate::gradient_sums;
use burn::backend::autodiff::NodeId;
use firebrick_spec::Activation;

/// Rows whose contributions to the weight's gradient a unit sums: heads are narrow and many.
const BLOCK: usize = 256;

/// Returns true if the kernel takes these tensors: `x` may be wider than the others.
pub(crate) fn takes(x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>) -> bool {
    let wide = x.dtype() == DType::F32 || x.dtype() == z.dtype();
    wide && supports(Operation::DeltaNet, x) && alike(Operation::DeltaNet, &[z, w])
}

/// See [`crate::gated_rms_norm`].
pub(crate) fn gated_rms_norm(x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Tensor<2> {
    run(GatedNorm { eps, leaf: gradient_sums::leaf::<Cube>(w) }, [x, z, w].map(|t| autodiff::input(t.clone())))
}

#[derive(Clone, Debug)]
struct GatedNorm {
    eps: f64,
    /// The weight, if it gets a gradient.
    leaf: Option<NodeId>,
}

impl GatedNorm {
    fn shape(&self, [rows, n]: [usize; 2]) -> NormShapeLaunch {
        NormShapeLaunch::new(rows, n, self.eps as f32, 0.0)
    }
}

impl Kernel<Cube, 3> for GatedNorm {
    const NAME: &str = "gated norm";
    type Saved = [CubeTensor; 3];

    fn forward(&self, inputs: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [x, z, w] = &inputs;
        let [rows, n] = dims(x);
        let y = empty(z, [rows, n], z.dtype);
        let grid = RowGrid::new(n);
        let types = [elem(x), elem(z)];
        launch!(gated_normalise, grid.cubes([x], rows), [x, z, w, &y], self.shape([rows, n]), grid, types);
        (y, inputs)
    }

    fn backward(&self, [x, z, w]: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let [rows, n] = dims(&x);
        let [dx, dz] = [&x, &z].map(|t| empty(t, [rows, n], t.dtype));
        let reciprocals = empty(&x, [rows], DType::F32);
        let grid = RowGrid::new(n);
        let (cubes, shape, types) = (grid.cubes([&x], rows), self.shape([rows, n]), [elem(&x), elem(&z)]);
        launch!(gated_norm_backward, cubes, [&x, &z, &w, &gradient, &dx, &dz, &reciprocals], shape, grid, types);
        let dw = || {
            let [x_arg, z_arg, g, r] = [&x, &z, &gradient, &reciprocals].map(buffer);
            let terms = GatedNormTermsLaunch::new(x_arg, z_arg, g, r);
            column_sums::<GatedNormTerms<X, Z>>(&x, terms, types, [rows, n], BLOCK, (dims(&w), z.dtype), self.leaf)
        };
        let dw = if wanted[2] { dw() } else { None };
        [wanted[0].then_some(dx), wanted[1].then_some(dz), dw]
    }
}

/// The weight's gradient is Σ over rows of g x r silu(z).
#[derive(CubeType, CubeLaunch)]
struct GatedNormTerms<X: Float, Z: Float> {
    x: Box<[X]>,
    z: Box<[Z]>,
    g: Box<[Z]>,
    reciprocals: Box<[f32]>,
}

#[cube]
impl<X: Float, Z: Float> Term for GatedNormTerms<X, Z> {
    fn at(this: &Self, i: usize, row: usize) -> f32 {
        let (gate, _) = activation(f32::cast_from(this.z[i]), Activation::Silu);
        f32::cast_from(this.g[i]) * f32::cast_from(this.x[i]) * this.reciprocals[row] * gate
    }
}

#[cube(launch, address_type = "dynamic")]
fn gated_normalise<X: Float, Z: Float>(
    x: &[X],
    z: &[Z],
    w: &[Z],
    y: &mut [Z],
    shape: NormShape,
    #[comptime] grid: RowGrid,
    #[define(X, Z)] _dtypes: [ElemType; 2],
) {
    let mut lanes = row_lanes(grid);
    let row = row_index(grid);
    let first = row * shape.n;
    let is_row = row < shape.rows;
    let mut squares = 0.0f32;
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let value = f32::cast_from(x[first + i]);
            squares += value * value;
            i += comptime!(grid.units);
        }
    }
    let squares = row_sum(&mut lanes, squares, comptime!(grid.units));
    let r = 1.0f32 / (squares / shape.n as f32 + shape.eps).sqrt();
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let (gate, _) = activation(f32::cast_from(z[first + i]), Activation::Silu);
            let value = f32::cast_from(x[first + i]) * r * f32::cast_from(w[i]) * gate;
            y[first + i] = Z::cast_from(value);
            i += comptime!(grid.units);
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
    shape: NormShape,
    #[comptime] grid: RowGrid,
    #[define(X, Z)] _dtypes: [ElemType; 2],
) {
    let mut lanes = row_lanes(grid);
    let row = row_index(grid);
    let first = row * shape.n;
    let is_row = row < shape.rows;
    let mut squares = 0.0f32;
    let mut products = 0.0f32;
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let value = f32::cast_from(x[first + i]);
            let (gate, _) = activation(f32::cast_from(z[first + i]), Activation::Silu);
            squares += value * value;
            products += f32::cast_from(g[first + i]) * f32::cast_from(w[i]) * gate * value;
            i += comptime!(grid.units);
        }
    }
    let squares = row_sum(&mut lanes, squares, comptime!(grid.units));
    let products = row_sum(&mut lanes, products, comptime!(grid.units));
    if is_row {
        let r = 1.0f32 / (squares / shape.n as f32 + shape.eps).sqrt();
        let pull = r * r * products / shape.n as f32;
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let value = f32::cast_from(x[first + i]);
            let weighted = f32::cast_from(g[first + i]) * f32::cast_from(w[i]);
            let (gate, slope) = activation(f32::cast_from(z[first + i]), Activation::Silu);
            dz[first + i] = Z::cast_from(weighted * value * r * slope);
            dx[first + i] = X::cast_from(r * (weighted * gate - value * pull));
            i += comptime!(grid.units);
        }
        if UNIT_POS_X == 0 {
            reciprocals[row] = r;
        }
    }
}
