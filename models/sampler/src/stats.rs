//! Statistics of a generation run.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Counts and times of one generation run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct GenerationStats {
    /// Prompt tokens that were prefilled, without padding and recomputation.
    pub prefill_tokens: usize,
    /// Tokens that were recomputed after a preemption.
    pub recomputed_tokens: usize,
    /// Tokens sampled.
    pub new_tokens: usize,
    /// Forward passes that decoded one token of each sequence.
    pub decode_steps: usize,
    /// Decoding steps that replayed a graph.
    pub graph_replays: usize,
    /// Sequences that were decoded, summed over those forward passes.
    pub occupied: usize,
    /// Sequences that could have been decoded, summed over those forward passes.
    pub slots: usize,
    /// Tokens that were decoded for sequences that had already ended, before the host had read their last token.
    pub overrun: usize,
    /// Preemptions of sequences because the cache was full.
    pub preemptions: usize,
    /// Sequences that were preempted, each counted once.
    pub preempted: usize,
    /// Prompt tokens that the cache already had, from another prompt or from before a preemption.
    pub prefix_cache_hits: usize,
    /// Bytes of the KV cache's pools.
    pub cache_bytes: usize,
    /// Peak bytes of the blocks that sequences had.
    pub peak_cache_bytes: usize,
    /// Peak number of blocks that sequences had, in layers that see the whole sequence; a shared block counts once.
    pub peak_blocks: usize,
    /// Slots of those blocks, summed over decoding steps.
    pub block_slots: usize,
    /// Unused slots at the end of last blocks, summed over decoding steps.
    pub unused_slots: usize,
    /// Blocks that sequences had, summed over decoding steps: a shared block counts once.
    pub blocks: usize,
    /// [`Self::blocks`] where a shared block counts for every sequence that has it.
    pub unshared_blocks: usize,
    /// Time of prefill, the sampling of first tokens included.
    pub prefill_time: Duration,
    /// Time of decoding, waiting for its tokens included.
    pub decode_time: Duration,
}

impl GenerationStats {
    /// Mean share of the sequences at a time that was used, in [0, 1].
    pub fn occupancy(&self) -> f64 {
        self.occupied as f64 / self.slots.max(1) as f64
    }

    /// Share of the slots in use that hold no token, in [0, 1]: last blocks that are not full.
    pub fn kv_waste(&self) -> f64 {
        self.unused_slots as f64 / self.block_slots.max(1) as f64
    }

    /// Share of the blocks that sequences would need without sharing that sharing saves, in [0, 1].
    pub fn kv_shared(&self) -> f64 {
        let saved = self.unshared_blocks.saturating_sub(self.blocks);
        saved as f64 / self.unshared_blocks.max(1) as f64
    }

    /// Tokens per second of prefill.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prefill_tokens + self.recomputed_tokens, self.prefill_time)
    }

    /// Tokens per second of decoding.
    pub fn decode_rate(&self) -> f64 {
        rate(self.occupied, self.decode_time)
    }

    /// Adds those of another run; bytes and peaks are the larger ones.
    pub fn add(&mut self, other: &Self) {
        self.prefill_tokens += other.prefill_tokens;
        self.recomputed_tokens += other.recomputed_tokens;
        self.new_tokens += other.new_tokens;
        self.decode_steps += other.decode_steps;
        self.graph_replays += other.graph_replays;
        self.occupied += other.occupied;
        self.slots += other.slots;
        self.overrun += other.overrun;
        self.preemptions += other.preemptions;
        self.preempted += other.preempted;
        self.prefix_cache_hits += other.prefix_cache_hits;
        self.cache_bytes = self.cache_bytes.max(other.cache_bytes);
        self.peak_cache_bytes = self.peak_cache_bytes.max(other.peak_cache_bytes);
        self.peak_blocks = self.peak_blocks.max(other.peak_blocks);
        self.block_slots += other.block_slots;
        self.unused_slots += other.unused_slots;
        self.blocks += other.blocks;
        self.unshared_blocks += other.unshared_blocks;
        self.prefill_time += other.prefill_time;
        self.decode_time += other.decode_time;
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}
