//! Matrix products in `CubeK`'s kernels, with gradients in the memory layout of their matrices. Results have no padding
//! between rows, which Burn's own may have on CUDA, and which the next kernel would copy away.

use super::accumulate::add_to_sums;
use super::gemm::{self, Products};
use super::prelude::*;
use super::{bias, skinny_gemm};
use crate::exact::is_exact;
use crate::gradient_sums;
use crate::operations::products::plain_matmul;
use crate::shapes::Transposed;
use burn::backend::autodiff::NodeId;
use burn::backend::cubecl::dtype_to_storage_type;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy::{SimpleCyclicCmma, SimpleUnit};
use cubek::matmul::multi_level::components::tile::TileMatmulKind::Cmma;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::multi_level::routines::batch::simple_unit::SimpleUnitSelectionArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::matmul::strategy::Strategy;
use cubek_std::InputBinding;
use std::ops::Range;

/// Rows up to which a product is made by planes that divide the inputs, where tiles would have few rows. On an H200
/// that kernel takes 70 µs for 128 rows of 1,536 inputs and 8,960 outputs, and tiles 18 µs for 128 of 896 and 9,728.
pub(super) const MAX_SKINNY_ROWS: usize = 64;

/// Matrices that rows are multiplied with at a time.
const MAX_MATRICES: usize = 4;

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
    match gemm::product(&left, &right) {
        Some(out) => Cube::tensor(out),
        None if is_exact() => Cube::tensor(product_in_order(&left, &right)),
        None => plain_matmul(a.clone(), b.clone(), transposed),
    }
}

/// Returns true if [`add_matmul`] has a kernel for these matrices.
pub(crate) fn adds(a: &Tensor<2>, b: &Tensor<2>, transposed: Transposed, sum: &Tensor<2>) -> bool {
    let known = takes_plain(a, b) && sum.dtype() == DType::F32 && !sum.device().is_autodiff();
    let product = || {
        let (left, right) = operands([a, b], transposed);
        Products::each(&[[&left, &right]]).is_some()
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
    let product = Products::each(&[[&left, &right]]).unwrap_or_else(|| unreachable!("asked before"));
    let [_, columns] = dims(&sum);
    let place = slice_of(&sum, rows.start * columns..rows.end * columns, [rows.len(), columns]);
    product.added_to(vec![Some(place)]);
    Cube::tensor(sum)
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
            let [dw] = matrix_gradients([Some((&gradient, self.leaf))], &x);
            dw
        });
        [wanted[0].then(|| multiply(&gradient, &w)), dw]
    }
}

/// See [`crate::linear_add`].
pub(crate) fn linear_add(base: Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    let kernel = LinearAdd(Linear { leaf: gradient_sums::leaf::<Cube>(w) });
    run(kernel, [base, x.clone(), w.clone()].map(autodiff::input))
}

/// Returns true if the kernels of [`linear_add`] and [`linear_each`] take rows, matrices, and matrices or biases that are
/// added to the products.
pub(crate) fn takes_several<'t>(
    x: &Tensor<2>,
    w: &[&Tensor<2>],
    plus: impl IntoIterator<Item = Option<&'t Tensor<2>>>,
) -> bool {
    let [rows, inner] = x.dims();
    let matrix = |(w, plus): (&&Tensor<2>, Option<&Tensor<2>>)| {
        let [outputs, _] = w.dims();
        let added = plus.is_none_or(|plus| {
            let [height, width] = plus.dims();
            // two numbers are read at a time
            let aligned = opened(plus).handle.offset_start.unwrap_or(0).is_multiple_of(4);
            aligned && plus.dtype() == x.dtype() && width == outputs && (height == rows || height == 1)
        });
        added && takes(x, w) && outputs.is_multiple_of(gemm::CHUNK)
    };
    let plus: Vec<Option<&Tensor<2>>> = plus.into_iter().collect();
    // few rows have a kernel of their own
    let many = is_exact() || rows > MAX_SKINNY_ROWS;
    let many = (1..=MAX_MATRICES).contains(&w.len()) && many && inner.is_multiple_of(gemm::CHUNK);
    let alike = plus.iter().all(|one| one.is_some() == plus[0].is_some());
    many && alike && w.iter().zip(plus).all(matrix) && gemm::takes(&opened(x))
}

