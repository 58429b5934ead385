//! Completions that are being sampled.

use super::request::{FinishReason, GenerationRequest, Sample};
use firebrick_models::random::DrawKey;
use firebrick_models::routing::Routes;
use std::sync::Arc;

/// A sampled token and its log-probabilities in nats.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampledToken {
    pub token: u32,
    /// Under the distribution it was drawn from.
    pub logp: f32,
    /// Under the distribution before truncation.
    pub full_logp: f32,
}

/// A completion that has not ended.
#[derive(Debug)]
pub(super) struct Sequence {
    pub sample: Sample,
    pub key: DrawKey,
    /// True if it gave up its blocks once.
    pub preempted: bool,
}

impl Sequence {
    /// A sequence without tokens, for sample `sample` of request `request`.
    pub fn new(requests: &[GenerationRequest], request: usize, sample: usize) -> Self {
        let key = requests[request].key;
        Self {
            sample: Sample {
                request,
                sample,
                tokens: Vec::new(),
                inserted: Vec::new(),
                logps: Vec::new(),
                full_logps: Vec::new(),
                finish: FinishReason::Length,
                routes: None,
            },
            key: DrawKey { sample: key.sample + sample as u32, ..key },
            preempted: false,
        }
    }

    /// Its order of arrival, which identifies it; the oldest is the smallest.
    pub fn arrival(&self) -> (usize, usize) {
        (self.sample.request, self.sample.sample)
    }

    pub fn push(&mut self, token: SampledToken) {
        self.sample.tokens.push(token.token);
        self.sample.logps.push(token.logp);
        self.sample.full_logps.push(token.full_logp);
    }

    /// Adds tokens that were not sampled, after which it continues.
    pub fn insert(&mut self, tokens: &[u32]) {
        let sample = &mut self.sample;
        let start = sample.tokens.len();
        sample.tokens.extend(tokens);
        sample.logps.resize(sample.tokens.len(), 0.0);
        sample.full_logps.resize(sample.tokens.len(), 0.0);
        sample.inserted.push(start..sample.tokens.len());
        sample.finish = FinishReason::Length;
    }

    /// Adds the routes of its tokens. Those of tokens that ran before it was preempted stay: its log-probs are theirs.
    pub fn add_routes(&mut self, mut routes: Routes) {
        if let Some(earlier) = &self.sample.routes {
            routes.set(0, earlier);
        }
        self.sample.routes = Some(Arc::new(routes));
    }

    /// Removes its tokens; the same ones will be sampled again.
    pub fn restart(&mut self) {
        self.sample.finish = FinishReason::Length;
        self.sample.tokens.clear();
        self.sample.inserted.clear();
        self.sample.logps.clear();
        self.sample.full_logps.clear();
        self.sample.routes = None;
    }
}

/// Tokens to be prefilled, and the sequences that continue them.
#[derive(Debug)]
pub(super) struct SequenceGroup {
    /// A prompt, followed by the sampled tokens of a preempted sequence.
    pub tokens: Vec<u32>,
    /// All samples of the prompt, or one preempted sequence.
    pub members: Vec<Sequence>,
    /// True if the tokens were prefilled before.
    pub recomputed: bool,
}

impl SequenceGroup {
    /// True if its tokens are a prompt alone.
    pub fn is_prompt(&self) -> bool {
        let mut members = self.members.iter();
        members.all(|member| member.sample.tokens.is_empty())
    }
}
