//! Continuous batching: at most `max_num_seqs` sequences are decoded at a time, and a waiting sequence enters as soon
//! as another ends.
//!
//! One iteration admits prefilled sequences, prefills one chunk of prompts if there is room for more sequences, and
//! decodes one token of every running sequence. So prompts of any length delay decoding by one forward pass of
//! `max_num_batched_tokens` at most.
//!
//! GPU work is asynchronous. With asynchronous scheduling the next token is launched before the host has read the last
//! one, as long as the host has nothing to change: no sequence waits to enter, the cache has the blocks, and no
//! completion is about to reach its length limit. The device is then never idle; a sequence that ends with the unread
//! token is decoded for one token more, which is discarded.
//!
//! When the cache has no block left, prefilled sequences that are not running give theirs up first; then the youngest
//! running sequences are preempted: they wait, and are recomputed from their prompt and their sampled tokens, as far as
//! the cache does not still have them. A draw depends on the sequence and the position alone, so the tokens are the
//! same. The oldest sequence is never preempted, so every sequence ends.
//!
//! All of it follows from requests, limits and tokens, so that ranks that share the model do the same, each with its
//! own part of the cache.

mod decode;
mod next_turn;

use super::decode_steps::DecodeSteps;
use super::engine_args::EngineArgs;
use super::prefill::{Prefill, Prefilled, PrefilledGroup, WaitingQueue};
use super::request::{FinishReason, GenerationRequest, Sample};
use super::sampler::{RandomDraw, SampledTokens, sample};
use super::sequence::{SampledToken, Sequence};
use super::stats::GenerationStats;
use super::turns::{Next, Turns};
use burn::tensor::{Int, Tensor, TensorData};
use decode::{Row, Running, reserve};
use firebrick_backends::device::is_accelerator;
use firebrick_backends::heartbeat::beat;
use firebrick_models::Result;
use firebrick_models::cache::{BLOCK_SIZE, BlockTable, Boundary, KvCache};
use std::collections::VecDeque;
use std::time::Instant;

/// Prompts are prefilled for at least the slots over this, so that short prompts are not prefilled one at a time.
const PREFILL_SHARE: usize = 8;

/// One run over a list of requests.
pub(super) struct Engine<'a> {
    args: EngineArgs<'a>,
    cache: &'a mut KvCache,
    /// Most sequences at a time.
    max_num_seqs: usize,
    waiting: WaitingQueue<'a>,
    prefill: Option<Prefill>,
    prefilled: VecDeque<PrefilledGroup>,
    running: Running,
    /// Most running sequences now: fewer for a while after a preemption.
    most: usize,
    /// True if prompts are prefilled one at a time, since the cache was too small for more.
    one_by_one: bool,
    /// True if the running sequences have been decoded.
    decoding: bool,
    /// True if a token is launched before the host has read the last one.
    async_scheduling: bool,
    /// Decoding steps on a GPU; elsewhere there are none.
    steps: Option<DecodeSteps>,
    /// The last token of every row, if the host has not read it.
    pending: Option<PendingTokens>,
    stats: GenerationStats,
    /// Follows from all tokens so far and their order: ranks that share the model compare it.
    fingerprint: u64,
    /// Answers turns.
    turns: &'a mut dyn Turns,
    /// Sequences whose turn has not been answered yet.
    parked: Vec<Sequence>,
    ended: &'a mut dyn FnMut(Sample),
}

/// Tokens that were launched, and the number of sequences.
struct PendingTokens {
    tokens: SampledTokens,
    live: usize,
}

impl<'a> Engine<'a> {
    pub fn new(
        args: EngineArgs<'a>,
        cache: &'a mut KvCache,
        requests: &'a [GenerationRequest],
        n: usize,
        turns: &'a mut dyn Turns,
        ended: &'a mut dyn FnMut(Sample),
    ) -> Self {
        let (decoder, config) = (args.decoder, args.config);
        let waiting = WaitingQueue::new(requests, n);
        let max_num_seqs = config.max_num_seqs.min(waiting.sequences());
        let length = |r: &GenerationRequest| r.tokens.len() + args.criteria.max_new_tokens(r, &config);
        let longest = requests.iter().map(length).max().unwrap_or(1);
        let steps = || DecodeSteps::new(args.capture_sizes, longest.div_ceil(BLOCK_SIZE));
        let stats = GenerationStats { cache_bytes: cache.bytes(), ..GenerationStats::default() };
        Self {
            args,
            cache,
            max_num_seqs,
            waiting,
            prefill: None,
            prefilled: VecDeque::new(),
            running: Running::default(),
            most: max_num_seqs,
            one_by_one: false,
            decoding: false,
            async_scheduling: config.async_scheduling.unwrap_or_else(|| is_accelerator(decoder.device())),
            steps: decoder.decodes_on_device().then(steps),
            pending: None,
            stats,
            fingerprint: 0,
            turns,
            parked: Vec::new(),
            ended,
        }
    }

