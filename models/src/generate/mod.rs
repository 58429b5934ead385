//! Sampling completions: batches of prompts of different length, `n` samples a prompt sharing its prefill.

mod choose;
mod truncate;

use crate::cache::KvCache;
use crate::layer::{Columns, Context};
use crate::random::DrawKey;
use crate::{Decoder, Error, Result, Tokenizer};
use burn::tensor::{Int, Tensor, TensorData};
use choose::Chosen;

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

/// Samples completions with a decoder.
#[derive(Debug)]
pub struct Generator<'a> {
    decoder: &'a Decoder,
    tokenizer: Option<&'a Tokenizer>,
    sampling: &'a Sampling,
}

/// A completion in the making.
struct Row {
    sample: Sample,
    key: DrawKey,
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
        })
    }

    /// Samples `n` completions of every request, at most `max_rows` sequences at a time, in request order.
    pub fn run(&self, requests: &[Request], n: usize, max_rows: usize) -> Result<Vec<Sample>> {
        for (i, request) in requests.iter().enumerate() {
            self.check_request(i, request)?;
        }
        let mut samples = Vec::with_capacity(requests.len() * n);
        let prompts = (max_rows / n.max(1)).max(1);
        for (chunk, batch) in requests.chunks(prompts).enumerate() {
            samples.extend(self.batch(batch, n, chunk * prompts)?);
        }
        Ok(samples)
    }

    fn check_request(&self, index: usize, request: &Request) -> Result<()> {
        let arch = self.decoder.arch();
        if request.tokens.is_empty() {
            return Err(Error::Sampling(format!(
                "prompt {index} is empty; it needs at least one token"
            )));
        }
        let length = request.tokens.len() + self.sampling.max_new_tokens;
        if let Some(context) = arch.context().filter(|&context| length > context) {
            return Err(Error::TooLong {
                what: format!("prompt {index} with max_new_tokens"),
                length,
                context,
            });
        }
        check_ids(&request.tokens, arch.vocab_size)
    }

    fn batch(&self, requests: &[Request], n: usize, first: usize) -> Result<Vec<Sample>> {
        let device = self.decoder.device();
        let width = requests.iter().map(|r| r.tokens.len()).max().unwrap_or(0);
        let starts: Vec<usize> = requests.iter().map(|r| width - r.tokens.len()).collect();
        let ids: Vec<i32> = requests
            .iter()
            .zip(&starts)
            .flat_map(|(r, &pad)| {
                std::iter::repeat_n(0, pad).chain(r.tokens.iter().map(|&t| t as i32))
            })
            .collect();
        let mut cache = KvCache::new(self.decoder.arch(), starts, width, device);
        let hidden = self.forward(ids, width, &mut cache);
        let d = self.decoder.arch().hidden_size;
        let last = hidden
            .reshape([requests.len(), width, d])
            .narrow(1, width - 1, 1)
            .reshape([requests.len(), d]);
        let logits = self.decoder.head().logits(last);

        let source: Vec<usize> = (0..requests.len())
            .flat_map(|r| std::iter::repeat_n(r, n))
            .collect();
        let rows = source
            .iter()
            .enumerate()
            .map(|(i, &r)| Row {
                sample: Sample {
                    request: first + r,
                    sample: i % n,
                    tokens: Vec::new(),
                    logps: Vec::new(),
                    full_logps: Vec::new(),
                    finish: Finish::Length,
                },
                key: DrawKey {
                    sample: requests[r].key.sample + (i % n) as u32,
                    ..requests[r].key
                },
            })
            .collect();
        let cache = cache.pick(&source, width + self.sampling.max_new_tokens, device);
        let logits = logits.select(0, index_tensor(&source, self.decoder));
        self.decode(rows, cache, logits)
    }

    /// Draws, stops, feeds back, until every row has ended.
    fn decode(
        &self,
        mut rows: Vec<Row>,
        mut cache: KvCache,
        mut logits: Tensor<2>,
    ) -> Result<Vec<Sample>> {
        let mut done = Vec::with_capacity(rows.len());
        for position in 0..self.sampling.max_new_tokens {
            let keys: Vec<DrawKey> = rows.iter().map(|r| r.key).collect();
            let chosen = choose::choose(logits, self.sampling, &keys, position as u32)?;
            let mut live = Vec::with_capacity(rows.len());
            for (i, (row, chosen)) in rows.iter_mut().zip(&chosen).enumerate() {
                if !self.accept(&mut row.sample, *chosen)? {
                    live.push(i);
                }
            }
            if live.is_empty() || position + 1 == self.sampling.max_new_tokens {
                break;
            }
            // dropping finished rows copies the cache, so it waits until that is worth it
            if live.len() * 4 <= rows.len() * 3 {
                let capacity = cache.capacity();
                cache = cache.pick(&live, capacity, self.decoder.device());
                let mut kept = Vec::with_capacity(live.len());
                for (i, row) in rows.into_iter().enumerate() {
                    if live.binary_search(&i).is_ok() {
                        kept.push(row);
                    } else {
                        done.push(row.sample);
                    }
                }
                rows = kept;
            }
            let ids = rows
                .iter()
                .map(|r| r.sample.tokens.last().map_or(0, |&t| t as i32))
                .collect();
            let hidden = self.forward(ids, 1, &mut cache);
            logits = self.decoder.head().logits(hidden);
        }
        done.extend(rows.into_iter().map(|r| r.sample));
        done.sort_by_key(|s| (s.request, s.sample));
        Ok(done)
    }

    /// Adds a token to a completion that has not ended; says whether it has ended now.
    fn accept(&self, sample: &mut Sample, chosen: Chosen) -> Result<bool> {
        if sample.finish == Finish::Stop {
            return Ok(true);
        }
        sample.tokens.push(chosen.token);
        sample.logps.push(chosen.logp);
        sample.full_logps.push(chosen.full_logp);
        if self.sampling.stop_ids.contains(&chosen.token) || self.spells_stop(&sample.tokens)? {
            sample.finish = Finish::Stop;
        }
        Ok(sample.finish == Finish::Stop)
    }

    fn spells_stop(&self, tokens: &[u32]) -> Result<bool> {
        let (Some(tokenizer), false) = (self.tokenizer, self.sampling.stop_strings.is_empty())
        else {
            return Ok(false);
        };
        let text = tokenizer.decode(tokens, true)?;
        Ok(self
            .sampling
            .stop_strings
            .iter()
            .any(|s| text.contains(s.as_str())))
    }

    fn forward(&self, ids: Vec<i32>, len: usize, cache: &mut KvCache) -> Tensor<2> {
        let (decoder, device) = (self.decoder, self.decoder.device());
        let columns = Columns {
            starts: cache.starts(),
            first: cache.used(),
            len,
        };
        let ctx = Context::new(decoder.arch(), columns, device);
        let count = ids.len();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [count]), device);
        decoder.hidden_cached(ids, &ctx, cache)
    }
}

/// Refuses token ids that the embedding has no row for.
pub fn check_ids(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        Some(&id) => Err(Error::TokenOutOfRange { id, vocab }),
        None => Ok(()),
    }
}

fn index_tensor(rows: &[usize], decoder: &Decoder) -> Tensor<1, Int> {
    let rows: Vec<i32> = rows.iter().map(|&r| r as i32).collect();
    Tensor::from_ints(rows.as_slice(), decoder.device())
}
