//! Exact forward passes: the sampler's log-probs are the trainer's, to the bit.

use super::Decoder;
use crate::unit::Slot;
use crate::{Error, Result};
use firebrick_backends::PrecisionExt;
use firebrick_backends::kernels::{EXACT_MULTIPLES, exact, is_exact_on};

impl Decoder {
    /// This model with exact forward passes: a token has the same bits in a prompt, as a decoding step and in training,
    /// whatever is computed beside it ([`firebrick_backends::kernels::exact()`]).
    ///
    /// # Errors
    /// [`Error::Sampling`] with the reason where no kernels compute this model exactly on its device.
    pub fn with_exact_sums(mut self) -> Result<Self> {
        match self.inexact() {
            Some(why) => Err(Error::Sampling(format!("an exact forward pass {why}"))),
            None => {
                self.exact = true;
                Ok(self)
            }
        }
    }

    /// True if forward passes are exact.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// Runs `work` in the mode of this model's forward passes: the rows of a batch are laid out for the kernels that it
    /// will take.
    pub fn in_exact<R>(&self, work: impl FnOnce() -> R) -> R {
        exact(self.exact, work)
    }

    /// Why this model cannot be computed exactly.
    fn inexact(&self) -> Option<String> {
        let Self { arch, device, .. } = self;
        let group = arch.num_heads / arch.num_kv_heads;
        if !is_exact_on(device, arch.precision.dtype(device), [group, arch.head_dim]) {
            return Some(format!(
                "needs f32, with up to 64 query heads for a key head on a GPU; or bf16 or f16 on an NVIDIA GPU from Ampere \
                 on, with heads of 64, 96 or 128 and up to 16 query heads for a key head; this model has heads of {} and \
                 {group} for a key head, in {} on {device:?}",
                arch.head_dim, arch.precision
            ));
        }
        if !arch.precision.is_half() {
            return None;
        }
        let [outputs, inputs] = EXACT_MULTIPLES;
        let specs = self.units.iter().flat_map(|unit| &unit.specs);
        let odd = specs.filter(|spec| is_matrix(spec.slot)).find(|spec| {
            let [rows, columns] = spec.rows_cols();
            !rows.is_multiple_of(outputs) || !columns.is_multiple_of(inputs)
        });
        odd.map(|spec| {
            format!(
                "in {} needs matrices with a multiple of {outputs} outputs and {inputs} inputs; {} is {:?}",
                arch.precision,
                spec.name,
                spec.rows_cols()
            )
        })
    }
}

/// True if a decoder multiplies its rows by what is in a slot.
fn is_matrix(slot: Slot) -> bool {
    let experts = matches!(slot, Slot::ExpertGate | Slot::ExpertUp | Slot::ExpertDown | Slot::ExpertGateUp);
    let others = matches!(slot, Slot::Embedding | Slot::Projection | Slot::Router | Slot::SharedGate);
    slot.is_linear() || slot.is_adapter() || experts || others
}
