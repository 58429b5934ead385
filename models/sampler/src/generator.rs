//! The public way in: a decoder with checked sampling parameters.

use super::engine::Engine;
use super::engine_args::{EngineArgs, MemoryProbe};
use super::request::{GenerationRequest, Sample, check_ids};
use super::sampling_params::SamplingParams;
use super::scheduler_config::SchedulerConfig;
use super::stats::GenerationStats;
use super::stopping_criteria::StoppingCriteria;
use super::turns::{OneTurn, Turns};
use firebrick_arch::kv_cache::state_slots;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_models::cache::KvCache;
use firebrick_models::{Decoder, Error, Prepack, Result, Tokenizer};
use std::cell::RefCell;
use std::sync::Arc;

/// Completions and statistics of one run.
#[derive(Clone, Debug)]
pub struct Generated {
    /// In the order of requests and their samples.
    pub samples: Vec<Sample>,
    /// Counts and times.
    pub stats: GenerationStats,
}

/// Samples completions with a decoder.
///
/// The KV cache is made by the first run and stays as long as the generator: prompts of a later run that begin with a
/// prompt of an earlier one are prefilled from there on, and with [`SchedulerConfig::keep_completions`] also those that
/// begin with a whole completion (another turn of a conversation).
#[derive(Debug)]
pub struct Generator<'a> {
    decoder: &'a Decoder,
    pub(super) criteria: StoppingCriteria<'a>,
    accounts: Option<Arc<Accounts>>,
    prepack: Prepack,
    memory_probe: MemoryProbe<'a>,
    capture_sizes: Vec<usize>,
    cache: RefCell<Option<HeldCache>>,
}

/// A cache, and its bytes in the accounts.
#[derive(Debug)]
struct HeldCache {
    cache: KvCache,
    _holds: Vec<MemoryGuard>,
}

impl<'a> Generator<'a> {
    /// A generator. Only stop strings need a tokenizer.
    ///
    /// # Errors
    /// [`Error::Sampling`] for parameters out of range, and for stop strings without a tokenizer.
    pub fn new(decoder: &'a Decoder, tokenizer: Option<&'a Tokenizer>, sampling: &'a SamplingParams) -> Result<Self> {
        sampling.check()?;
        if tokenizer.is_none() && !sampling.stop_strings.is_empty() {
            return Err(Error::Sampling("stop strings need a tokenizer".into()));
        }
        Ok(Self {
            decoder,
            criteria: StoppingCriteria::new(tokenizer, sampling),
            accounts: None,
            prepack: Prepack::default(),
            memory_probe: MemoryProbe::default(),
            capture_sizes: Vec::new(),
            cache: RefCell::new(None),
        })
    }

    /// Counts the bytes of the KV cache and of prepacked weights in these accounts.
    #[must_use]
    pub fn with_accounts(mut self, accounts: &Arc<Accounts>) -> Self {
        self.accounts = Some(Arc::clone(accounts));
        self
    }

    /// Samples with prepacked copies of the weights, which exist while it runs.
    #[must_use]
    pub fn prepack(mut self, prepack: Prepack) -> Self {
        self.prepack = prepack;
        self
    }

    /// Calls `probe` at the moments when sampling holds the most memory: after each forward pass of prompts, and while
    /// the logits of first tokens, and of the first decoded token after others have entered, are there.
    #[must_use]
    pub fn with_memory_probe(mut self, probe: &'a (dyn Fn() + Sync)) -> Self {
        self.memory_probe = MemoryProbe(Some(probe));
        self
    }

    /// Captures decoding steps of these numbers of rows as graphs on a GPU (vLLM's `cudagraph_capture_sizes`), and
    /// replays them; steps of fewer rows are padded to the next of them. None, the default, runs every step kernel by
    /// kernel. Sampled tokens do not depend on it.
    #[must_use]
    pub fn capture_sizes(mut self, sizes: &[usize]) -> Self {
        self.capture_sizes = sizes.to_vec();
        self
    }

    /// Samples `n` completions of every request, at most `max_num_seqs` sequences at a time; they come in the order of
    /// requests and their samples.
    ///
    /// # Errors
    /// As [`Self::run_with`].
    pub fn run(&self, requests: &[GenerationRequest], n: usize, max_num_seqs: usize) -> Result<Vec<Sample>> {
        let config = SchedulerConfig::new(max_num_seqs);
        Ok(self.run_with(requests, n, &config, |_| {})?.samples)
    }

    /// [`Self::run`] within the limits of `config`. `ended` gets every completion as soon as it ends, in that order.
    ///
    /// # Errors
    /// [`Error::Sampling`] for an empty prompt and limits that no sequence fits, [`Error::TooLong`] for a prompt that
    /// does not leave room for a completion in the model's context, [`Error::TokenOutOfRange`], [`Error::OutOfMemory`],
    /// and [`Error::Device`].
    pub fn run_with(
        &self,
        requests: &[GenerationRequest],
        n: usize,
        config: &SchedulerConfig,
        ended: impl FnMut(&Sample),
    ) -> Result<Generated> {
        self.run_turns(requests, n, config, &mut OneTurn, ended)
    }

