//! Frozen matrices in few bits, widened by the host: on the CPU, and on other devices only while kernels are
//! [off](crate::set_enabled).

use burn::tensor::{DType, Tensor, TensorData};
use firebrick_device::quantized::widened;
use firebrick_device::transfer::HostTensor;
use firebrick_spec::QuantizedLayout;

/// See [`crate::dequantize`]: of one matrix.
pub(crate) fn dequantize(words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
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
