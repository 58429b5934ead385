//! Matrix products in `CubeK`'s kernels, with gradients in the memory layout of their matrices. Results have no padding
//! between rows, which Burn's own may have on CUDA, and which the next kernel would copy away.

use super::prelude::*;
use super::{gemm, skinny_gemm};
use crate::operations::products::plain_matmul;
use crate::shapes::Transposed;
use burn::backend::cubecl::dtype_to_storage_type;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy::SimpleCyclicCmma;
use cubek::matmul::multi_level::components::tile::TileMatmulKind::Cmma;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::matmul::strategy::Strategy;
use cubek_std::InputBinding;

/// Rows up to which a product is made by planes that divide the inputs, where tiles would have few rows. On an H200
/// that kernel takes 70 µs for 128 rows of 1,536 inputs and 8,960 outputs, and tiles 18 µs for 128 of 896 and 9,728.
const MAX_SKINNY_ROWS: usize = 64;

/// Rows from which a plane of tensor cores computes several rows of tiles: up to 4.7 times as fast on an H200 and never
/// slower, while with 64 rows it takes 1.7 times as long (`--bench products`).
const MANY_ROWS: usize = 512;

/// Returns true if the kernels take two matrices.
pub(crate) fn takes(x: &Tensor<2>, w: &Tensor<2>) -> bool {
    let dtype = x.dtype();
    let known = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let empty = x.shape().num_elements() == 0 || w.shape().num_elements() == 0;
    enabled_on(&x.device()) && known && !empty && w.dtype() == dtype
}

/// [`takes`], without autodiff.
pub(crate) fn takes_plain(x: &Tensor<2>, w: &Tensor<2>) -> bool {
    takes(x, w) && !x.device().is_autodiff() && !w.device().is_autodiff()
}

/// See [`crate::linear_unpadded`].
pub(crate) fn linear_unpadded(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    let [x, w] = [x, w].map(|t| Cube::primitive(t.clone()));
    let ([rows, inner], [outputs, _]) = (dims(&x), dims(&w));
    let _span = span("product", 2.0 * (rows * inner * outputs) as f64);
    Cube::tensor(times_transposed(&x, &w))
}

/// See [`crate::matmul`]: on NVIDIA's tensor cores; elsewhere Burn's.
pub(crate) fn matmul(a: &Tensor<2>, b: &Tensor<2>, transposed: Transposed) -> Tensor<2> {
    let [left, right] = [a, b].map(|t| Cube::primitive(t.clone()));
    let product = match transposed {
        Transposed::Neither => gemm::product(&left, &right),
        Transposed::Left => gemm::product(&swapped(left), &right),
        Transposed::Right => gemm::product(&left, &swapped(right)),
    };
    product.map_or_else(|| plain_matmul(a.clone(), b.clone(), transposed), Cube::tensor)
}

/// See [`crate::linear`].
pub(crate) fn linear(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    run(Linear { trains: w.is_require_grad() }, [x, w].map(|t| autodiff::input(t.clone())))
}

#[derive(Clone, Debug)]
struct Linear {
    /// True if the matrix gets a gradient: otherwise nothing of `x` is kept.
    trains: bool,
}

impl Kernel<Cube, 2> for Linear {
    const NAME: &str = "product";
    type Saved = (Option<CubeTensor>, CubeTensor);

    fn forward(&self, [x, w]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let out = times_transposed(&x, &w);
        (out, (self.trains.then_some(x), w))
    }

    fn backward(&self, (x, w): Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        // a weight that is neither leaf nor constant would silently lose its gradient
        assert!(x.is_some() || !wanted[1], "the matrix of kernels::linear must be a leaf or a constant");
        let dw = x.filter(|_| wanted[1]);
        let dw = dw.map(|x| multiply(&swapped(gradient.clone()), &x));
        [wanted[0].then(|| multiply(&gradient, &w)), dw]
    }
}

/// `x · Wᵀ`.
fn times_transposed(x: &CubeTensor, w: &CubeTensor) -> CubeTensor {
    let [rows, _] = dims(x);
    let many = (rows > MAX_SKINNY_ROWS).then(|| gemm::product(x, &swapped(w.clone())));
    if let Some(out) = many.flatten() {
        return out;
    }
    // CubeK's kernels read rows with padding between them as they are
    let contiguous = x.is_contiguous() && w.is_contiguous();
    let few = contiguous.then(|| skinny_gemm::product(x, w)).flatten();
    few.unwrap_or_else(|| multiply(x, &swapped(w.clone())))
}

/// A matrix the other way round, in the same memory.
fn swapped(mut matrix: CubeTensor) -> CubeTensor {
    matrix.meta.swap(0, 1);
    matrix
}

/// `a · b` of matrices of one type, summed in f32.
fn multiply(a: &CubeTensor, b: &CubeTensor) -> CubeTensor {
    if let Some(out) = gemm::product(a, b) {
        return out;
    }
    let ([m, k], [_, n]) = (a.shape().dims(), b.shape().dims());
    let out = empty(a, [m, n], a.dtype);
    let many = SimpleCyclicCmma(Inferred(SimpleArgs { multi_rows: true, tile_matmul: Cmma }));
    // a device without tensor cores for these types refuses the first
    let many_rows = m >= MANY_ROWS && a.dtype != DType::F32;
    let done = many_rows && launched(&many.into(), [a, b], &out).is_ok();
    if !done && let Err(why) = launched(&Strategy::Auto, [a, b], &out) {
        panic!("a matmul of {m} × {k} × {n} cannot be launched: {why}");
    }
    out
}

fn launched(way: &Strategy, [a, b]: [&CubeTensor; 2], out: &CubeTensor) -> Result<(), String> {
    let elem = dtype_to_storage_type(out.dtype);
    let mut types = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem, rhs: elem, out: elem });
    let [a, b] = [a, b].map(|t| InputBinding::new(t.clone().binding(), elem));
    launch_ref(way, &out.client, a, b, out.clone().binding(), &mut types).map_err(|why| format!("{why:?}"))
}
