//! Frozen quantized matrices (`QLoRA`: Dettmers et al., 2023, arXiv:2305.14314).

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
use std::ops::Range;

impl NewParam {
    /// A matrix of f32 numbers in row-major order, quantised on the host, so that the device never holds it wider.
    pub fn quantized(values: &[f32], layout: QuantizedLayout, device: &Device) -> Self {
        Self::verbatim(quantize(values, layout), layout, device)
    }

    /// The buffer of a matrix.
    pub fn verbatim(words: HostTensor, layout: QuantizedLayout, device: &Device) -> Self {
        Self { layout: Some(layout), tensor: words.into_device(device) }
    }
}

impl Decoder {
    /// This model with its layers' matrices quantized, on the device; all other weights are shared. The matrices are
    /// not trained any more: give it adapters. Embedding, norms, biases, routers and the head stay in the model's
    /// precision.
    ///
    /// # Errors
    /// `Error::Device` or `Error::OutOfMemory` where a matrix cannot be read from the device.
    pub fn with_quantized_base(&self, base: BaseFormat) -> Result<Self> {
        let arch = self.arch.clone().with_base(Some(base));
        let (base, device) = (self.without_adapters(), &self.device);
        Self::build(arch.clone(), device, |index, spec| {
            let value = base.param(index);
            Ok(match spec.layout(&arch) {
                Some(layout) => NewParam::quantized(&value.download()?.to_f32(), layout, device),
                None => value.upload(device).into(),
            })
        })
    }

    /// The base model with the numbers that its quantized matrices stand for, rounded to the model's precision, on the
    /// device: all of them are parameters like any other.
    #[must_use]
    pub fn with_widened_base(&self) -> Self {
        let base = self.without_adapters();
        let arch = base.arch.clone().with_base(None);
        let value = |index: usize, _: &ParamSpec| -> Result<Tensor<2>, Infallible> {
            Ok(base.param(index).upload(&self.device))
        };
        let Ok(decoder) = Self::build(arch, &self.device, value);
        decoder
    }

    /// The numbers that some of the matrices of a layout stand for, in f32.
    pub(super) fn widened_param(
        &self,
        store: &Store,
        place: usize,
        layout: QuantizedLayout,
        matrices: Range<usize>,
    ) -> Param {
        let count = layout.matrices;
        let layout = QuantizedLayout { matrices: matrices.len(), ..layout };
        match store {
            Store::Device(weights) => {
                let dtype = Precision::F32.dtype(&self.device);
                let words = weights.at(place);
                let part =
                    if matrices.len() == count { words } else { words.narrow(0, matrices.start, matrices.len()) };
                Param::Device(kernels::dequantize(&part, layout, dtype))
            }
            Store::Host(host) => {
                let (words, each) = (host[place].1.words(), layout.words());
                let part = &words[matrices.start * each..matrices.end * each];
                let values = widened(part, layout);
                Param::Host(HostTensor::from_values(values, layout.shape()))
            }
        }
    }
}
