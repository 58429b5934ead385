//! `RMSNorm` (Zhang & Sennrich, 2019): one pass over memory forward, two backward.
//!
//! On CUDA a warp has a row. Squares are summed in an order that depends on the row's width alone: of eight columns by a
//! unit, of [`CHUNK`] columns by four units, of every eighth chunk one after the other, then of the eight sums. So a
//! kernel that has the sums of chunks norms as this one does (`fused_linear`).

use super::cmma::PLANE;
use super::column_sums::{Term, X, column_sums};
use super::prelude::*;
use crate::gradient_sums;
use burn::backend::autodiff::NodeId;
use burn_cubecl::CubeDevice;

/// Rows whose contributions to the weight's gradient a unit sums.
pub(super) const BLOCK: usize = 64;

/// Columns whose squares are summed first, on CUDA.
pub(super) const CHUNK: usize = 32;

/// Units of a row and their columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NormGrid {
    pub rows: RowGrid,
    /// Columns that lie side by side and are a unit's.
    columns: usize,
    /// Columns of a load.
    vector: usize,
    /// Steps over the columns that are under way at a time.
    ahead: usize,
}

impl NormGrid {
    /// For rows of `n` elements: a plane of CUDA, or as many units as other kernels have.
    pub fn new<const N: usize>(tensors: [&CubeTensor; N], n: usize) -> Self {
        if matches!(tensors[0].device, CubeDevice::Cuda(_)) {
            // few rows of a cube, so that those of a decoding step are on all multiprocessors
            let rows = RowGrid { units: PLANE, rows: 4 };
            Self { rows, columns: CHUNK / 4, vector: vector_size(tensors, n), ahead: 4 }
        } else {
            Self { rows: RowGrid::new(n), columns: 1, vector: 1, ahead: 1 }
        }
    }

    /// True if a plane has a row.
    const fn is_plane(self) -> bool {
        self.columns > 1
    }

    /// Columns of all units.
    const fn width(self) -> usize {
        self.rows.units * self.columns
    }

    /// Loads of a unit that are under way at a time.
    pub const fn loads(self) -> usize {
        self.ahead * self.each()
    }

    /// Loads of a unit's columns in a step.
    const fn each(self) -> usize {
        self.columns / self.vector
    }

    /// The step of a load.
    pub const fn step(self, load: usize) -> usize {
        load / self.each()
    }

    /// Columns of a load.
    pub const fn vector(self) -> usize {
        self.vector
    }
}

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
        let (out, in_place) = reuse_or_alloc(&base);
        let grid = NormGrid::new([&base, &x, &w, &out], n);
        let (y, size) = (output_arg(&out, in_place, 0), grid.vector());
        let (cubes, shape) = (grid.rows.cubes([&x], rows), self.0.shape([rows, n]));
        launch!(normalise, cubes, size, [base, &x, &w, y], shape, true, grid, elem(&x));
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
        let grid = NormGrid::new([x, w, &y], n);
        let (size, cubes, shape) = (grid.vector(), grid.rows.cubes([x], rows), self.shape([rows, n]));
        // nothing is added, but a buffer has to be bound
        launch!(normalise, cubes, size, [x, x, w, &y], shape, false, grid, elem(x));
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
        // the weight's gradient reads the incoming gradient again
        let (dx, in_place) = if wanted[1] { (empty(&x, [rows, n], x.dtype), false) } else { reuse_or_alloc(gradient) };
        // a buffer has to be bound where nothing is added
        let (added, adds) = (residual.unwrap_or(&x), residual.is_some());
        let grid = NormGrid::new([&x, &w, gradient, added, &dx], n);
        let (size, cubes, shape) = (grid.vector(), grid.rows.cubes([&x], rows), self.shape([rows, n]));
        let out = output_arg(&dx, in_place, 2);
        launch!(input_gradient, cubes, size, [&x, &w, gradient, added, out, &reciprocals], shape, adds, grid, elem(&x));
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

/// A unit's first column of a load, which may be beyond the last: of those that are under way after `before` times as
/// many.
#[cube]
pub(super) fn column_of(before: usize, #[comptime] load: usize, #[comptime] grid: NormGrid) -> usize {
    let at = comptime!(grid.step(load) * grid.width() + load % grid.each() * grid.vector);
    before * comptime!(grid.ahead * grid.width()) + UNIT_POS_X as usize * comptime!(grid.columns) + at
}