/// A tensor off its graph.
fn opened(tensor: &Tensor<2>) -> CubeTensor {
    let tensor = if tensor.device().is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
    Cube::primitive(tensor)
}

/// A product with its addition.
#[derive(Clone, Debug)]
struct LinearAdd(Linear);

impl Kernel<Cube, 3> for LinearAdd {
    const NAME: &str = "product";
    type Saved = <Linear as Kernel<Cube, 2>>::Saved;

    fn forward(&self, [base, x, w]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let out = times_transposed_plus(&x, std::slice::from_ref(&w), &[&base]).remove(0);
        (out, (self.0.leaf.map(|_| x), w))
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let d_base = wanted[0].then(|| gradient.clone());
        let [dx, dw] = self.0.backward(saved, gradient, [wanted[1], wanted[2]]);
        [d_base, dx, dw]
    }
}

/// See [`crate::linear_each`].
pub(crate) fn linear_each<const N: usize>(
    x: &Tensor<2>,
    w: [&Tensor<2>; N],
    biases: [Option<&Tensor<2>>; N],
) -> [Tensor<2>; N] {
    let kernel = LinearEach {
        leaves: w.map(gradient_sums::leaf::<Cube>),
        biases: biases.map(|bias| bias.and_then(gradient_sums::leaf::<Cube>)),
    };
    let tensors = std::iter::once(x).chain(w).chain(biases.into_iter().flatten());
    let inputs: Vec<_> = tensors.map(|t| autodiff::input(t.clone())).collect();
    match inputs.len() {
        2 => kernel.run::<2>(inputs),
        3 => kernel.run::<3>(inputs),
        4 => kernel.run::<4>(inputs),
        5 => kernel.run::<5>(inputs),
        7 => kernel.run::<7>(inputs),
        9 => kernel.run::<9>(inputs),
        _ => unreachable!("up to {MAX_MATRICES} matrices"),
    }
}

/// Products of the same rows with several matrices, and a bias for each or for none.
#[derive(Clone, Debug)]
struct LinearEach<const N: usize> {
    /// The matrices that get a gradient: without any nothing of `x` is kept.
    leaves: [Option<NodeId>; N],
    /// The biases that get one.
    biases: [Option<NodeId>; N],
}

impl<const N: usize> LinearEach<N> {
    fn run<const I: usize>(self, inputs: Vec<Input<Cube>>) -> [Tensor<2>; N] {
        let inputs: [Input<Cube>; I] = inputs.try_into().unwrap_or_else(|_| unreachable!("counted before"));
        run_several(self, inputs)
    }
}

/// Inputs are the rows, all matrices, and all biases if there are any.
impl<const I: usize, const N: usize> KernelOfSeveral<Cube, I, N> for LinearEach<N> {
    const NAME: &str = "product";
    type Saved = (Option<CubeTensor>, Vec<CubeTensor>);

    fn forward(&self, inputs: [CubeTensor; I]) -> ([CubeTensor; N], Self::Saved) {
        let (x, others) = inputs.split_first().unwrap_or_else(|| unreachable!("the rows are the first"));
        let (w, biases) = others.split_at(N);
        let out = times_transposed_plus(x, w, &biases.iter().collect::<Vec<_>>());
        let out = out.try_into().unwrap_or_else(|_| unreachable!("one each"));
        let any = self.leaves.iter().any(Option::is_some);
        (out, (any.then(|| x.clone()), w.to_vec()))
    }