    /// [`Self::run_with`] over several turns: `turns` answers each. The limits are those of the whole completion,
    /// tokens inserted between turns included.
    ///
    /// # Errors
    /// As [`Self::run_with`]; [`Error::Sampling`] for answers that leave no room for a turn, or that were not asked
    /// for.
    pub fn run_turns(
        &self,
        requests: &[GenerationRequest],
        n: usize,
        config: &SchedulerConfig,
        turns: &mut dyn Turns,
        mut ended: impl FnMut(&Sample),
    ) -> Result<Generated> {
        config.check()?;
        if requests.is_empty() {
            // one of several ranks may have been dealt none
            return Ok(Generated { samples: Vec::new(), stats: GenerationStats::default() });
        }
        for (i, request) in requests.iter().enumerate() {
            self.check_request(i, request, config)?;
        }
        let mut samples = Vec::with_capacity(requests.len() * n);
        let mut keep = |sample| {
            ended(&sample);
            samples.push(sample);
        };
        let decoder = &self.decoder.prepacked(self.prepack)?;
        let copies = self
            .accounts
            .as_ref()
            .map(|accounts| accounts.hold(Category::Parameters, Home::Device, decoder.prepacked_bytes()));
        let args = EngineArgs {
            decoder,
            criteria: self.criteria,
            config: *config,
            memory_probe: self.memory_probe,
            capture_sizes: &self.capture_sizes,
        };
        let mut held = self.cache.borrow_mut();
        let cache = self.fitting(&mut held, requests, n, config)?;
        let stats = Engine::new(args, cache, requests, n, turns, &mut keep).run();
        if stats.is_err() {
            // it holds the blocks of sequences that nobody ends
            *held = None;
        }
        let stats = stats?;
        drop(copies);
        samples.sort_by_key(|s| (s.request, s.sample));
        Ok(Generated { samples, stats })
    }

    /// The cache of earlier runs, made larger where that stays within the limit, or a new one.
    fn fitting<'h>(
        &self,
        held: &'h mut Option<HeldCache>,
        requests: &[GenerationRequest],
        n: usize,
        config: &SchedulerConfig,
    ) -> Result<&'h mut KvCache> {
        let (arch, device) = (self.decoder.arch(), self.decoder.device());
        let length = |r: &GenerationRequest| r.tokens.len() + self.criteria.max_new_tokens(r, config);
        let longest = requests.iter().map(length).max().unwrap_or(0);
        let blocks = config.blocks(arch, requests.len() * n, longest)?;
        let dtype = config.kv_cache_dtype;
        let limit = config.kv_cache_bytes.unwrap_or(usize::MAX);
        let fits = |held: &HeldCache| held.cache.dtype() == dtype && held.cache.bytes_with(&blocks) <= limit;
        let mut cache = match held.take().filter(fits) {
            Some(earlier) => earlier.cache,
            None => KvCache::new(arch, &blocks, dtype, device),
        };
        cache.grow(&blocks);
        let running = config.max_num_seqs.min(requests.len() * n);
        cache.grow_states(state_slots(running));
        cache.keep_contents(config.keep_completions);
        let homes = [(Home::Device, cache.bytes()), (Home::Host, cache.route_bytes())];
        let holds = self
            .accounts
            .iter()
            .flat_map(|accounts| homes.map(|(home, bytes)| accounts.hold(Category::KvCache, home, bytes)));
        let holds = holds.collect();
        let held = held.insert(HeldCache { cache, _holds: holds });
        Ok(&mut held.cache)
    }

    fn check_request(&self, index: usize, request: &GenerationRequest, config: &SchedulerConfig) -> Result<()> {
        let arch = self.decoder.arch();
        let tokens = request.tokens.len();
        if tokens == 0 {
            return Err(Error::Sampling(format!("prompt {index} is empty; it needs at least one token")));
        }
        if request.max_new_tokens == Some(0) {
            return Err(Error::Sampling(format!("max_new_tokens of prompt {index} must be at least 1")));
        }
        if let Some(most) = config.max_model_len.filter(|&most| tokens >= most) {
            return Err(Error::Sampling(format!(
                "prompt {index} has {tokens} tokens and max_model_len is {most}, which leaves nothing for a completion"
            )));
        }
        let length = tokens + self.criteria.max_new_tokens(request, config);
        if let Some(context) = arch.context().filter(|&context| length > context) {
            return Err(Error::TooLong { what: format!("prompt {index} with max_new_tokens"), length, context });
        }
        check_ids(&request.tokens, arch.vocab_size)
    }
}