    /// Runs until every sequence has ended.
    pub fn run(mut self) -> Result<GenerationStats> {
        loop {
            beat();
            if !self.may_launch_ahead() {
                let started = Instant::now();
                self.read_pending()?;
                self.stats.decode_time += started.elapsed();
            }
            self.admit();
            if self.schedule_prefill() {
                let started = Instant::now();
                self.prefill()?;
                self.stats.prefill_time += started.elapsed();
                // decoding few sequences costs nearly as much as many: it waits until as many run as may
                if !self.decoding {
                    continue;
                }
            }
            if self.running.live() > 0 {
                let started = Instant::now();
                self.decode()?;
                self.stats.decode_time += started.elapsed();
            } else if self.waiting.is_empty() && self.prefilled.is_empty() && self.prefill.is_none() {
                if self.parked.is_empty() {
                    self.args.decoder.same_tokens(self.fingerprint)?;
                    return Ok(self.stats);
                }
                self.take_awaited()?;
            }
        }
    }

    /// Prefilled sequences that are not running.
    fn outside(&self) -> usize {
        self.prefilled.iter().map(|group| group.members.len()).sum()
    }

    /// Lets prefilled sequences run. Each shares the blocks of its group.
    fn admit(&mut self) {
        if self.running.live() == 0 {
            self.decoding = false;
        }
        while let Some(group) = self.prefilled.front_mut() {
            let live = self.running.live();
            if live >= self.most || (live > 0 && !self.cache.has_blocks(reserve(live) + 1)) {
                break;
            }
            let Some(sequence) = group.members.pop_front() else {
                unreachable!("a group without members is removed");
            };
            let table = if group.members.is_empty() {
                self.prefilled.pop_front().map(|group| group.table)
            } else {
                Some(self.cache.fork(&mut group.table))
            };
            let table = table.unwrap_or_else(|| unreachable!("it was the first"));
            self.running.admit(Row { sequence, table });
        }
    }

    /// True if a chunk of prompts should run now: a prefill has begun, or one begins for sequences that may run.
    fn schedule_prefill(&mut self) -> bool {
        if self.prefill.is_some() {
            return true;
        }
        let free = (self.most - self.running.live().min(self.most)).saturating_sub(self.outside());
        if free == 0 || self.waiting.is_empty() || (self.one_by_one && !self.prefilled.is_empty()) {
            return false;
        }
        self.prefill = self.next_prompts(free);
        self.prefill.is_some()
    }

    /// The next prompts: as many as have sequences that may run, within the tokens of one forward pass and the blocks
    /// of the cache. `None` where the cache has no room beside the running sequences.
    fn next_prompts(&mut self, free: usize) -> Option<Prefill> {
        let wanted = free.max(self.max_num_seqs / PREFILL_SHARE);
        let live = self.running.live() + self.outside();
        let (mut groups, mut members, mut tokens, mut blocks) = (Vec::new(), 0, 0, 0);
        while let Some(len) = self.waiting.front() {
            let more = len.div_ceil(BLOCK_SIZE) + 1;
            let fits = self.cache.has_blocks(reserve(live) + blocks + more);
            if groups.is_empty() {
                // with nothing else in the cache there is room for any sequence
                if !fits && live > 0 {
                    return None;
                }
            } else if members >= wanted
                || self.one_by_one
                || !fits
                || tokens + len > self.args.config.max_num_batched_tokens
            {
                break;
            }
            let Some(group) = self.waiting.pop() else {
                break;
            };
            (tokens, blocks) = (tokens + len, blocks + more);
            members += group.members.len();
            groups.push(group);
        }
        (!groups.is_empty()).then(|| Prefill::new(groups))
    }

    /// Prefills a chunk of prompts; a group whose last token has run gets the first token of each of its sequences.
    fn prefill(&mut self) -> Result<()> {
        let Some(prefill) = &mut self.prefill else {
            return Ok(());
        };
        let ran = prefill.run(&self.args, self.cache);
        self.args.decoder.check_ranks()?;
        if prefill.is_empty() {
            self.prefill = None;
        }
        self.record_blocks();
        let (groups, hidden) = match ran {
            Prefilled::Ran(groups, hidden) => (groups, hidden),
            Prefilled::NoBlocks => {
                self.drop_prefilled();
                return Ok(());
            }
        };
        for group in &groups {
            let run = group.tokens.len() - group.found;
            if group.recomputed {
                self.stats.recomputed_tokens += run;
            } else {
                self.stats.prefill_tokens += run;
            }
            self.stats.prefix_cache_hits += group.found;
        }
        hidden.map_or(Ok(()), |hidden| self.sample_first_tokens(&hidden, groups))
    }

