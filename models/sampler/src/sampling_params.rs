//! Sampling parameters.

use firebrick_models::{Error, Result};

/// Choice of tokens and end of completions, by vLLM's names.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 is greedy decoding.
    pub temperature: f64,
    /// Top-k: only the `k` likeliest tokens are drawn; all where `None`.
    pub top_k: Option<usize>,
    /// Top-p (nucleus): only the fewest likeliest tokens whose probabilities reach this sum, in (0, 1]; 1 is off.
    pub top_p: f64,
    /// Min-p: only tokens at least this fraction as likely as the likeliest, in [0, 1); 0 is off.
    pub min_p: f64,
    /// Most tokens of a completion.
    pub max_new_tokens: usize,
    /// Token ids that end a completion; the id itself belongs to it.
    pub stop_ids: Vec<u32>,
    /// Strings that end a completion; their tokens belong to it. They need a tokenizer.
    pub stop_strings: Vec<String>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            max_new_tokens: 256,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// True if every token is the argmax.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// True if tokens are truncated (top-k, top-p or min-p).
    pub fn is_truncated(&self) -> bool {
        self.top_k.is_some() || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Temperature of reported log-probabilities: 1 for greedy decoding.
    pub fn scoring_temperature(&self) -> f64 {
        if self.is_greedy() { 1.0 } else { self.temperature }
    }

    /// Refuses values out of range.
    ///
    /// # Errors
    /// [`Error::Sampling`] with the parameter and its range.
    pub fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::Sampling(what));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad(format!("temperature must be 0 (greedy) or above, found {}", self.temperature));
        }
        if self.top_k == Some(0) {
            return bad("top_k must be at least 1; omit it (or set -1) for all tokens".into());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad(format!("top_p must be above 0 and at most 1, found {}", self.top_p));
        }
        if !(0.0..1.0).contains(&self.min_p) {
            return bad(format!("min_p must be at least 0 and below 1, found {}", self.min_p));
        }
        if self.max_new_tokens == 0 {
            return bad("max_new_tokens must be at least 1".into());
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return bad("a stop string is empty; it would end every completion immediately".into());
        }
        Ok(())
    }
}
