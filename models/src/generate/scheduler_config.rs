//! Limits of a generation run.

use crate::arch::Arch;
use crate::{Error, Result};

/// Default of [`SchedulerConfig::max_num_batched_tokens`].
pub const MAX_NUM_BATCHED_TOKENS: usize = 2048;

/// How much a generation run may use at a time, by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most sequences that are decoded at a time.
    pub max_num_seqs: usize,
    /// Most tokens of one forward pass: longer prompts are prefilled in chunks, with decoding between them.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence, prompt and completion; a completion that reaches it ends with [`FinishReason::Length`](super::FinishReason::Length).
    pub max_model_len: Option<usize>,
    /// Most bytes of the KV cache. When it is full, the youngest sequences are preempted and recomputed later.
    pub kv_cache_bytes: Option<usize>,
    /// Whether the next token is launched before the host has read the last one. `None`: on devices that run asynchronously. Sampled
    /// tokens do not depend on it.
    pub async_scheduling: Option<bool>,
}

impl SchedulerConfig {
    /// Limits of `max_num_seqs` sequences at a time and [`MAX_NUM_BATCHED_TOKENS`] tokens of a forward pass.
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

    /// Refuses limits within which nothing can run.
    ///
    /// # Errors
    /// [`Error::Sampling`] with the limit.
    pub fn check(&self) -> Result<()> {
        if self.max_num_seqs == 0 {
            return Err(Error::Sampling("max_num_seqs must be at least 1".into()));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::Sampling(format!(
                "max_num_batched_tokens ({}) must be at least max_num_seqs ({}): a decoding step runs one token of each \
                 sequence",
                self.max_num_batched_tokens, self.max_num_seqs
            )));
        }
        Ok(())
    }

    /// The smallest [`Self::kv_cache_bytes`] for sequences of up to `longest` tokens: two copies of one sequence, since it is copied
    /// from the cache of its prefill to that of decoding.
    #[must_use]
    pub fn least_cache_bytes(arch: &Arch, longest: usize) -> usize {
        2 * longest * arch.cache_bytes_per_token()
    }

    /// Tokens that the caches may hold. Refuses a budget that cannot hold the longest sequence.
    pub(super) fn cells(&self, arch: &Arch, longest: usize) -> Result<usize> {
        let Some(bytes) = self.kv_cache_bytes else {
            return Ok(usize::MAX);
        };
        let least = Self::least_cache_bytes(arch, longest);
        if bytes < least {
            return Err(Error::Sampling(format!(
                "the KV cache is limited to {bytes} bytes, but one sequence of {longest} tokens needs {least} (it is copied once \
                 after its prefill); raise the limit, or shorten the sequences"
            )));
        }
        Ok(bytes / arch.cache_bytes_per_token())
    }
}
