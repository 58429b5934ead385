//! Exact forward passes: the sampler's log-probs are the trainer's, to the bit.

use super::Decoder;
use crate::{Error, Result};
use firebrick_backends::PrecisionExt;
use firebrick_backends::kernels::{exact, is_exact_on};

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
        (!is_exact_on(device, arch.precision.dtype(device), [group, arch.head_dim])).then(|| {
            format!(
                "needs f32 on the CPU, or a GPU with its kernels on and up to 64 query heads for a key head; this model has \
                 heads of {} and {group} for a key head, in {} on {device:?}",
                arch.head_dim, arch.precision
            )
        })
    }
}
