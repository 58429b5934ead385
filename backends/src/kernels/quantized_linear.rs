//! Products with frozen matrices in few bits, in tensor operations: a matrix is widened as a whole, in the backward pass again.

use super::autodiff::{Kernel, KernelBackend, input, run};
use crate::quantized::widened;
use crate::transfer::HostTensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_spec::QuantizedLayout;
use std::fmt::Debug;
use std::marker::PhantomData;

/// Widens a matrix to a float type; see [`crate::kernels::dequantize`].
pub(super) type Widen = fn(&Tensor<2>, QuantizedLayout, DType) -> Tensor<2>;

/// Matrices in few bits, all of one shape.
#[derive(Clone, Debug)]
pub(super) struct Matrices {
    /// Their buffers, `[matrices, words]`.
    pub words: Tensor<2>,
    pub layout: QuantizedLayout,
    pub widen: Widen,
}

impl Matrices {
    /// One of them, widened.
    pub fn wide(&self, index: usize, dtype: DType) -> Tensor<2> {
        let words = self.words.clone().narrow(0, index, 1);
        (self.widen)(&words, self.layout.one(), dtype)
    }
}

/// Which rows go with which matrix.
pub(super) trait Rows: Clone + Debug + Send + 'static {
    /// The product's name in recordings of [`crate::trace`].
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
        let wide = matrices.wide(0, x.dtype());
        x.matmul(wide.transpose())
    }

    fn gradient(&self, g: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        let wide = matrices.wide(0, g.dtype());
        g.matmul(wide)
    }
}

/// See [`crate::kernels::quantized_linear`].
pub(super) fn linear<B: KernelBackend>(x: &Tensor<2>, matrices: Matrices) -> Tensor<2> {
    multiply::<B>(x, matrices, All)
}

/// A product of rows with their matrices.
pub(super) fn multiply<B: KernelBackend>(
    x: &Tensor<2>,
    matrices: Matrices,
    rows: impl Rows,
) -> Tensor<2> {
    let backend = PhantomData::<B>;
    let product = Product {
        matrices,
        rows,
        backend,
    };
    run(product, [input(x.clone())])
}

#[derive(Clone, Debug)]
struct Product<B, R> {
    matrices: Matrices,
    rows: R,
    backend: PhantomData<B>,
}

impl<B: KernelBackend, R: Rows> Kernel<B, 1> for Product<B, R> {
    const NAME: &str = R::NAME;
    type Saved = ();

    fn forward(&self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, ()) {
        let y = self.rows.product(B::tensor(x), &self.matrices);
        (B::primitive(y), ())
    }

    fn backward(
        &self,
        (): (),
        gradient: FloatTensor<B>,
        wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let back = || B::primitive(self.rows.gradient(B::tensor(gradient), &self.matrices));
        [wanted[0].then(back)]
    }
}

/// A matrix widened by the host: on the CPU, and on other devices only while kernels are [off](crate::kernels::set_enabled).
pub(super) fn through_the_host(
    words: &Tensor<2>,
    layout: QuantizedLayout,
    dtype: DType,
) -> Tensor<2> {
    let device = words.device();
    // where the device lost the words, what follows from the matrix is lost too and is reported where a phase reads its results
    let values = match HostTensor::download(words.clone()) {
        Ok(host) => widened(host.words(), layout),
        Err(_) => vec![f32::NAN; layout.numbers()],
    };
    let data = TensorData::new(values, [layout.rows, layout.cols]).convert_dtype(dtype);
    Tensor::from_data(data, (&device, dtype))
}
