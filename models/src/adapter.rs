//! Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): trained bypasses beside frozen matrices.
//!
//! A bypass is two more entries of its unit's parameter table. With it a unit computes `x Wᵀ + s · (drop(x) Aᵀ) Bᵀ`; the
//! dense `W + s · B A` exists only where a merged model is asked for.

mod dropout;

pub use dropout::{Dropout, DropoutKey};
pub use firebrick_spec::lora::LoraConfig;
pub use firebrick_spec::parameters::Target;

use crate::layer::Context;
use crate::unit::product;
use burn::tensor::Tensor;

/// Number of the random stream that starts a bypass's A, apart from those of other purposes.
pub(crate) fn init_stream(layer: usize, target: Target) -> u64 {
    const ADAPTER_STREAM: u64 = 3 << 32;
    ADAPTER_STREAM + target.place(layer) as u64
}

/// How the bypasses of a layer run in one forward: what their matrices do not say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bypass<'a> {
    scale: f64,
    dropout: Option<&'a Dropout>,
    layer: usize,
}

impl<'a> Bypass<'a> {
    pub(crate) fn new(lora: &LoraConfig, ctx: &'a Context, layer: usize) -> Self {
        Self {
            scale: lora.scale(),
            dropout: ctx.dropout(),
            layer,
        }
    }

    /// `s · (drop(x) Aᵀ) Bᵀ`. The scale, and what dropout makes up for, go where the tensor is narrowest.
    pub(crate) fn run(
        &self,
        x: Tensor<2>,
        target: Target,
        a: &Tensor<2>,
        b: &Tensor<2>,
    ) -> Tensor<2> {
        let (x, scale) = match self.dropout {
            Some(dropout) => (
                dropout.apply(x, target.place(self.layer)),
                self.scale / dropout.keep(),
            ),
            None => (x, self.scale),
        };
        product(&(product(&x, a) * scale), b)
    }
}
