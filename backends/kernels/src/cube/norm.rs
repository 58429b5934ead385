//! `RMSNorm` (Zhang & Sennrich, 2019): one pass over memory forward, two backward.

use super::column_sums::{Term, X, column_sums};
use super::prelude::*;
use crate::gradient_sums;
use burn::backend::autodiff::NodeId;

/// Rows whose contributions to the weight's gradient a unit sums.
pub(super) const BLOCK: usize = 64;

/// See [`crate::rms_norm`].
pub(crate) fn rms_norm(x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Tensor<2> {
    run(Norm::new(w, eps, offset), [x, w].map(|t| autodiff::input(t.clone())))
}

/// See [`crate::rms_norm_add`].
pub(crate) fn rms_norm_add(base: Tensor<2>, x: Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Tensor<2> {
    let inputs = [autodiff::input(base), autodiff::input(x), autodiff::input(w.clone())];
    run(NormAdd(Norm::new(w, eps, offset)), inputs)
}

/// See [`crate::rms_norm_residual`].
pub(crate) fn rms_norm_residual(x: Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> [Tensor<2>; 2] {
    run_several(NormResidual(Norm::new(w, eps, offset)), [x, w.clone()].map(autodiff::input))
}

#[derive(Clone, Debug)]
struct Norm {
    eps: f64,
    offset: f64,
    /// The weight, if it gets a gradient.
    leaf: Option<NodeId>,
}

/// A norm added to a residual.
#[derive(Clone, Debug)]
struct NormAdd(Norm);

/// A norm beside the residual that it is of.
#[derive(Clone, Debug)]
struct NormResidual(Norm);

/// The scalars of a norm over `rows` of `n` elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct NormShape {
    pub rows: usize,
    pub n: usize,
    pub eps: f32,
    pub offset: f32,
}

impl Norm {
    fn new(w: &Tensor<2>, eps: f64, offset: f64) -> Self {
        Self { eps, offset, leaf: gradient_sums::leaf::<Cube>(w) }
    }

    fn shape(&self, [rows, n]: [usize; 2]) -> NormShapeLaunch {
        NormShapeLaunch::new(rows, n, self.eps as f32, self.offset as f32)
    }
}

impl Kernel<Cube, 3> for NormAdd {
    const NAME: &str = "norm";
    type Saved = [CubeTensor; 2];

    fn forward(&self, [base, x, w]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [rows, n] = dims(&x);
        let grid = RowGrid::new(n);
        let (out, in_place) = reuse_or_alloc(&base);
        let y = output_arg(&out, in_place, 0);
        launch!(normalise, grid.cubes([&x], rows), [base, &x, &w, y], self.0.shape([rows, n]), true, grid, elem(&x));
        (out, [x, w])
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, [base, x, w]: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let d_base = base.then(|| gradient.clone());
        if !(x || w) {
            return [d_base, None, None];
        }
        let [d_x, d_w] = self.0.gradients(saved, &gradient, None, [x, w]);
        [d_base, d_x, d_w]
    }
}

impl Kernel<Cube, 2> for Norm {
    const NAME: &str = "norm";
    type Saved = [CubeTensor; 2];

    fn forward(&self, inputs: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let [x, w] = &inputs;
        let [rows, n] = dims(x);
        let y = empty(x, [rows, n], x.dtype);
        let grid = RowGrid::new(n);
        // nothing is added, but a buffer has to be bound
        launch!(normalise, grid.cubes([x], rows), [x, x, w, &y], self.shape([rows, n]), false, grid, elem(x));
        (y, inputs)
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        self.gradients(saved, &gradient, None, wanted)
    }
}

impl KernelOfSeveral<Cube, 2, 2> for NormResidual {
    const NAME: &str = "norm";
    type Saved = [CubeTensor; 2];

    fn forward(&self, inputs: [CubeTensor; 2]) -> ([CubeTensor; 2], Self::Saved) {
        let x = inputs[0].clone();
        let (y, saved) = self.0.forward(inputs);
        ([y, x], saved)
    }

    fn backward(
        &self,
        saved: Self::Saved,
        [gradient, residual]: [Option<CubeTensor>; 2],
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        match gradient {
            Some(gradient) => self.0.gradients(saved, &gradient, residual.as_ref(), wanted),
            None => [residual, None],
        }
    }
}

impl Norm {
    /// Gradients of `x` and `w`, given that of the norm, and one that is added to that of `x`.
    fn gradients(
        &self,
        [x, w]: [CubeTensor; 2],
        gradient: &CubeTensor,
        residual: Option<&CubeTensor>,
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        let [rows, n] = dims(&x);
        let reciprocals = empty(&x, [rows], DType::F32);
        let grid = RowGrid::new(n);
        // the weight's gradient reads the incoming gradient again
        let (dx, in_place) = if wanted[1] { (empty(&x, [rows, n], x.dtype), false) } else { reuse_or_alloc(gradient) };
        let (cubes, shape, out) = (grid.cubes([&x], rows), self.shape([rows, n]), output_arg(&dx, in_place, 2));
        // a buffer has to be bound where nothing is added
        let (added, adds) = (residual.unwrap_or(&x), residual.is_some());
        launch!(input_gradient, cubes, [&x, &w, gradient, added, out, &reciprocals], shape, adds, grid, elem(&x));
        let dw = || {
            let terms = NormTermsLaunch::new(buffer(&x), buffer(gradient), buffer(&reciprocals));
            column_sums::<NormTerms<X>>(&x, terms, [elem(&x); 2], [rows, n], BLOCK, (dims(&w), x.dtype), self.leaf)
        };
        let dw = if wanted[1] { dw() } else { None };
        [wanted[0].then_some(dx), dw]
    }
}

/// The weight's gradient is Σ over rows of g x r.
#[derive(CubeType, CubeLaunch)]
struct NormTerms<F: Float> {
    x: Box<[F]>,
    g: Box<[F]>,
    reciprocals: Box<[f32]>,
}

#[cube]
impl<F: Float> Term for NormTerms<F> {
    fn at(this: &Self, i: usize, row: usize) -> f32 {
        f32::cast_from(this.g[i]) * f32::cast_from(this.x[i]) * this.reciprocals[row]
    }
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

/// The norm, added to `base` where it `adds`.
#[cube(launch, address_type = "dynamic")]
fn normalise<F: Float>(
    base: &[F],
    x: &[F],
    w: &[F],
    y: &mut [F],
    shape: NormShape,
    #[comptime] adds: bool,
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = row_lanes(grid);
    let row = row_index(grid);
    let first = row * shape.n;
    let is_row = row < shape.rows;
    let r = reciprocal::<F>(&mut lanes, x, first, is_row, shape.n, shape.eps, comptime!(grid.units));
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let value = f32::cast_from(x[first + i]) * r * (f32::cast_from(w[i]) + shape.offset);
            if adds {
                y[first + i] = F::cast_from(f32::cast_from(base[first + i]) + value);
            } else {
                y[first + i] = F::cast_from(value);
            }
            i += comptime!(grid.units);
        }
    }
}

/// With r = 1 / rms and ĝ = g · w: dx = r (ĝ − x r² mean(ĝ x)), plus `added` where it `adds`. Also keeps r.
#[cube(launch, address_type = "dynamic")]
fn input_gradient<F: Float>(
    x: &[F],
    w: &[F],
    g: &[F],
    added: &[F],
    dx: &mut [F],
    reciprocals: &mut [f32],
    shape: NormShape,
    #[comptime] adds: bool,
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
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
            let weighted = f32::cast_from(g[first + i]) * (f32::cast_from(w[i]) + shape.offset);
            squares += value * value;
            products += weighted * value;
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
            let weighted = f32::cast_from(g[first + i]) * (f32::cast_from(w[i]) + shape.offset);
            let own = r * (weighted - value * pull);
            if adds {
                dx[first + i] = F::cast_from(own + f32::cast_from(added[first + i]));
            } else {
                dx[first + i] = F::cast_from(own);
            }
            i += comptime!(grid.units);
        }
        if UNIT_POS_X == 0 {
            reciprocals[row] = r;
        }
    }
}