/// How many times [`NormGrid::loads`] are made for a row's columns.
#[cube]
pub(super) fn times_of(n: usize, #[comptime] grid: NormGrid) -> usize {
    n.div_ceil(comptime!(grid.ahead * grid.width()))
}

/// What a unit loads of a row at a time, with zeros for columns beyond the last: all before anything is computed, so that
/// the loads are under way together.
#[cube]
pub(super) fn load_row<F: Float, N: Size>(
    x: &[Vector<F, N>],
    first: usize,
    before: usize,
    is_row: bool,
    n: usize,
    #[comptime] grid: NormGrid,
) -> Array<Vector<F, N>> {
    let mut values = Array::<Vector<F, N>>::new(comptime!(grid.loads()));
    #[unroll]
    for load in 0..comptime!(grid.loads()) {
        let column = column_of(before, load, grid);
        values[load] = Vector::<F, N>::cast_from(0u32);
        if is_row && column < n {
            values[load] = x[first + column / N::value()];
        }
    }
    values
}

/// A sum with the squares of some columns.
#[cube]
pub(super) fn add_squares<F: Float, N: Size>(sum: f32, x: Vector<F, N>) -> f32 {
    let mut sum = sum;
    #[unroll]
    for e in 0..N::value() {
        let value = f32::cast_from(x.extract(e));
        sum = fma(value, value, sum);
    }
    sum
}

/// Sums of a unit in steps, 0 at first.
#[cube]
pub(super) fn step_sums(#[comptime] grid: NormGrid) -> Array<f32> {
    let mut sums = Array::<f32>::new(comptime!(grid.ahead));
    #[unroll]
    for step in 0..comptime!(grid.ahead) {
        sums[step] = 0.0f32;
    }
    sums
}

/// What the units of a chunk have summed.
#[cube]
fn chunk_sum(own: f32, #[comptime] grid: NormGrid) -> f32 {
    let mut sum = own;
    if comptime!(grid.is_plane()) {
        sum += plane_shuffle_xor(sum, 1u32);
        sum += plane_shuffle_xor(sum, 2u32);
    }
    sum
}

/// A sum with what the units of a chunk have summed in steps.
#[cube]
pub(super) fn add_chunks(sum: f32, own: &Array<f32>, #[comptime] grid: NormGrid) -> f32 {
    let mut sum = sum;
    #[unroll]
    for step in 0..comptime!(grid.ahead) {
        sum += chunk_sum(own[step], grid);
    }
    sum
}

/// The sum over a row of what its units have summed by [`add_chunks`]. All units of a cube must call this, also those
/// without a row.
#[cube]
pub(super) fn total_sum(lanes: &mut Shared<[f32]>, own: f32, #[comptime] grid: NormGrid) -> f32 {
    let mut sum = own;
    if comptime!(grid.is_plane()) {
        sum += plane_shuffle_xor(sum, 4u32);
        sum += plane_shuffle_xor(sum, 8u32);
        sum += plane_shuffle_xor(sum, 16u32);
    } else {
        sum = row_sum(lanes, sum, comptime!(grid.rows.units));
    }
    sum
}

/// 1 / rms of the row that begins at the vector `first`. All units of a cube must call this, also those without a row.
#[cube]
pub(super) fn reciprocal<F: Float, N: Size>(
    lanes: &mut Shared<[f32]>,
    x: &[Vector<F, N>],
    first: usize,
    is_row: bool,
    n: usize,
    eps: f32,
    #[comptime] grid: NormGrid,
) -> f32 {
    let mut squares = 0.0f32;
    for before in 0..times_of(n, grid) {
        let values = load_row::<F, N>(x, first, before, is_row, n, grid);
        let mut own = step_sums(grid);
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let step = comptime!(grid.step(load));
            own[step] = add_squares::<F, N>(own[step], values[load]);
        }
        squares = add_chunks(squares, &own, grid);
    }
    let sum = total_sum(lanes, squares, grid);
    1.0f32 / (sum / n as f32 + eps).sqrt()
}

/// Numbers of a row times its reciprocal and the norm's weights.
#[cube]
pub(super) fn normed<F: Float, N: Size>(x: Vector<F, N>, w: Vector<F, N>, r: f32, offset: f32) -> Vector<f32, N> {
    let mut y = Vector::<f32, N>::cast_from(0u32);
    #[unroll]
    for e in 0..N::value() {
        y.insert(e, f32::cast_from(x.extract(e)) * r * (f32::cast_from(w.extract(e)) + offset));
    }
    y
}

