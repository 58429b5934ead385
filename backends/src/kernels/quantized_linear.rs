//! Products with frozen matrices in few bits, in tensor operations: the matrix is widened as a whole, in the backward pass again.

use super::autodiff::{Kernel, KernelBackend, input, run};
use crate::quantized::widened;
use crate::transfer::HostTensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_spec::QuantizedLayout;
use std::marker::PhantomData;

/// Widens a matrix to a float type; see [`crate::kernels::dequantize`].
pub(super) type Widen = fn(&Tensor<2>, QuantizedLayout, DType) -> Tensor<2>;

/// See [`crate::kernels::quantized_linear`].
pub(super) fn linear<B: KernelBackend>(
    x: &Tensor<2>,
    words: &Tensor<2>,
    layout: QuantizedLayout,
    widen: Widen,
) -> Tensor<2> {
    let product = Product::<B> {
        words: words.clone(),
        layout,
        widen,
        backend: PhantomData,
    };
    run(product, [input(x.clone())])
}

#[derive(Clone, Debug)]
struct Product<B> {
    words: Tensor<2>,
    layout: QuantizedLayout,
    widen: Widen,
    backend: PhantomData<B>,
}

impl<B: KernelBackend> Kernel<B, 1> for Product<B> {
    const NAME: &str = "product";
    type Saved = ();

    fn forward(&self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, ()) {
        let x: Tensor<2> = B::tensor(x);
        let wide = (self.widen)(&self.words, self.layout, x.dtype());
        (B::primitive(x.matmul(wide.transpose())), ())
    }

    fn backward(
        &self,
        (): (),
        gradient: FloatTensor<B>,
        wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let back = || {
            let g: Tensor<2> = B::tensor(gradient);
            let wide = (self.widen)(&self.words, self.layout, g.dtype());
            B::primitive(g.matmul(wide))
        };
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
