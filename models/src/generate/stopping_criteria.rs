//! When a completion ends.

use super::request::{GenerationRequest, Sample};
use super::sampling_params::SamplingParams;
use super::scheduler_config::SchedulerConfig;
use crate::{Result, Tokenizer};

/// Stop tokens, stop strings and length limits (transformers' `StoppingCriteria`).
#[derive(Clone, Copy, Debug)]
pub(super) struct StoppingCriteria<'a> {
    /// Decodes completions; needed for stop strings.
    pub tokenizer: Option<&'a Tokenizer>,
    pub sampling: &'a SamplingParams,
}

impl StoppingCriteria<'_> {
    /// Whether a turn ends with a stop token or contains a stop string.
    pub fn is_met(&self, sample: &Sample) -> Result<bool> {
        let last = sample.tokens.last();
        if last.is_some_and(|last| self.sampling.stop_ids.contains(last)) {
            return Ok(true);
        }
        let stops = &self.sampling.stop_strings;
        let (Some(tokenizer), false) = (self.tokenizer, stops.is_empty()) else {
            return Ok(false);
        };
        let text = tokenizer.decode(&sample.tokens[sample.turn_start()..], true)?;
        Ok(stops.iter().any(|stop| text.contains(stop.as_str())))
    }

    /// Most tokens of a completion of this request.
    pub fn max_new_tokens(&self, request: &GenerationRequest, config: &SchedulerConfig) -> usize {
        let left = config.max_model_len.map(|most| most.saturating_sub(request.tokens.len()));
        let limits = [request.max_new_tokens, left].into_iter().flatten();
        limits.fold(self.sampling.max_new_tokens, usize::min)
    }
}
