//! Products with frozen matrices in few bits. Of few rows a kernel may widen a matrix as it multiplies; else it is
//! widened as a whole, in the backward pass again, for a product in tensor operations.

use super::autodiff::{Kernel, KernelBackend, input, run};
use super::products::Products;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_device::quantized::widened;
use firebrick_device::transfer::HostTensor;
use firebrick_spec::QuantizedLayout;
use std::fmt::Debug;
use std::marker::PhantomData;

/// Widens a matrix to a float type; see [`crate::dequantize`].
pub(super) type Widen = fn(&Tensor<2>, QuantizedLayout, DType) -> Tensor<2>;

/// Multiplies few rows with a matrix that it widens on the way; nothing where it does not.
pub(super) type Fused = fn(&Tensor<2>, &Tensor<2>, QuantizedLayout) -> Option<Tensor<2>>;

/// Matrices in few bits, all of one shape.
#[derive(Clone, Debug)]
pub(super) struct Matrices {
    /// Their buffers, `[matrices, words]`.
    pub words: Tensor<2>,
    pub layout: QuantizedLayout,
    pub widen: Widen,
    pub fused: Fused,
    pub products: Products,
}

impl Matrices {
    /// The words of one of them.
    fn words_of(&self, index: usize) -> Tensor<2> {
        self.words.clone().narrow(0, index, 1)
    }

    /// `x · Wᵀ` with one of them.
    pub fn product(&self, index: usize, x: &Tensor<2>) -> Tensor<2> {
        let (words, layout) = (self.words_of(index), self.layout.one());
        (self.fused)(x, &words, layout).unwrap_or_else(|| {
            let wide = (self.widen)(&words, layout, x.dtype());
            self.products.matmul_nt(x, &wide)
        })
    }

    /// `g · W` with one of them.
    pub fn gradient(&self, index: usize, g: &Tensor<2>) -> Tensor<2> {
        let wide = (self.widen)(&self.words_of(index), self.layout.one(), g.dtype());
        self.products.matmul(g, &wide)
    }
}

/// Which rows go with which matrix.
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
pub(super) fn linear<B: KernelBackend>(x: &Tensor<2>, matrices: Matrices) -> Tensor<2> {
    multiply::<B>(x, matrices, All)
}

/// A product of rows with their matrices.
pub(super) fn multiply<B: KernelBackend>(x: &Tensor<2>, matrices: Matrices, rows: impl Rows) -> Tensor<2> {
    let backend = PhantomData::<B>;
    let product = Product { matrices, rows, backend };
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

    fn backward(&self, (): (), gradient: FloatTensor<B>, wanted: [bool; 1]) -> [Option<FloatTensor<B>>; 1] {
        let back = || B::primitive(self.rows.gradient(B::tensor(gradient), &self.matrices));
        [wanted[0].then(back)]
    }
}

/// A matrix widened by the host: on the CPU, and on other devices only while kernels are
/// [off](crate::set_enabled).
pub(super) fn through_the_host(words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
    let device = words.device();
    // where the device lost the words, what follows from the matrix is lost too and is reported where a phase reads its
    // results
    let values = match HostTensor::download(words.clone()) {
        Ok(host) => widened(host.words(), layout),
        Err(_) => vec![f32::NAN; layout.numbers()],
    };
    let data = TensorData::new(values, [layout.rows, layout.cols]).convert_dtype(dtype);
    Tensor::from_data(data, (&device, dtype))
}
