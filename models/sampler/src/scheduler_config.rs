//! Limits of a generation run.

use firebrick_arch::KvCacheDtype;
use firebrick_arch::kv_cache::KvCacheDemand;
use firebrick_models::arch::Arch;
use firebrick_models::{Error, Result};

/// Default of [`SchedulerConfig::max_num_batched_tokens`].
pub const MAX_NUM_BATCHED_TOKENS: usize = 2048;

/// Limits of a generation run, by vLLM's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most sequences that are decoded at a time.
    pub max_num_seqs: usize,
    /// Most tokens of one forward pass: longer prompts are prefilled in chunks, with decoding between them.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence, prompt and completion; a completion that reaches it ends with
    /// [`FinishReason::Length`](super::FinishReason::Length).
    pub max_model_len: Option<usize>,
    /// Most bytes of the KV cache; `None` is as many as the sequences may ever need. When it is full, the youngest
    /// sequences are preempted and recomputed later.
    pub kv_cache_bytes: Option<usize>,
    /// Format of keys and values.
    pub kv_cache_dtype: KvCacheDtype,
    /// True if the keys and values of whole completions stay in the cache for later runs of the generator, as long as
    /// the pools have room: for turns of a conversation. Prompts that begin alike share blocks either way.
    pub keep_completions: bool,
    /// True if the next token is launched before the host has read the last one. `None`: on devices that run
    /// asynchronously. Sampled tokens do not depend on it.
    pub async_scheduling: Option<bool>,
}

impl SchedulerConfig {
    /// Limits of `max_num_seqs` sequences at a time and [`MAX_NUM_BATCHED_TOKENS`] tokens of a forward pass.
    pub fn new(max_num_seqs: usize) -> Self {
        Self {
            max_num_seqs,
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS.max(max_num_seqs),
            max_model_len: None,
            kv_cache_bytes: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            keep_completions: false,
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

    /// Demand on the cache of `sequences` sequences of up to `longest` tokens.
    pub fn kv_cache_demand(&self, arch: &Arch, sequences: usize, longest: usize) -> KvCacheDemand {
        KvCacheDemand {
            sequences: self.max_num_seqs.min(sequences),
            longest,
            prefill_tokens: self.max_num_batched_tokens,
            total: sequences,
            dtype: self.kv_cache_dtype,
            width: arch.precision.width() as usize,
        }
    }

    /// The smallest [`Self::kv_cache_bytes`] for sequences of up to `longest` tokens: the blocks of one of them.
    pub fn least_cache_bytes(&self, arch: &Arch, longest: usize) -> usize {
        self.kv_cache_demand(arch, 1, longest).least_bytes(arch) as usize
    }

    /// Blocks of each group of layers, for `sequences` sequences of up to `longest` tokens. Refuses a limit that cannot
    /// hold one.
    pub(super) fn blocks(&self, arch: &Arch, sequences: usize, longest: usize) -> Result<Vec<usize>> {
        if self.kv_cache_dtype == KvCacheDtype::Int8 && !arch.head_dim.is_multiple_of(4) {
            return Err(Error::Sampling(format!(
                "keys and values in 8 bits need a head size that is a multiple of 4, and this model's is {}; use the dtype `auto`",
                arch.head_dim
            )));
        }
        let demand = self.kv_cache_demand(arch, sequences, longest);
        let limit = self.kv_cache_bytes.map(|bytes| bytes as u64);
        demand.blocks(arch, limit).ok_or_else(|| {
            Error::Sampling(format!(
                "the KV cache is limited to {} bytes, but one sequence of {longest} tokens needs {}; raise the limit, or shorten the \
                 sequences",
                limit.unwrap_or(0),
                demand.least_bytes(arch)
            ))
        })
    }
}
