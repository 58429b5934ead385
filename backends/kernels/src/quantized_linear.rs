//! Products with frozen matrices in few bits. Of few rows a kernel may widen a matrix as it multiplies; else it is
//! widened as a whole, in the backward pass again, for a product in tensor operations.

use super::autodiff::{Kernel, KernelBackend, input, run};
use super::operations::products::{dequantize, matmul, quantized_matmul};
use super::shapes::Transposed;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use firebrick_spec::QuantizedLayout;
use std::fmt::Debug;

/// Matrices in few bits, all of one shape.
#[derive(Clone, Debug)]
pub(super) struct Matrices {
    /// Their buffers, `[matrices, words]`.
    pub words: Tensor<2>,
    pub layout: QuantizedLayout,
}

impl Matrices {
    /// The words of one of them.
    fn words_of(&self, index: usize) -> Tensor<2> {
        self.words.clone().narrow(0, index, 1)
    }

    /// `x · Wᵀ` with one of them.
    pub fn product(&self, index: usize, x: &Tensor<2>) -> Tensor<2> {
        quantized_matmul(x, &self.words_of(index), self.layout.one())
    }

    /// `g · W` with one of them.
    pub fn gradient(&self, index: usize, g: &Tensor<2>) -> Tensor<2> {
        matmul(g, &dequantize(&self.words_of(index), self.layout.one(), g.dtype()), Transposed::Neither)
    }
}

/// Assignment of rows to matrices.
pub(super) trait Rows: Clone + Debug + Send + 'static {
    /// The product's name in recordings of [`firebrick_device::trace`].
    const NAME: &'static str;

    /// `x · Wᵀ`
    fn product(&self, x: Tensor<2>, matrices: &Matrices) -> Tensor<2>;

    /// `g · W`
    fn gradient(&self, g: Tensor<2>, matrices: &Matrices) -> Tensor<2>;
}

/// All rows go with one matrix.
#[derive(Clone, Debug)]
struct All;

impl Rows for All {
    const NAME: &'static str = "product";

    fn product(&self, x: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        matrices.product(0, &x)
    }

    fn gradient(&self, g: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        matrices.gradient(0, &g)
    }
}

/// See [`crate::quantized_linear`].
pub(super) fn linear<B: KernelBackend>(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
    multiply::<B>(x, Matrices { words: words.clone(), layout }, All)
}

/// A product of rows with their matrices.
pub(super) fn multiply<B: KernelBackend>(x: &Tensor<2>, matrices: Matrices, rows: impl Rows) -> Tensor<2> {
    run::<B, 1, 2, _>(Product { matrices, rows }, [input(x.clone())])
}

#[derive(Clone, Debug)]
struct Product<R> {
    matrices: Matrices,
    rows: R,
}

impl<B: KernelBackend, R: Rows> Kernel<B, 1> for Product<R> {
    const NAME: &str = R::NAME;
    type Saved = ();

    fn forward(&self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, ()) {
        let y = self.rows.product(B::tensor(x), &self.matrices);
        (B::primitive(y), ())
    }

    fn backward(&self, (): (), gradient: FloatTensor<B>, wanted: [bool; 1]) -> [Option<FloatTensor<B>>; 1] {
        let back = || B::primitive(self.rows.gradient(B::tensor(gradient), &self.matrices));
        [wanted[0].then(back)]
    }
}
