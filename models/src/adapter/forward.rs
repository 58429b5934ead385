//! The forward pass of the adapters of a layer.

use super::dropout::Dropout;
use crate::functional::linear;
use crate::unit::TargetModule;
use burn::tensor::Tensor;
use firebrick_spec::lora::LoraConfig;

/// Random stream that initialises the A matrix of an adapter, apart from the streams of other purposes.
pub(crate) fn init_stream(layer: usize, target: TargetModule) -> u64 {
    const ADAPTER_STREAM: u64 = 3 << 32;
    ADAPTER_STREAM + target.index(layer) as u64
}

/// How the adapters of a layer run in one forward pass: everything but their matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoraForward<'a> {
    scale: f64,
    dropout: Option<&'a Dropout>,
    layer: usize,
}

impl<'a> LoraForward<'a> {
    pub(crate) fn new(lora: &LoraConfig, dropout: Option<&'a Dropout>, layer: usize) -> Self {
        Self {
            scale: lora.scale(),
            dropout,
            layer,
        }
    }

    /// `s · (dropout(x) Aᵀ) Bᵀ`, `[rows, out]`, for `x` of shape `[rows, in]`. The scale and dropout's 1 / keep are applied to the
    /// narrowest tensor, `[rows, rank]`.
    pub(crate) fn run(
        &self,
        x: Tensor<2>,
        target: TargetModule,
        a: &Tensor<2>,
        b: &Tensor<2>,
    ) -> Tensor<2> {
        let (x, scale) = match self.dropout {
            Some(dropout) => (
                dropout.apply(x, target.index(self.layer)),
                self.scale / dropout.keep(),
            ),
            None => (x, self.scale),
        };
        linear(&(linear(&x, a) * scale), b)
    }
}