/// The norm, added to `base` where it `adds`.
#[cube(launch, address_type = "dynamic")]
fn normalise<F: Float, N: Size>(
    base: &[Vector<F, N>],
    x: &[Vector<F, N>],
    w: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    shape: NormShape,
    #[comptime] adds: bool,
    #[comptime] grid: NormGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = row_lanes(comptime!(grid.rows));
    let row = row_index(comptime!(grid.rows));
    let first = row * (shape.n / N::value());
    let is_row = row < shape.rows;
    let r = reciprocal::<F, N>(&mut lanes, x, first, is_row, shape.n, shape.eps, grid);
    for before in 0..times_of(shape.n, grid) {
        let values = load_row::<F, N>(x, first, before, is_row, shape.n, grid);
        let weights = load_row::<F, N>(w, 0usize, before, true, shape.n, grid);
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let column = column_of(before, load, grid);
            if is_row && column < shape.n {
                let i = first + column / N::value();
                let mut value = normed::<F, N>(values[load], weights[load], r, shape.offset);
                if adds {
                    value += Vector::<f32, N>::cast_from(base[i]);
                }
                y[i] = Vector::<F, N>::cast_from(value);
            }
        }
    }
}

/// With r = 1 / rms and ĝ = g · w: dx = r (ĝ − x r² mean(ĝ x)), plus `added` where it `adds`. Also keeps r.
#[cube(launch, address_type = "dynamic")]
fn input_gradient<F: Float, N: Size>(
    x: &[Vector<F, N>],
    w: &[Vector<F, N>],
    g: &[Vector<F, N>],
    added: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    reciprocals: &mut [f32],
    shape: NormShape,
    #[comptime] adds: bool,
    #[comptime] grid: NormGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = row_lanes(comptime!(grid.rows));
    let row = row_index(comptime!(grid.rows));
    let first = row * (shape.n / N::value());
    let is_row = row < shape.rows;
    let mut squares = 0.0f32;
    let mut products = 0.0f32;
    for before in 0..times_of(shape.n, grid) {
        let values = load_row::<F, N>(x, first, before, is_row, shape.n, grid);
        let weights = load_row::<F, N>(w, 0usize, before, true, shape.n, grid);
        let incoming = load_row::<F, N>(g, first, before, is_row, shape.n, grid);
        let mut own = step_sums(grid);
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let step = comptime!(grid.step(load));
            own[step] = add_squares::<F, N>(own[step], values[load]);
            #[unroll]
            for e in 0..N::value() {
                let weight = f32::cast_from(weights[load].extract(e)) + shape.offset;
                let weighted = f32::cast_from(incoming[load].extract(e)) * weight;
                products = fma(weighted, f32::cast_from(values[load].extract(e)), products);
            }
        }
        squares = add_chunks(squares, &own, grid);
    }
    let squares = total_sum(&mut lanes, squares, grid);
    let products = total_sum(&mut lanes, chunk_sum(products, grid), grid);
    let r = 1.0f32 / (squares / shape.n as f32 + shape.eps).sqrt();
    let pull = r * r * products / shape.n as f32;
    for before in 0..times_of(shape.n, grid) {
        let values = load_row::<F, N>(x, first, before, is_row, shape.n, grid);
        let weights = load_row::<F, N>(w, 0usize, before, true, shape.n, grid);
        let incoming = load_row::<F, N>(g, first, before, is_row, shape.n, grid);
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let column = column_of(before, load, grid);
            if is_row && column < shape.n {
                let mut out = Vector::<F, N>::cast_from(0u32);
                #[unroll]
                for e in 0..N::value() {
                    let weight = f32::cast_from(weights[load].extract(e)) + shape.offset;
                    let weighted = f32::cast_from(incoming[load].extract(e)) * weight;
                    let change = r * (weighted - f32::cast_from(values[load].extract(e)) * pull);
                    if adds {
                        let more = added[first + column / N::value()].extract(e);
                        out.insert(e, F::cast_from(change + f32::cast_from(more)));
                    } else {
                        out.insert(e, F::cast_from(change));
                    }
                }
                dx[first + column / N::value()] = out;
            }
        }
    }
    if is_row && UNIT_POS_X == 0 {
        reciprocals[row] = r;
    }
}
