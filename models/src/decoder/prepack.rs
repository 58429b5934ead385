//! Prepacked copies of a decoder's matrices.

use super::{Decoder, Store, Unit};
use crate::arch::QkNorm;
use crate::layer::decode::{GATE_UP, QKV};
use crate::unit::Slot;
use crate::{Error, Prepack, Quantization, Result};
use burn::tensor::Tensor;
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, PackedWeights};

impl Decoder {
    /// This model with prepacked copies of its matrices; its weights are shared. On a GPU the exact copies of
    /// [`Prepack::panels`] are those of matrices that multiply the same rows, joined. Matrices of experts have none.
    ///
    /// # Errors
    /// [`Error::Sampling`] where matrices should be quantised and no kernel reads them: the weights have to be on the
    /// device, and on the CPU in f32. Where they are a quantized base already.
    pub fn prepacked(&self, prepack: Prepack) -> Result<Self> {
        if let (Some(_), Some(base)) = (prepack.quantization, self.arch.base) {
            return Err(Error::Sampling(format!("the base is in {base} already; sample without quantization")));
        }
        let mut packed = self.clone();
        let tied = self.arch.tied;
        let has_panels = |slot: Slot| match slot {
            Slot::Embedding => tied,
            slot => slot.is_linear() || matches!(slot, Slot::Projection | Slot::Value | Slot::Router),
        };
        let copy = |slot: Slot, matrix: &Tensor<2>| match prepack.quantization {
            Some(Quantization::Int8) if slot.is_linear() => {
                PackedWeights::quantize(matrix).map(Some).ok_or_else(unread)
            }
            _ if prepack.panels && has_panels(slot) => Ok(PackedWeights::pack(matrix)),
            _ => Ok(None),
        };
        // the products of training, which exact sampling has too, are of the matrices one by one
        let joins = prepack.panels && prepack.quantization.is_none() && !is_cpu(&self.device) && !self.exact;
        // a norm over all queries takes them by themselves
        let joins_queries = self.arch.qk_norm != Some(QkNorm::Projection) && !self.arch.attention_gate;
        for unit in &mut packed.units {
            match &mut unit.store {
                Store::Device(weights) => {
                    *weights = weights.prepacked(copy)?;
                    if joins && joins_queries {
                        weights.join(QKV, |matrices| Tensor::cat(matrices, 0));
                    }
                    if joins {
                        weights.join(GATE_UP, join_gate_up);
                    }
                }
                Store::Host(_) if prepack.quantization.is_some() => return Err(unread()),
                Store::Host(_) => {}
            }
        }
        Ok(packed)
    }

    /// Bytes of the prepacked copies.
    pub fn prepacked_bytes(&self) -> usize {
        let bytes = |unit: &Unit| match &unit.store {
            Store::Device(weights) => weights.prepacked_bytes(),
            Store::Host(_) => 0,
        };
        self.units.iter().map(bytes).sum()
    }
}

/// The matrices of [`GATE_UP`] as one.
fn join_gate_up(matrices: Vec<Tensor<2>>) -> Tensor<2> {
    let matrices = matrices.try_into().unwrap_or_else(|_| unreachable!("one for each of two slots"));
    kernels::joined_gate_up(matrices)
}

fn unread() -> Error {
    Error::Sampling(
        "8-bit sampling needs the weights on the device, and on the CPU in f32; sample without quantization".into(),
    )
}
