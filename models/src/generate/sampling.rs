//! How tokens are chosen and when a completion ends.

use crate::{Error, Result};

/// How tokens are chosen and when a completion ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 is greedy.
    pub temperature: f64,
    /// Only the `k` likeliest tokens (all where `None`).
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together hold this probability; 1 is off.
    pub top_p: f64,
    /// Only tokens at least this share as likely as the likeliest; 0 is off.
    pub min_p: f64,
    /// Most tokens a completion may have.
    pub max_new_tokens: usize,
    /// Ids that end a completion; the id itself belongs to it.
    pub stop_ids: Vec<u32>,
    /// Texts that end a completion; the tokens that spell them belong to it. Needs a tokenizer.
    pub stop_strings: Vec<String>,
}

impl Default for Sampling {
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

impl Sampling {
    /// Whether every token goes by the argmax.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether some tokens of the full distribution are excluded.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.top_k.is_some() || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// Temperature of the log-probs that are reported: greedy ones are those of the plain distribution.
    #[must_use]
    pub fn scoring_temperature(&self) -> f64 {
        if self.is_greedy() {
            1.0
        } else {
            self.temperature
        }
    }

    /// Refuses settings that cannot work.
    pub fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::Sampling(what));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad(format!(
                "temperature should be 0 (greedy) or more, found {}",
                self.temperature
            ));
        }
        if self.top_k == Some(0) {
            return bad(
                "top_k should be at least 1; leave it out (or give -1) for all tokens".into(),
            );
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad(format!(
                "top_p should be above 0 and at most 1, found {}",
                self.top_p
            ));
        }
        if !(0.0..1.0).contains(&self.min_p) {
            return bad(format!(
                "min_p should be at least 0 and below 1, found {}",
                self.min_p
            ));
        }
        if self.max_new_tokens == 0 {
            return bad("max_new_tokens should be at least 1".into());
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return bad("a stop string is empty; it would end every completion at once".into());
        }
        Ok(())
    }
}
