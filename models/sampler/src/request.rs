//! Requests of a generator, and its results.

use firebrick_models::random::DrawKey;
use firebrick_models::routing::Routes;
use firebrick_models::{Error, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// A prompt, and the key of its randomness.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// Token ids of the prompt; at least one.
    pub tokens: Vec<u32>,
    /// Key of its first sample; sample `i` adds `i` to [`DrawKey::sample`].
    pub key: DrawKey,
    /// Most tokens of its completions, where that is fewer than
    /// [`SamplingParams::max_new_tokens`](super::SamplingParams).
    pub max_new_tokens: Option<usize>,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// The token limit.
    Length,
}

/// One sampled completion.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Sample {
    /// Index of its request.
    pub request: usize,
    /// Index among the samples of the request.
    pub sample: usize,
    /// Token ids of the completion, the stop token included.
    pub tokens: Vec<u32>,
    /// Tokens among them that the model did not sample: what stands between its turns. Their log-probabilities are 0.
    pub inserted: Vec<Range<usize>>,
    /// Log-probability of each token, in nats, under the distribution it was drawn from (after temperature and
    /// truncation).
    pub logps: Vec<f32>,
    /// Log-probability of each token, in nats, under the distribution before truncation at the same temperature; equal
    /// to `logps` without truncation.
    pub full_logps: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The experts that prompt and completion went through, a row a token but for the last, which was not run; `None`
    /// for models without experts, and for those with a sliding window on all layers.
    #[serde(with = "firebrick_models::shared")]
    pub routes: Option<Arc<Routes>>,
}

impl Sample {
    /// Index of the first token of its last turn.
    pub fn turn_start(&self) -> usize {
        self.inserted.last().map_or(0, |range| range.end)
    }

    /// Turns of the model.
    pub fn turns(&self) -> usize {
        self.inserted.len() + 1
    }
}

/// Refuses token ids outside a vocabulary of `vocab` tokens.
///
/// # Errors
/// [`Error::TokenOutOfRange`] with the first such id.
pub fn check_ids(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        Some(&id) => Err(Error::TokenOutOfRange { id, vocab }),
        None => Ok(()),
    }
}
