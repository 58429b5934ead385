//! Frozen matrices in few bits (`QLoRA`: Dettmers et al., 2023, arXiv:2305.14314).

use super::{Decoder, NewParam, Param, Store};
use crate::Result;
use crate::unit::ParamSpec;
use burn::tensor::{Device, Tensor};
use firebrick_backends::kernels;
use firebrick_backends::quantized::{quantize, widened};
use firebrick_backends::transfer::HostTensor;
use firebrick_backends::{Precision, PrecisionExt};
use firebrick_spec::{BaseFormat, QuantizedLayout};
use std::convert::Infallible;

impl NewParam {
    /// A matrix of f32 numbers in row-major order, quantised on the host, so that the device never holds it wider.
    #[must_use]
    pub fn quantized(values: &[f32], layout: QuantizedLayout, device: &Device) -> Self {
        Self::verbatim(quantize(values, layout), layout, device)
    }

    /// The buffer of a matrix.
    #[must_use]
    pub fn verbatim(words: HostTensor, layout: QuantizedLayout, device: &Device) -> Self {
        Self {
            layout: Some(layout),
            tensor: words.into_device(device),
        }
    }
}

impl Decoder {
    /// This model with its layers' matrices in few bits, on the device; all other weights are shared. The matrices are not trained any
    /// more: give it adapters. Embedding, norms, biases and the head stay in the model's precision, and so do matrices of experts.
    ///
    /// # Errors
    /// `Error::Device` or `Error::OutOfMemory` where a matrix cannot be read from the device.
    pub fn with_quantized_base(&self, base: BaseFormat) -> Result<Self> {
        let arch = self.arch.clone().with_base(Some(base));
        let (own, device) = (self.without_adapters(), &self.device);
        Self::build(arch.clone(), device, |index, spec| {
            let value = own.param(index);
            Ok(match spec.layout(&arch) {
                Some(layout) => NewParam::quantized(&value.download()?.to_f32(), layout, device),
                None => value.upload(device).into(),
            })
        })
    }

    /// The base model with the numbers that its matrices in few bits stand for, rounded to the model's precision, on the device: all of
    /// them are parameters like any other.
    #[must_use]
    pub fn with_widened_base(&self) -> Self {
        let own = self.without_adapters();
        let arch = own.arch.clone().with_base(None);
        let value = |index: usize, _: &ParamSpec| -> Result<Tensor<2>, Infallible> {
            Ok(own.param(index).upload(&self.device))
        };
        match Self::build(arch, &self.device, value) {
            Ok(decoder) => decoder,
            Err(never) => match never {},
        }
    }

    /// The numbers that a matrix in few bits stands for, in f32.
    pub(super) fn widened_param(
        &self,
        store: &Store,
        place: usize,
        layout: QuantizedLayout,
    ) -> Param {
        match store {
            Store::Device(weights) => {
                let dtype = Precision::F32.dtype(&self.device);
                Param::Device(kernels::dequantize(&weights.at(place), layout, dtype))
            }
            Store::Host(host) => {
                let values = widened(host[place].1.words(), layout);
                Param::Host(HostTensor::from_values(values, [layout.rows, layout.cols]))
            }
        }
    }
}
