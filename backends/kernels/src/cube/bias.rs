//! A bias added to every row. Burn's own gradient of it sums all rows of a column in one plane: 0.24 ms for 4,096 rows
//! of 128 columns on an H200.

use super::column_sums::{Term, X, column_sums};
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
        let [rows, n] = dims(&gradient);
        let sums = || {
            let (terms, dtype) = (GradientLaunch::new(buffer(&gradient)), gradient.dtype);
            column_sums::<Gradient<X>>(
                &gradient,
                terms,
                [elem(&gradient); 2],
                [rows, n],
                BLOCK,
                ([1, n], dtype),
                self.leaf,
            )
        };
        let sums = if wanted[1] { sums() } else { None };
        [wanted[0].then_some(gradient), sums]
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
