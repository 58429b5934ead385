//! Copies of matrices that sampling reads instead of them, for it reads all of them for every token.

use super::{Decoder, Store, Unit};
use crate::unit::Slot;
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::kernels::Panels;

pub use firebrick_spec::{Packing, Quantization};

impl Decoder {
    /// The same model, its weights shared, with copies of its matrices.
    ///
    /// Fails where matrices should be quantised and no kernel reads them then: kernels do where the weights are on the device, on
    /// the CPU in f32 alone.
    pub fn packed(&self, packing: Packing) -> Result<Self> {
        let mut packed = self.clone();
        let tied = self.arch.tied;
        let has_panels = |slot: Slot| match slot {
            Slot::Embedding => tied,
            slot => !slot.is_norm_or_bias() && !slot.is_adapter(),
        };
        let copy = |slot: Slot, matrix: &Tensor<2>| match packing.quantization {
            Some(Quantization::Int8) if slot.is_linear() => {
                Panels::quantise(matrix).map(Some).ok_or_else(unread)
            }
            _ if packing.panels && has_panels(slot) => Ok(Panels::pack(matrix)),
            _ => Ok(None),
        };
        for unit in &mut packed.units {
            match &mut unit.store {
                Store::Device(weights) => *weights = weights.packed(copy)?,
                Store::Host(_) if packing.quantization.is_some() => return Err(unread()),
                Store::Host(_) => {}
            }
        }
        Ok(packed)
    }

    /// Bytes of such copies.
    #[must_use]
    pub fn packed_bytes(&self) -> usize {
        let own = |unit: &Unit| match &unit.store {
            Store::Device(weights) => weights.packed_bytes(),
            Store::Host(_) => 0,
        };
        self.units.iter().map(own).sum()
    }
}

fn unread() -> Error {
    Error::Sampling(
        "8-bit weights are made of those on the device, on the CPU of f32 alone; sample without quantization"
            .into(),
    )
}
