//! What an engine may use at a time.

use crate::arch::Arch;
use crate::{Error, Result};

/// Most tokens of one forward where nothing else is said.
pub const MAX_NUM_BATCHED_TOKENS: usize = 2048;

/// What an engine may use at a time, under vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most sequences that are decoded at a time: the slots.
    pub max_num_seqs: usize,
    /// Most tokens of one forward: longer prompts are run in chunks, between which decoding goes on.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence, prompt and completion; a completion that reaches it ends for its length.
    pub max_model_len: Option<usize>,
    /// Most bytes of keys and values. Where they run short, the youngest sequences wait and are computed again.
    pub kv_cache_bytes: Option<usize>,
    /// Whether a token is run before the host has seen the one before it. Where `None`: on devices that work beside the program. No
    /// token changes.
    pub async_scheduling: Option<bool>,
}

impl Limits {
    /// So many sequences at a time, and no other limit but the usual size of a forward.
    #[must_use]
    pub fn new(max_num_seqs: usize) -> Self {
        Self {
            max_num_seqs,
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS.max(max_num_seqs),
            max_model_len: None,
            kv_cache_bytes: None,
            async_scheduling: None,
        }
    }

    /// Refuses limits under which nothing can run.
    pub fn check(&self) -> Result<()> {
        if self.max_num_seqs == 0 {
            return Err(Error::Sampling("max_num_seqs should be at least 1".into()));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::Sampling(format!(
                "max_num_batched_tokens ({}) should not be below max_num_seqs ({}): decoding runs one token of each \
                 sequence in a forward",
                self.max_num_batched_tokens, self.max_num_seqs
            )));
        }
        Ok(())
    }

    /// The smallest `kv_cache_bytes` for sequences of up to `longest` tokens: one of them, and a copy of it while it moves from
    /// the forward of its prompt to its slot.
    #[must_use]
    pub fn least_cache_bytes(arch: &Arch, longest: usize) -> usize {
        2 * longest * arch.cache_bytes_per_token()
    }

    /// Tokens that the cache may hold. Refuses a budget that cannot hold the longest sequence.
    pub(super) fn cells(&self, arch: &Arch, longest: usize) -> Result<usize> {
        let Some(bytes) = self.kv_cache_bytes else {
            return Ok(usize::MAX);
        };
        let least = Self::least_cache_bytes(arch, longest);
        if bytes < least {
            return Err(Error::Sampling(format!(
                "the KV cache may have {bytes} bytes, and one sequence of {longest} tokens takes {least} (it is held twice \
                 while it enters its slot); allow more, or shorter sequences"
            )));
        }
        Ok(bytes / arch.cache_bytes_per_token())
    }
}
