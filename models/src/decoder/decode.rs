//! One new token of each sequence on a GPU.

use super::Decoder;
use crate::cache::{Decode, KvCache};
use crate::layer::decode::{CachedStep, Residual, attention, mlp};
use crate::rope::LayerAngles;
use crate::unit::{Slot, UnitKind};
use burn::tensor::Tensor;
use firebrick_backends::accounts::Home;
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, Operation, StepBuffer};

/// Token ids that f32 represents exactly: tokens are sampled on the device, with their log-probs.
const IDS: usize = 1 << 24;

impl Decoder {
    /// Whether [`Self::decode`] runs this model on its device: a GPU whose kernels are on, with all weights there. Not
    /// a share of a model, whose layers exchange messages.
    #[must_use]
    pub fn decodes_on_device(&self) -> bool {
        let device = &self.device;
        let kernels = [Operation::DecodeAttention, Operation::Draw];
        !is_cpu(device)
            && self.tensor.is_none()
            && kernels.iter().all(|&o| kernels::available(o, device))
            && self.arch.vocab_size <= IDS
            && self.arch.decodes_in_kernels()
            && self.bytes_in(Home::Host) == 0
    }

    /// Logits after the next token of each sequence, `[rows, vocab]`, in the model's precision or wider; keys and
    /// values are written to `cache`. Nothing is uploaded and nothing read: what a step reads is in `step`. Blocks that
    /// are shared and about to be written to are copied before ([`KvCache::copy_shared_blocks`]).
    ///
    /// # Panics
    /// Where [`Self::decodes_on_device`] says no.
    #[must_use]
    pub fn decode(&self, step: &StepBuffer, cache: &mut KvCache) -> Tensor<2> {
        let angles = LayerAngles::new(&self.arch, step.angles.clone());
        let mut residual = Residual::new(self.embed(step.ids.clone()));
        for index in self.body() {
            let weights = self.weights(index);
            residual = match self.units[index].kind {
                UnitKind::Attention(layer) => {
                    let cache = cache.layer(layer);
                    let own = Decode { tables: &step.tables[cache.group()], angles: angles.of(layer) };
                    let lora = self.sampling_lora(layer);
                    let cached = CachedStep { cache, step: own, query_scale: step.query_scale.as_ref() };
                    attention(&self.arch, layer, &weights, residual, lora, cached)
                }
                UnitKind::Mlp(layer) => mlp(&self.arch, &weights, residual, self.sampling_lora(layer)),
                UnitKind::Embedding | UnitKind::Head => unreachable!("the body has neither"),
            };
        }
        let head = self.head();
        let norm = self.weights(self.units.len() - 1).need(Slot::InputNorm);
        let [_, normed] = residual.normed(&self.arch, Some(norm));
        head.sampled_logits(&normed)
    }
}
