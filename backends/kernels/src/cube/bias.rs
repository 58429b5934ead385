//! A bias added to every row. Burn's own gradient of it sums all rows of a column in one plane: 0.24 ms for 4,096 rows
//! of 128 columns on an H200.

use super::accumulate::add_to_sums;
use super::column_sums::{Term, X, block_sums_of, column_sums};
use super::norm::BLOCK;
use super::prelude::*;
use crate::gradient_sums;
use burn::backend::autodiff::NodeId;

/// Returns true if the kernel takes these tensors.
pub(crate) fn takes(y: &Tensor<2>, bias: &Tensor<2>) -> bool {
    let alike = bias.dims() == [1, y.dims()[1]] && bias.dtype() == y.dtype();
    alike && supports(Operation::Norm, y) && y.shape().num_elements() > 0
}

/// See [`crate::add_bias`].
pub(crate) fn add_bias(y: Tensor<2>, bias: &Tensor<2>) -> Tensor<2> {
    run(AddBias { leaf: gradient_sums::leaf::<Cube>(bias) }, [autodiff::input(y), autodiff::input(bias.clone())])
}

#[derive(Clone, Debug)]
struct AddBias {
    /// The bias, if it gets a gradient.
    leaf: Option<NodeId>,
}

impl Kernel<Cube, 2> for AddBias {
    const NAME: &str = "bias";
    type Saved = ();

    fn forward(&self, [y, bias]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let [rows, n] = dims(&y);
        let (out, in_place) = reuse_or_alloc(&y);
        let grid = Grid::elements([&y], rows * n);
        launch!(add, grid, [y, bias, output_arg(&out, in_place, 0)], rows * n, n, elem(&out));
        (out, ())
    }

    fn backward(&self, (): Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let sums = if wanted[1] { sum_of_rows(&gradient, self.leaf) } else { None };
        [wanted[0].then_some(gradient), sums]
    }
}

/// A bias's gradient, `[1, n]`, given that of rows `[rows, n]`; `None` where a backward pass adds it to the sum of the
/// leaf's gradients.
pub(super) fn sum_of_rows(gradient: &CubeTensor, leaf: Option<NodeId>) -> Option<CubeTensor> {
    let ([rows, n], terms) = (dims(gradient), GradientLaunch::new(buffer(gradient)));
    let of = ([1, n], gradient.dtype);
    column_sums::<Gradient<X>>(gradient, terms, [elem(gradient); 2], [rows, n], BLOCK, of, leaf)
}

/// [`sum_of_rows`] of several biases: of three, as queries, keys and values have them, in two launches.
pub(super) fn sums_of_rows<const N: usize>(
    gradients: [Option<(&CubeTensor, Option<NodeId>)>; N],
) -> [Option<CubeTensor>; N] {
    if let [Some(a), Some(b), Some(c)] = &gradients[..] {
        let three = [*a, *b, *c];
        let leaves: Option<Vec<NodeId>> = three.iter().map(|(_, leaf)| *leaf).collect();
        let add = |sums| add_three(three.map(|(gradient, _)| gradient), sums);
        if leaves.is_some_and(|leaves| add_to_sums(&leaves, add)) {
            return [const { None }; N];
        }
    }
    gradients.map(|one| one.and_then(|(gradient, leaf)| sum_of_rows(gradient, leaf)))
}

/// Sums of the rows of three gradients, in f32, added to sums or new where there are none yet.
fn add_three(gradients: [&CubeTensor; 3], sums: Vec<Option<CubeTensor>>) -> Vec<CubeTensor> {
    let ([rows, _], widths) = (dims(gradients[0]), gradients.map(|gradient| dims::<2>(gradient)[1]));
    let like = gradients[0];
    let [a, b, c] = gradients.map(buffer);
    let [a_width, b_width, c_width] = widths;
    let all: usize = widths.iter().sum();
    let terms = GradientsLaunch::new(a, b, c, a_width, b_width, c_width);
    let partial = block_sums_of::<Gradients<X>>(like, terms, [elem(like); 2], [rows, all], BLOCK);
    let added: Vec<bool> = sums.iter().map(Option::is_some).collect();
    let new = |(sum, width): (Option<CubeTensor>, _)| sum.unwrap_or_else(|| empty(like, [1, width], DType::F32));
    let sums: Vec<CubeTensor> = sums.into_iter().zip(widths).map(new).collect();
    let (grid, blocks, adds) =
        (Grid::elements([&partial], all), dims::<2>(&partial)[0], [added[0], added[1], added[2]]);
    let buffers = [&sums[0], &sums[1], &sums[2]];
    let [x, y, z] = buffers;
    launch!(sum_three, grid, [&partial, x, y, z], blocks, a_width, b_width, c_width, adds);
    sums
}

/// Sums of the columns of `[a | b | c]` by blocks of rows, added up over the blocks.
#[cube(launch, address_type = "dynamic")]
fn sum_three(
    partial: &[f32],
    a: &mut [f32],
    b: &mut [f32],
    c: &mut [f32],
    blocks: usize,
    a_width: usize,
    b_width: usize,
    c_width: usize,
    #[comptime] adds: [bool; 3],
) {
    let (column, all) = (ABSOLUTE_POS, a_width + b_width + c_width);
    if column < all {
        let mut sum = 0.0f32;
        for block in 0..blocks {
            sum += partial[block * all + column];
        }
        if column < a_width {
            put(a, column, sum, comptime!(adds[0]));
        } else if column < a_width + b_width {
            put(b, column - a_width, sum, comptime!(adds[1]));
        } else {
            put(c, column - a_width - b_width, sum, comptime!(adds[2]));
        }
    }
}

#[cube]
fn put(to: &mut [f32], i: usize, sum: f32, #[comptime] adds: bool) {
    if adds {
        to[i] += sum;
    } else {
        to[i] = sum;
    }
}

/// The rows of three biases' gradients, side by side.
#[derive(CubeType, CubeLaunch)]
struct Gradients<F: Float> {
    a: Box<[F]>,
    b: Box<[F]>,
    c: Box<[F]>,
    a_width: usize,
    b_width: usize,
    c_width: usize,
}

#[cube]
impl<F: Float> Term for Gradients<F> {
    fn at(this: &Self, i: usize, row: usize) -> f32 {
        let (ab, all) = (this.a_width + this.b_width, this.a_width + this.b_width + this.c_width);
        let column = i - row * all;
        let mut term = 0.0f32;
        if column < this.a_width {
            term += f32::cast_from(this.a[row * this.a_width + column]);
        } else if column < ab {
            term += f32::cast_from(this.b[row * this.b_width + column - this.a_width]);
        } else {
            term += f32::cast_from(this.c[row * this.c_width + column - ab]);
        }
        term
    }
}

/// The rows of a bias's gradient.
#[derive(CubeType, CubeLaunch)]
struct Gradient<F: Float> {
    g: Box<[F]>,
}

#[cube]
impl<F: Float> Term for Gradient<F> {
    fn at(this: &Self, i: usize, _row: usize) -> f32 {
        f32::cast_from(this.g[i])
    }
}

#[cube(launch, address_type = "dynamic")]
fn add<F: Float>(y: &[F], bias: &[F], out: &mut [F], length: usize, n: usize, #[define(F)] _dtype: ElemType) {
    let i = ABSOLUTE_POS;
    if i < length {
        out[i] = F::cast_from(f32::cast_from(y[i]) + f32::cast_from(bias[i % n]));
    }
}
