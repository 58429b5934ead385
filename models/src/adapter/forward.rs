//! The forward pass of the adapters of a layer.

use super::dropout::Dropout;
use crate::unit::TargetModule;
use burn::tensor::Tensor;
use firebrick_arch::lora::LoraConfig;
use firebrick_backends::kernels::{ExpertInput, ExpertRows, expert_linear, linear};

/// Random stream that initialises the A matrix of an adapter, apart from the streams of other purposes.
pub(crate) fn init_stream(layer: usize, target: TargetModule) -> u64 {
    const ADAPTER_STREAM: u64 = 3 << 32;
    ADAPTER_STREAM + target.index(layer) as u64
}

/// Settings of the adapters of a layer in one forward pass: everything but their matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoraForward<'a> {
    scale: f64,
    dropout: Option<&'a Dropout>,
    layer: usize,
}

impl<'a> LoraForward<'a> {
    pub(crate) fn new(lora: &LoraConfig, dropout: Option<&'a Dropout>, layer: usize) -> Self {
        Self { scale: lora.scale(), dropout, layer }
    }

    /// `s · (dropout(x) Aᵀ) Bᵀ`, `[rows, out]`, for `x` of shape `[rows, in]`. The scale and dropout's 1 / keep are
    /// applied to the narrowest tensor, `[rows, rank]`.
    pub(crate) fn run(&self, x: Tensor<2>, target: TargetModule, a: &Tensor<2>, b: &Tensor<2>) -> Tensor<2> {
        let x = match self.dropout {
            Some(dropout) => dropout.apply(x, target.index(self.layer)),
            None => x,
        };
        linear(&(linear(&x, a) * self.factor()), b)
    }

    /// [`Self::run`] with the adapter of each row's expert, `[sorted rows, out]`: of A `[experts · rank, in]` and B
    /// `[experts · out, rank]`. All experts that read a token's row drop the same elements.
    pub(crate) fn run_experts(
        &self,
        x: &Tensor<2>,
        target: TargetModule,
        [a, b]: [&Tensor<2>; 2],
        rows: &ExpertRows,
        reads: ExpertInput,
    ) -> Tensor<2> {
        let place = target.index(self.layer);
        let x = match (self.dropout, reads) {
            (Some(dropout), ExpertInput::Tokens) => dropout.apply(x.clone(), place),
            (Some(dropout), ExpertInput::Sorted) => dropout.apply_to_choices(x.clone(), place, rows),
            (None, _) => x.clone(),
        };
        let narrow = expert_linear(&x, a, rows, reads) * self.factor();
        expert_linear(&narrow, b, rows, ExpertInput::Sorted)
    }

    /// The scale, and what makes up for dropped inputs.
    fn factor(&self) -> f64 {
        let keep = self.dropout.map_or(1.0, Dropout::keep);
        self.scale / keep
    }
}
