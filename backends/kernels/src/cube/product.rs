//! Matrix products in `CubeK`'s kernels, with gradients in the memory layout of their matrices. Results have no padding
//! between rows, which Burn's own may have on CUDA, and which the next kernel would copy away.

use super::prelude::*;
use super::{gemm, skinny_gemm};
use crate::gradient_sums;
use crate::operations::products::plain_matmul;
use crate::shapes::Transposed;
use burn::backend::autodiff::NodeId;
use burn::backend::cubecl::dtype_to_storage_type;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy::SimpleCyclicCmma;
use cubek::matmul::multi_level::components::tile::TileMatmulKind::Cmma;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::matmul::strategy::Strategy;
use cubek_std::InputBinding;
use std::ops::Range;

/// Rows up to which a product is made by planes that divide the inputs, where tiles would have few rows. On an H200
/// that kernel takes 70 µs for 128 rows of 1,536 inputs and 8,960 outputs, and tiles 18 µs for 128 of 896 and 9,728.
pub(super) const MAX_SKINNY_ROWS: usize = 64;

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

/// See [`crate::linear_parts`].
pub(crate) fn linear_parts(x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    if !takes_plain(x, w) || x.dims()[0] <= MAX_SKINNY_ROWS {
        return None;
    }
    let [x, w] = [x, w].map(|t| Cube::primitive(t.clone()));
    let ([rows, inner], [outputs, _]) = (dims(&x), dims(&w));
    let _span = span("product", 2.0 * (rows * inner * outputs) as f64);
    gemm::parts_of_product(&x, &swapped(w)).map(Cube::tensor)
}

/// See [`crate::matmul`]: on NVIDIA's tensor cores; elsewhere Burn's.
pub(crate) fn matmul(a: &Tensor<2>, b: &Tensor<2>, transposed: Transposed) -> Tensor<2> {
    let (left, right) = operands([a, b], transposed);
    gemm::product(&left, &right).map_or_else(|| plain_matmul(a.clone(), b.clone(), transposed), Cube::tensor)
}

/// Returns true if [`add_matmul`] has a kernel for these matrices.
pub(crate) fn adds(a: &Tensor<2>, b: &Tensor<2>, transposed: Transposed, sum: &Tensor<2>) -> bool {
    let known = takes_plain(a, b) && sum.dtype() == DType::F32 && !sum.device().is_autodiff();
    let product = || {
        let (left, right) = operands([a, b], transposed);
        gemm::Product::of(&left, &right).is_some()
    };
    known && product()
}

/// See [`crate::add_matmul`].
pub(crate) fn add_matmul(
    a: &Tensor<2>,
    b: &Tensor<2>,
    transposed: Transposed,
    sum: Tensor<2>,
    rows: Range<usize>,
) -> Tensor<2> {
    let (left, right) = operands([a, b], transposed);
    let sum = into_writable(detached(sum));
    let product = gemm::Product::of(&left, &right).unwrap_or_else(|| unreachable!("asked before"));
    product.added_to(Some(rows_of(&sum, rows)));
    Cube::tensor(sum)
}

/// Rows of a contiguous matrix in the same memory.
fn rows_of(matrix: &CubeTensor, rows: Range<usize>) -> CubeTensor {
    let [all, columns] = dims(matrix);
    let bytes = |rows: usize| (rows * columns * matrix.elem_size()) as u64;
    let handle = matrix.handle.clone().offset_start(bytes(rows.start)).offset_end(bytes(all - rows.end));
    let shape = [rows.len(), columns].into();
    CubeTensor::new_contiguous(matrix.client.clone(), matrix.device.clone(), shape, handle, matrix.dtype)
}

/// Two matrices of which one may be transposed.
fn operands(matrices: [&Tensor<2>; 2], transposed: Transposed) -> (CubeTensor, CubeTensor) {
    let [left, right] = matrices.map(|t| Cube::primitive(t.clone()));
    match transposed {
        Transposed::Neither => (left, right),
        Transposed::Left => (swapped(left), right),
        Transposed::Right => (left, swapped(right)),
    }
}

/// See [`crate::linear`].
pub(crate) fn linear(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    run(Linear { leaf: gradient_sums::leaf::<Cube>(w) }, [x, w].map(|t| autodiff::input(t.clone())))
}

#[derive(Clone, Debug)]
struct Linear {
    /// The matrix, if it gets a gradient: otherwise nothing of `x` is kept.
    leaf: Option<NodeId>,
}

impl Kernel<Cube, 2> for Linear {
    const NAME: &str = "product";
    type Saved = (Option<CubeTensor>, CubeTensor);

    fn forward(&self, [x, w]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let out = times_transposed(&x, &w);
        (out, (self.leaf.map(|_| x), w))
    }

    fn backward(&self, (x, w): Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        // a weight that is neither leaf nor constant would silently lose its gradient
        assert!(x.is_some() || !wanted[1], "the matrix of kernels::linear must be a leaf or a constant");
        let dw = x.filter(|_| wanted[1]).and_then(|x| {
            let gradient = swapped(gradient.clone());
            let product = gemm::Product::of(&gradient, &x);
            let added = product.zip(self.leaf).is_some_and(|(product, leaf)| {
                gradient_sums::add(leaf, |sum| {
                    let sum = sum.map(|sum| into_writable(detached(sum)));
                    Cube::tensor(product.added_to(sum))
                })
            });
            (!added).then(|| multiply(&gradient, &x))
        });
        [wanted[0].then(|| multiply(&gradient, &w)), dw]
    }
}

/// `x · Wᵀ`.
pub(super) fn times_transposed(x: &CubeTensor, w: &CubeTensor) -> CubeTensor {
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
pub(super) fn swapped(mut matrix: CubeTensor) -> CubeTensor {
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
