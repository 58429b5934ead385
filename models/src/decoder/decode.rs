//! One new token of each sequence on a GPU.

use super::Decoder;
use crate::cache::{Decode, KvCache};
use crate::layer::decode::{CachedStep, Residual, norm_of};
use crate::rope::LayerAngles;
use crate::unit::{Slot, UnitKind};
use burn::tensor::Tensor;
use firebrick_backends::accounts::Home;
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, Operation, StepBuffer};

/// Token ids that f32 represents exactly: tokens are sampled on the device, with their log-probs.
const IDS: usize = 1 << 24;

impl Decoder {
    /// True if [`Self::decode`] runs this model on its device: a GPU whose kernels are on, with all weights there.
    /// False for a shard, whose layers exchange messages.
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
    /// If [`Self::decodes_on_device`] is false.
    pub fn decode(&self, step: &StepBuffer, cache: &mut KvCache) -> Tensor<2> {
        kernels::exact(self.exact, || self.decode_step(step, cache))
    }

    fn decode_step(&self, step: &StepBuffer, cache: &mut KvCache) -> Tensor<2> {
        let angles = LayerAngles::new(&self.arch, step.angles.clone());
        let mut residual = Residual::Whole(self.embed(step.ids.clone()));
        for index in self.body() {
            let weights = self.weights(index);
            let sublayer = self.sublayer(index, &weights, None);
            residual = match self.units[index].kind {
                UnitKind::Attention(layer) => {
                    let cache = cache.layer(layer);
                    let decode = Decode { tables: &step.tables[cache.group], angles: angles.layer(layer) };
                    let cached = CachedStep { cache, step: decode, query_scale: step.query_scale.as_ref() };
                    sublayer.decode_attention(residual, cached)
                }
                _ => sublayer.decode_mlp(residual),
            };
        }
        let head = self.head();
        let norm = norm_of(&self.arch, Some(self.weights(self.units.len() - 1).need(Slot::InputNorm)));
        let [_, normed] = residual.normed(norm.as_ref());
        head.sampled_logits(&normed)
    }
}
