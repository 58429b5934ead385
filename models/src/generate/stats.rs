//! What an engine did.

use std::time::Duration;

/// Counts and times of one run of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of prompts whose keys and values were computed, padding and recomputation left out.
    pub prefill_tokens: usize,
    /// Tokens that were computed again after their sequence had lost its place.
    pub recomputed_tokens: usize,
    /// Tokens drawn.
    pub new_tokens: usize,
    /// Forwards of one token a sequence.
    pub decode_steps: usize,
    /// Sequences in a slot that had not ended, summed over those forwards.
    pub occupied: usize,
    /// Slots there could have been, summed over those forwards.
    pub slots: usize,
    /// Tokens that were run for sequences that had ended: the host had not seen the end yet.
    pub overrun: usize,
    /// Times that a sequence lost its place because the cache was short.
    pub preemptions: usize,
    /// Most bytes of keys and values at a time.
    pub peak_cache_bytes: usize,
    /// Time of the prompts' forwards, first tokens included.
    pub prefill_time: Duration,
    /// Time of all other forwards, waiting for their tokens included.
    pub decode_time: Duration,
}

impl Stats {
    /// Share of the slots that held a sequence, over all decoding.
    #[must_use]
    pub fn occupancy(&self) -> f64 {
        self.occupied as f64 / self.slots.max(1) as f64
    }

    /// Prompt tokens a second of prefill.
    #[must_use]
    pub fn prefill_rate(&self) -> f64 {
        rate(
            self.prefill_tokens + self.recomputed_tokens,
            self.prefill_time,
        )
    }

    /// Tokens a second of decoding.
    #[must_use]
    pub fn decode_rate(&self) -> f64 {
        rate(self.occupied, self.decode_time)
    }

    /// Adds another run's; the peak is the larger.
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
