//! Sampling completions: continuous batching over a budgeted KV cache, `n` samples a prompt sharing its prefill.

mod choose;
mod engine;
mod limits;
mod prefill;
mod queue;
mod sampling;
mod slots;
mod stats;
#[cfg(test)]
mod tests;
mod truncate;

pub use limits::{Limits, MAX_NUM_BATCHED_TOKENS};
pub use sampling::Sampling;
pub use stats::Stats;

use crate::decoder::Packing;
use crate::random::DrawKey;
use crate::{Decoder, Error, Result, Tokenizer};
use engine::Engine;
use firebrick_backends::accounts::{Accounts, Category, Home};
use std::sync::Arc;

/// A prompt and where its randomness comes from.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt tokens; at least one.
    pub tokens: Vec<u32>,
    /// Randomness of its first sample; sample `i` adds `i` to `sample`.
    pub key: DrawKey,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// A stop id, or a stop string.
    Stop,
    /// The token limit.
    Length,
}

/// One sampled completion.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Index of its request.
    pub request: usize,
    /// Index among the request's samples.
    pub sample: usize,
    /// Completion tokens, the stop id included.
    pub tokens: Vec<u32>,
    /// Log-prob of each token under the distribution it was drawn from (temperature and truncation).
    pub logps: Vec<f32>,
    /// Log-prob of each token under the full distribution at the same temperature; equal to `logps` without truncation.
    pub full_logps: Vec<f32>,
    /// Why it ended.
    pub finish: Finish,
}

/// What a run of the engine gave.
#[derive(Clone, Debug)]
pub struct Generated {
    /// In order of requests and their samples.
    pub samples: Vec<Sample>,
    /// What it took.
    pub stats: Stats,
}

/// Samples completions with a decoder.
#[derive(Debug)]
pub struct Generator<'a> {
    decoder: &'a Decoder,
    tokenizer: Option<&'a Tokenizer>,
    sampling: &'a Sampling,
    accounts: Option<Arc<Accounts>>,
    packing: Packing,
}

impl<'a> Generator<'a> {
    /// A generator with checked settings. A tokenizer is needed for stop strings alone.
    pub fn new(
        decoder: &'a Decoder,
        tokenizer: Option<&'a Tokenizer>,
        sampling: &'a Sampling,
    ) -> Result<Self> {
        sampling.check()?;
        if tokenizer.is_none() && !sampling.stop_strings.is_empty() {
            return Err(Error::Sampling("stop strings need a tokenizer".into()));
        }
        Ok(Self {
            decoder,
            tokenizer,
            sampling,
            accounts: None,
            packing: Packing::default(),
        })
    }

    /// The same, telling its account how many bytes of keys and values it holds.
    #[must_use]
    pub fn accounted(mut self, accounts: &Arc<Accounts>) -> Self {
        self.accounts = Some(Arc::clone(accounts));
        self
    }

    /// The same, reading copies of the matrices as long as it runs.
    #[must_use]
    pub fn packing(mut self, packing: Packing) -> Self {
        self.packing = packing;
        self
    }

    /// Samples `n` completions of every request, at most `max_num_seqs` sequences at a time, in request order.
    pub fn run(&self, requests: &[Request], n: usize, max_num_seqs: usize) -> Result<Vec<Sample>> {
        let limits = Limits::new(max_num_seqs);
        Ok(self.run_with(requests, n, &limits, |_| {})?.samples)
    }

    /// The same under limits of one's own. `ended` sees every completion as soon as it has ended, in the order in which they do.
    pub fn run_with(
        &self,
        requests: &[Request],
        n: usize,
        limits: &Limits,
        mut ended: impl FnMut(&Sample),
    ) -> Result<Generated> {
        limits.check()?;
        for (i, request) in requests.iter().enumerate() {
            self.check_request(i, request, limits)?;
        }
        let mut samples = Vec::with_capacity(requests.len() * n);
        let mut keep = |sample| {
            ended(&sample);
            samples.push(sample);
        };
        let decoder = &self.decoder.packed(self.packing)?;
        let copies = self.accounts.as_ref().map(|accounts| {
            accounts.hold(Category::Parameters, Home::Device, decoder.packed_bytes())
        });
        let stats = Engine::new(self, decoder, requests, n, *limits, &mut keep)?.run()?;
        drop(copies);
        samples.sort_by_key(|s| (s.request, s.sample));
        Ok(Generated { samples, stats })
    }

    /// Most tokens of a request's completions.
    fn most_new(&self, request: &Request, limits: &Limits) -> usize {
        let room = limits
            .max_model_len
            .map(|most| most.saturating_sub(request.tokens.len()));
        self.sampling.max_new_tokens.min(room.unwrap_or(usize::MAX))
    }

    fn check_request(&self, index: usize, request: &Request, limits: &Limits) -> Result<()> {
        let arch = self.decoder.arch();
        let tokens = request.tokens.len();
        if tokens == 0 {
            return Err(Error::Sampling(format!(
                "prompt {index} is empty; it needs at least one token"
            )));
        }
        if let Some(most) = limits.max_model_len.filter(|&most| tokens >= most) {
            return Err(Error::Sampling(format!(
                "prompt {index} has {tokens} tokens and max_model_len is {most}, which leaves nothing for a completion"
            )));
        }
        let length = tokens + self.most_new(request, limits);
        if let Some(context) = arch.context().filter(|&context| length > context) {
            return Err(Error::TooLong {
                what: format!("prompt {index} with max_new_tokens"),
                length,
                context,
            });
        }
        check_ids(&request.tokens, arch.vocab_size)
    }

    /// Whether a completion has come to its end by itself.
    fn stops(&self, sample: &Sample) -> Result<bool> {
        let last = sample.tokens.last();
        if last.is_some_and(|last| self.sampling.stop_ids.contains(last)) {
            return Ok(true);
        }
        let (Some(tokenizer), false) = (self.tokenizer, self.sampling.stop_strings.is_empty())
        else {
            return Ok(false);
        };
        let text = tokenizer.decode(&sample.tokens, true)?;
        let stops = &self.sampling.stop_strings;
        Ok(stops.iter().any(|stop| text.contains(stop.as_str())))
    }
}

/// Refuses token ids that the embedding has no row for.
pub fn check_ids(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        Some(&id) => Err(Error::TokenOutOfRange { id, vocab }),
        None => Ok(()),
    }
}
