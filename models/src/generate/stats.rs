//! Statistics of a generation run.

use std::time::Duration;

/// Counts and times of one generation run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationStats {
    /// Prompt tokens that were prefilled, without padding and recomputation.
    pub prefill_tokens: usize,
    /// Tokens that were recomputed after a preemption.
    pub recomputed_tokens: usize,
    /// Tokens sampled.
    pub new_tokens: usize,
    /// Forward passes that decoded one token of each sequence.
    pub decode_steps: usize,
    /// Sequences that were decoded, summed over those forward passes.
    pub occupied: usize,
    /// Sequences that could have been decoded, summed over those forward passes.
    pub slots: usize,
    /// Tokens that were decoded for sequences that had already ended, before the host had read their last token.
    pub overrun: usize,
    /// Preemptions of sequences because the cache was full.
    pub preemptions: usize,
    /// Peak bytes of the KV cache.
    pub peak_cache_bytes: usize,
    /// Time of prefill, the sampling of first tokens included.
    pub prefill_time: Duration,
    /// Time of decoding, waiting for its tokens included.
    pub decode_time: Duration,
}

impl GenerationStats {
    /// Mean share of the sequences at a time that was used, in [0, 1].
    #[must_use]
    pub fn occupancy(&self) -> f64 {
        self.occupied as f64 / self.slots.max(1) as f64
    }

    /// Tokens per second of prefill.
    #[must_use]
    pub fn prefill_rate(&self) -> f64 {
        rate(
            self.prefill_tokens + self.recomputed_tokens,
            self.prefill_time,
        )
    }

    /// Tokens per second of decoding.
    #[must_use]
    pub fn decode_rate(&self) -> f64 {
        rate(self.occupied, self.decode_time)
    }

    /// Adds those of another run; the peak is the larger one.
    pub fn add(&mut self, other: &Self) {
        self.prefill_tokens += other.prefill_tokens;
        self.recomputed_tokens += other.recomputed_tokens;
        self.new_tokens += other.new_tokens;
        self.decode_steps += other.decode_steps;
        self.occupied += other.occupied;
        self.slots += other.slots;
        self.overrun += other.overrun;
        self.preemptions += other.preemptions;
        self.peak_cache_bytes = self.peak_cache_bytes.max(other.peak_cache_bytes);
        self.prefill_time += other.prefill_time;
        self.decode_time += other.decode_time;
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}