    /// Samples the first token of every sequence of these groups, given the hidden states of their last column,
    /// `[groups, hidden]`.
    fn sample_first_tokens(&mut self, hidden: &Tensor<2>, prefilled: Vec<PrefilledGroup>) -> Result<()> {
        let mut prefilled: Vec<Option<PrefilledGroup>> = prefilled.into_iter().map(Some).collect();
        let mut sequences: Vec<(usize, bool, Sequence)> = Vec::new();
        for (i, group) in prefilled.iter_mut().enumerate() {
            let members = group.iter_mut().flat_map(|group| group.members.drain(..));
            let first = sequences.len();
            sequences.extend(members.map(|sequence| (i, false, sequence)));
            if let [(_, alone, _)] = &mut sequences[first..] {
                *alone = true;
            }
        }
        // at most as many rows of logits at a time as in decoding
        let mut sequences = sequences.into_iter().peekable();
        while sequences.peek().is_some() {
            let few: Vec<_> = sequences.by_ref().take(self.max_num_seqs).collect();
            let rows = self.ints(few.iter().map(|(group, ..)| *group as i32).collect());
            let draws: Vec<RandomDraw> =
                few.iter().map(|(.., sequence)| RandomDraw::next(sequence.key, sequence.sample.tokens.len())).collect();
            let EngineArgs { decoder, memory_probe, .. } = self.args;
            let hidden = hidden.clone().select(0, rows);
            let logits = memory_probe.logits(decoder, hidden, self.fingerprint);
            decoder.check_ranks()?;
            let sampling = self.args.criteria.sampling;
            let tokens = sample(&logits, sampling, &draws, decoder.is_exact())?.read()?;
            for ((group, alone, mut sequence), token) in few.into_iter().zip(tokens) {
                let ended = self.accept(&mut sequence, token)?;
                match &mut prefilled[group] {
                    Some(group) if !ended => group.members.push_back(sequence),
                    // what it leaves behind is its own
                    slot if alone => {
                        let table = slot.take().map(|group| group.table);
                        self.end(sequence, table)?;
                    }
                    slot => {
                        if let Some(group) = slot {
                            self.add_routes(&mut sequence, &group.table);
                        }
                        self.end(sequence, None)?;
                    }
                }
            }
        }
        for group in prefilled.into_iter().flatten() {
            if group.members.is_empty() {
                self.cache.free(group.table);
            } else {
                self.prefilled.push_back(group);
            }
        }
        Ok(())
    }

    /// Gets every running sequence a place for its next token. Where the cache has none, prefilled sequences give up
    /// their blocks, then the youngest sequences are preempted.
    fn append(&mut self) {
        for row in 0..self.running.rows.len() {
            while let Some(member) = &mut self.running.rows[row] {
                if self.cache.append(&mut member.table, 1) {
                    break;
                }
                if self.prefill.is_some() || !self.prefilled.is_empty() {
                    self.drop_prefilled();
                } else if let Some(youngest) = self.running.preempt() {
                    self.stats.preemptions += 1;
                    self.stats.preempted += usize::from(!youngest.sequence.preempted);
                    let sequence = self.give_up(youngest);
                    self.waiting.put_back(sequence);
                    self.most = self.running.live().max(1);
                }
            }
        }
    }

    /// Frees the blocks of a running sequence; those that are full stay in the cache as long as it has others.
    fn give_up(&mut self, row: Row) -> Sequence {
        let Row { mut sequence, mut table } = row;
        sequence.preempted = true;
        self.add_routes(&mut sequence, &table);
        self.keep_prefix(&sequence, &mut table);
        self.cache.free(table);
        sequence
    }

    /// Keeps the full blocks of a sequence for others that begin with its tokens. Keys and values of its last token are
    /// not written.
    fn keep_prefix(&mut self, sequence: &Sequence, table: &mut BlockTable) {
        let tokens = self.tokens_of(sequence);
        self.cache.keep_prefix(table, &tokens[..tokens.len() - 1]);
    }