    fn backward(
        &self,
        (x, w): Self::Saved,
        gradients: [Option<CubeTensor>; N],
        wanted: [bool; I],
    ) -> [Option<CubeTensor>; I] {
        let mut of_inputs = [const { None }; I];
        assert!(
            x.is_some() || !wanted[1..=N].contains(&true),
            "matrices of kernels::linear_each must be leaves or constants"
        );
        if wanted[0] {
            let pairs: Vec<_> = gradients.iter().zip(&w).filter_map(|(g, w)| Some([g.as_ref()?, w])).collect();
            let sum = Products::sum(&pairs).unwrap_or_else(|| unreachable!("asked before"));
            of_inputs[0] = Some(sum.rounded().remove(0));
        }
        let places: [usize; N] = std::array::from_fn(|index| index);
        if let Some(x) = x {
            let of_matrices = places.map(|i| Some((gradients[i].as_ref().filter(|_| wanted[1 + i])?, self.leaves[i])));
            for (place, dw) in of_inputs[1..=N].iter_mut().zip(matrix_gradients(of_matrices, &x)) {
                *place = dw;
            }
        }
        let wanted_bias = |i: usize| wanted.get(1 + N + i).is_some_and(|wanted| *wanted);
        let of_biases = places.map(|i| Some((gradients[i].as_ref().filter(|_| wanted_bias(i))?, self.biases[i])));
        for (place, db) in of_inputs[1 + N..].iter_mut().zip(bias::sums_of_rows(of_biases)) {
            *place = db;
        }
        of_inputs
    }
}

/// `x · Wᵀ` with each matrix plus a matrix or a bias for each, if there are any, of tensors that [`takes_several`] takes.
fn times_transposed_plus(x: &CubeTensor, w: &[CubeTensor], plus: &[&CubeTensor]) -> Vec<CubeTensor> {
    let transposed: Vec<CubeTensor> = w.iter().map(|w| swapped(w.clone())).collect();
    let pairs: Vec<[&CubeTensor; 2]> = transposed.iter().map(|w| [x, w]).collect();
    Products::each(&pairs).unwrap_or_else(|| unreachable!("asked before")).rounded_plus(plus)
}

/// Gradients of the matrices of products with `x`, given those of the products and the leaves that the matrices are;
/// `None` where there is none, and where a backward pass adds it to the sum of the leaf's gradients.
fn matrix_gradients<const N: usize>(
    gradients: [Option<(&CubeTensor, Option<NodeId>)>; N],
    x: &CubeTensor,
) -> [Option<CubeTensor>; N] {
    let transposed = gradients.map(|one| one.map(|(gradient, leaf)| (swapped(gradient.clone()), leaf)));
    let pairs: Vec<[&CubeTensor; 2]> = transposed.iter().flatten().map(|(gradient, _)| [gradient, x]).collect();
    let leaves: Option<Vec<NodeId>> = transposed.iter().flatten().map(|(_, leaf)| *leaf).collect();
    let products = if pairs.is_empty() { None } else { Products::each(&pairs) };
    let added = products.zip(leaves).is_some_and(|(products, leaves)| {
        let add = |sums| products.added_to(sums);
        add_to_sums(&leaves, add)
    });
    if added {
        return [const { None }; N];
    }
    transposed.map(|one| one.map(|(gradient, _)| multiply(&gradient, x)))
}

/// `x · Wᵀ`.
pub(super) fn times_transposed(x: &CubeTensor, w: &CubeTensor) -> CubeTensor {
    let [rows, _] = dims(x);
    let many = (is_exact() || rows > MAX_SKINNY_ROWS).then(|| gemm::product(x, &swapped(w.clone())));
    if let Some(out) = many.flatten() {
        return out;
    }
    if is_exact() {
        return product_in_order(x, &swapped(w.clone()));
    }
    // CubeK's kernels read rows with padding between them as they are
    let contiguous = x.is_contiguous() && w.is_contiguous();
    let few = contiguous.then(|| skinny_gemm::product(x, w)).flatten();
    few.unwrap_or_else(|| multiply(x, &swapped(w.clone())))
}

/// `a · b` for exact forward passes where [`gemm`] does not take the matrices, by units that add the products of one input
/// after the other: other matmuls of a library choose orders of sums by the number of rows.
fn product_in_order(a: &CubeTensor, b: &CubeTensor) -> CubeTensor {
    let ([m, k], [_, n]) = (dims(a), dims(b));
    let out = empty(a, [m, n], a.dtype);
    if let Err(why) = launched(&SimpleUnit(Inferred(SimpleUnitSelectionArgs::default())).into(), [a, b], &out) {
        panic!("a matmul of {m} × {k} × {n} cannot be launched: {why}");
    }
    out
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