    /// A sequence's prompt and its completion so far.
    fn tokens_of(&self, sequence: &Sequence) -> Vec<u32> {
        let sample = &sequence.sample;
        let prompt = &self.waiting.requests[sample.request].tokens;
        [prompt.as_slice(), &sample.tokens].concat()
    }

    /// Sequences that were prefilled or are in prefill wait again.
    fn drop_prefilled(&mut self) {
        self.one_by_one = true;
        for mut group in self.prefilled.drain(..) {
            self.stats.preemptions += group.members.len();
            for member in &mut group.members {
                self.stats.preempted += usize::from(!member.preempted);
                member.preempted = true;
            }
            self.cache.free(group.table);
            self.waiting.put_back_together(group.tokens, group.members.into());
        }
        if let Some(prefill) = self.prefill.take() {
            for group in prefill.into_groups(self.cache) {
                self.waiting.put_back_together(group.tokens, group.members);
            }
        }
    }

    /// Appends a token; whether the sequence has ended with it.
    fn accept(&mut self, sequence: &mut Sequence, token: SampledToken) -> Result<bool> {
        self.stats.new_tokens += 1;
        // Knuth's multiplier: an order of tokens has a number of its own, but for one in 2⁶⁴
        self.fingerprint =
            (self.fingerprint ^ u64::from(token.token)).wrapping_add(1).wrapping_mul(6_364_136_223_846_793_005);
        sequence.push(token);
        let sample = &mut sequence.sample;
        if self.args.criteria.is_met(sample)? {
            sample.finish = FinishReason::Stop;
            return Ok(true);
        }
        Ok(sample.tokens.len() >= self.max_new_tokens(sequence))
    }

    /// Most tokens of a sequence's completion.
    fn max_new_tokens(&self, sequence: &Sequence) -> usize {
        let request = &self.waiting.requests[sequence.sample.request];
        self.args.criteria.max_new_tokens(request, &self.args.config)
    }

    /// Ends a turn: the sequence continues, waits to be answered, or has ended.
    fn end(&mut self, mut sequence: Sequence, table: Option<BlockTable>) -> Result<()> {
        if let Some(table) = &table {
            self.add_routes(&mut sequence, table);
        }
        let room = self.max_new_tokens(&sequence).saturating_sub(sequence.sample.tokens.len());
        let next = self.turns.turn(&sequence.sample, room);
        if let Some(mut table) = table {
            if self.args.config.keep_completions {
                let at = match next {
                    Next::Append(_) | Next::Wait => Boundary::Turn,
                    Next::End | Next::Cut | Next::Restart => Boundary::Ended,
                };
                // one token more where the last one was run before the host had read it
                let ran = self.tokens_of(&sequence);
                let ran = &ran[..table.tokens()];
                self.cache.save_states(&mut table, ran, at);
            }
            self.cache.free(table);
        }
        self.most = (self.most + 1).min(self.max_num_seqs);
        self.one_by_one = false;
        self.continue_sequence(sequence, next)
    }

    /// Adds the routes of a sequence's tokens that have run: all but the last.
    fn add_routes(&self, sequence: &mut Sequence, table: &BlockTable) {
        let sample = &sequence.sample;
        let prompt = self.waiting.requests[sample.request].tokens.len();
        let ran = prompt + sample.tokens.len() - 1;
        if let Some(routes) = self.cache.routes_of(table, ran) {
            sequence.add_routes(routes);
        }
    }

    fn record_blocks(&mut self) {
        self.stats.peak_cache_bytes = self.stats.peak_cache_bytes.max(self.cache.used_bytes());
        self.stats.peak_blocks = self.stats.peak_blocks.max(self.cache.used_blocks());
    }

    /// Counts what the blocks of a decoding step hold.
    fn record_waste(&mut self) {
        let running = self.running.rows.iter().flatten().map(|row| &row.table);
        let prefilled = self.prefilled.iter().map(|group| &group.table);
        let tables = || running.clone().chain(prefilled.clone());
        let unused: usize = tables().map(BlockTable::unused_slots).sum();
        let in_prefill = self.prefill.as_ref().map_or(0, Prefill::unused_slots);
        self.stats.block_slots += self.cache.used_blocks() * BLOCK_SIZE;
        self.stats.unused_slots += unused + in_prefill;
        self.stats.blocks += self.cache.used_blocks();
        let unshared: usize = tables().map(|table| self.cache.blocks_of(table)).sum();
        self.stats.unshared_blocks += unshared;
    }

    fn ints(&self, values: Vec<i32>) -> Tensor<1, Int> {
        let count = values.len();
        Tensor::from_data(TensorData::new(values, [count]), self.args.decoder.device())
    }
}
