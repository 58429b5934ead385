//! Continuous batching: sequences are decoded in a fixed number of slots, and a waiting sequence takes a slot as soon as another
//! sequence ends.
//!
//! One iteration moves prefilled sequences into free slots, prefills one chunk of prompts if slots are free, and decodes one token of
//! every sequence in a slot. So prompts of any length delay decoding by one forward pass of `max_num_batched_tokens` at most.
//!
//! GPU work is asynchronous. With asynchronous scheduling the next token is launched before the host has read the last one, as long as
//! the host has nothing to change: no sequence waits for a slot, the cache has a free column, and no completion is about to reach its
//! length limit. The device is then never idle; a sequence that ends with the unread token is decoded for one token more, which is
//! discarded.
//!
//! When the cache is full, prefilled sequences without a slot give up their cache first; then the youngest sequences in slots are
//! preempted: they wait, and are recomputed from their prompt and their sampled tokens. A draw depends on the sequence and the
//! position alone, so the tokens are the same. The oldest sequence is never preempted, so every sequence ends.

use super::engine_args::EngineArgs;
use super::prefill::{Prefill, PrefilledGroup};
use super::request::{FinishReason, GenerationRequest, Sample};
use super::sampler::{RandomDraw, SampledTokens, sample};
use super::sequence::{SampledToken, Sequence};
use super::slots::{Around, Room, Slots};
use super::stats::GenerationStats;
use super::waiting_queue::WaitingQueue;
use crate::Result;
use crate::forward_context::{Columns, ForwardContext};
use burn::tensor::{Int, Tensor, TensorData};
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::device::{is_accelerator, is_cpu};
use firebrick_backends::kernels::in_thread_pool;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

/// Prompts are prefilled for at least the slots over this, so that short prompts are not prefilled one at a time.
const PREFILL_SHARE: usize = 8;

/// One run over a list of requests.
pub(super) struct Engine<'a> {
    args: EngineArgs<'a>,
    room: Room,
    waiting: WaitingQueue<'a>,
    prefill: Option<Prefill>,
    prefilled: VecDeque<PrefilledGroup>,
    slots: Slots,
    /// Most sequences in slots now: fewer for a while after a preemption.
    most: usize,
    /// Whether prompts are prefilled one at a time, since the cache was too small for more.
    one_by_one: bool,
    /// Whether the sequences in the slots have been decoded.
    decoding: bool,
    /// Whether a token is launched before the host has read the last one.
    async_scheduling: bool,
    /// The last token of every row, if the host has not read it.
    pending: Option<PendingTokens>,
    stats: GenerationStats,
    hold: Option<MemoryGuard>,
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
        requests: &'a [GenerationRequest],
        n: usize,
        ended: &'a mut dyn FnMut(Sample),
    ) -> Result<Self> {
        let (decoder, config) = (args.decoder, args.config);
        let length =
            |r: &GenerationRequest| r.tokens.len() + args.criteria.max_new_tokens(r, &config);
        let longest = requests.iter().map(length).max().unwrap_or(0);
        let waiting = WaitingQueue::new(requests, n);
        let room = Room {
            rows: config.max_num_seqs.min(waiting.sequences()),
            cells: config.cells(decoder.arch(), longest)?,
            new_tokens: args.criteria.sampling.max_new_tokens,
        };
        Ok(Self {
            args,
            room,
            waiting,
            prefill: None,
            prefilled: VecDeque::new(),
            slots: Slots::new(room),
            most: room.rows,
            one_by_one: false,
            decoding: false,
            async_scheduling: config
                .async_scheduling
                .unwrap_or_else(|| is_accelerator(decoder.device())),
            pending: None,
            stats: GenerationStats::default(),
            hold: None,
            ended,
        })
    }

    /// Runs until every sequence has ended.
    pub fn run(mut self) -> Result<GenerationStats> {
        loop {
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
                // sequences that begin together have similar windows: decoding waits until all slots are taken
                if !self.decoding {
                    continue;
                }
            }
            if self.slots.live() > 0 {
                let started = Instant::now();
                self.decode()?;
                self.stats.decode_time += started.elapsed();
            } else if self.waiting.is_empty() && self.prefilled.is_empty() && self.prefill.is_none()
            {
                return Ok(self.stats);
            }
        }
    }

    /// Prefilled sequences without a slot.
    fn outside(&self) -> usize {
        self.prefilled.iter().map(|group| group.members.len()).sum()
    }

    /// Cells of the caches of prefill.
    fn staged(&self) -> usize {
        let mut seen: Vec<*const crate::cache::KvCache> = Vec::new();
        let mut cells = self.prefill.as_ref().map_or(0, Prefill::cells);
        for group in &self.prefilled {
            let cache = Rc::as_ptr(&group.cache);
            if !seen.contains(&cache) {
                seen.push(cache);
                cells += group.cache.cells();
            }
        }
        cells
    }

    fn around(&self) -> Around {
        let prefill = self.prefill.iter().flat_map(Prefill::groups);
        let prefill: usize = prefill.map(|group| group.members.len()).sum();
        Around {
            cells: self.staged(),
            waiting: (self.outside() + prefill + self.waiting.sequences()).min(self.most),
        }
    }

    /// Moves prefilled sequences into free slots.
    fn admit(&mut self) {
        if self.slots.live() == 0 {
            self.decoding = false;
        }
        while let Some(group) = self.prefilled.front() {
            let live = self.slots.live();
            if live >= self.most {
                break;
            }
            let (arch, device) = (self.args.decoder.arch(), self.args.decoder.device());
            // before decoding begins, columns are chosen for all prompts that are about to be admitted
            let longest = if self.decoding {
                0
            } else {
                self.waiting.longest(self.most - live)
            };
            let around = self.around();
            let len = group.tokens.len();
            if !self.slots.make_room(arch, device, len, longest, around) {
                if live == 0 {
                    self.drop_prefilled();
                    self.slots.release();
                }
                break;
            }
            self.record_cache_bytes();
            if let Some(group) = self.prefilled.front_mut() {
                self.slots.admit(group, self.most - live);
                if group.members.is_empty() {
                    self.prefilled.pop_front();
                }
            }
        }
        self.record_cache_bytes();
    }

    /// Whether a chunk of prompts should run now: a prefill has begun, or one begins for slots that no prefilled sequence will take.
    fn schedule_prefill(&mut self) -> bool {
        if self.prefill.is_some() {
            return true;
        }
        let free = (self.most - self.slots.live().min(self.most)).saturating_sub(self.outside());
        if free == 0 || self.waiting.is_empty() || (self.one_by_one && !self.prefilled.is_empty()) {
            return false;
        }
        self.prefill = self.next_prompts(free);
        self.record_cache_bytes();
        self.prefill.is_some()
    }

    /// The next prompts, as many as have sequences for the free slots, within the tokens of one forward pass and the budget of the
    /// cache. `None` where the budget has no room beside the sequences in the slots.
    fn next_prompts(&mut self, free: usize) -> Option<Prefill> {
        if self.slots.live() == 0 && self.prefilled.is_empty() && self.one_by_one {
            self.slots.release();
        }
        let (staged, outside) = (self.staged(), self.outside());
        let wanted = free.max(self.room.rows / PREFILL_SHARE);
        let (mut groups, mut members, mut width) = (Vec::new(), 0, 0);
        while let Some(len) = self.waiting.front() {
            let tokens = (groups.len() + 1) * width.max(len);
            let fits = self
                .slots
                .could_take(outside + 1, width.max(len), staged + tokens);
            if groups.is_empty() {
                if !fits && self.slots.live() > 0 {
                    return None;
                }
            } else if members >= wanted
                || self.one_by_one
                || !fits
                || tokens > self.args.config.max_num_batched_tokens
            {
                break;
            }
            let Some(group) = self.waiting.pop() else {
                break;
            };
            width = width.max(len);
            members += group.members.len();
            groups.push(group);
        }
        if groups.is_empty() {
            return None;
        }
        let around = Around {
            cells: staged + groups.len() * width,
            ..self.around()
        };
        self.slots
            .make_way(self.args.decoder.arch(), self.args.decoder.device(), around);
        Some(Prefill::new(self.args.decoder, groups))
    }

    /// Prefills a chunk of prompts; after the last chunk every sequence gets its first token.
    fn prefill(&mut self) -> Result<()> {
        let Some(prefill) = &mut self.prefill else {
            return Ok(());
        };
        let Some(hidden) = prefill.run(self.args.decoder, self.args.config.max_num_batched_tokens)
        else {
            return Ok(());
        };
        let Some(prefill) = self.prefill.take() else {
            return Ok(());
        };
        for group in prefill.groups() {
            let count = if group.recomputed {
                &mut self.stats.recomputed_tokens
            } else {
                &mut self.stats.prefill_tokens
            };
            *count += group.tokens.len();
        }
        self.sample_first_tokens(&hidden, prefill.finish().collect())
    }

    /// Samples the first token of every sequence of these groups, given the hidden states of their last column, `[groups, hidden]`.
    fn sample_first_tokens(
        &mut self,
        hidden: &Tensor<2>,
        mut prefilled: Vec<PrefilledGroup>,
    ) -> Result<()> {
        let mut sequences: Vec<(usize, Sequence)> = Vec::new();
        for (i, group) in prefilled.iter_mut().enumerate() {
            sequences.extend(group.members.drain(..).map(|sequence| (i, sequence)));
        }
        // at most as many rows of logits at a time as in decoding
        let mut sequences = sequences.into_iter().peekable();
        while sequences.peek().is_some() {
            let few: Vec<(usize, Sequence)> = sequences.by_ref().take(self.room.rows).collect();
            let rows = self.ints(few.iter().map(|(group, _)| *group as i32).collect());
            let draws: Vec<RandomDraw> = few
                .iter()
                .map(|(_, sequence)| RandomDraw::next(sequence.key, sequence.sample.tokens.len()))
                .collect();
            let logits = self
                .args
                .decoder
                .head()
                .logits(hidden.clone().select(0, rows));
            let tokens = sample(logits, self.args.criteria.sampling, &draws)?.read()?;
            for ((group, mut sequence), token) in few.into_iter().zip(tokens) {
                if self.accept(&mut sequence, token)? {
                    self.end(sequence);
                } else {
                    prefilled[group].members.push_back(sequence);
                }
            }
        }
        prefilled.retain(|group| !group.members.is_empty());
        self.prefilled.extend(prefilled);
        Ok(())
    }

    /// Whether another token can be launched before the host reads the last one: no token can change the rows.
    fn may_launch_ahead(&self) -> bool {
        let (device, live) = (self.args.decoder.device(), self.slots.live());
        let waiting =
            self.prefill.is_some() || !self.prefilled.is_empty() || !self.waiting.is_empty();
        let full = live >= self.most && self.prefill.is_none();
        let lasts =
            |sequence: &Sequence| sequence.sample.tokens.len() + 1 < self.max_new_tokens(sequence);
        live > 0
            && (full || !waiting)
            && self.slots.has_column()
            && !self.slots.should_compact(!is_cpu(device))
            && self.slots.rows().iter().flatten().all(lasts)
    }

    /// Decodes one token of every sequence in a slot.
    fn decode(&mut self) -> Result<()> {
        let pending = self.pending.take();
        if pending.is_none() {
            self.slots.compact(!is_cpu(self.args.decoder.device()));
            self.make_column();
        }
        self.decoding = true;
        let (rows, live) = (self.slots.rows(), self.slots.live());
        let last = |row: &Option<Sequence>| {
            let token = row.as_ref().and_then(|s| s.sample.tokens.last());
            token.map_or(0, |&t| t as i32)
        };
        let ids = match &pending {
            Some(pending) => pending.tokens.ids(self.args.decoder.device()),
            None => self.ints(rows.iter().map(last).collect()),
        };
        let later = u32::from(pending.is_some());
        let next = |sequence: &Sequence| {
            let draw = RandomDraw::next(sequence.key, sequence.sample.tokens.len());
            RandomDraw {
                position: draw.position + later,
                ..draw
            }
        };
        let draws: Vec<RandomDraw> = rows
            .iter()
            .map(|row| row.as_ref().map_or(RandomDraw::NONE, next))
            .collect();
        self.stats.decode_steps += 1;
        self.stats.slots += self.room.rows;
        let Some(cache) = self.slots.cache_mut() else {
            return Ok(());
        };
        let columns = Columns {
            starts: cache.starts(),
            first: cache.used(),
            len: 1,
        };
        let (decoder, sampling) = (self.args.decoder, self.args.criteria.sampling);
        let ctx = ForwardContext::cached(decoder.arch(), columns, decoder.device());
        let tokens = in_thread_pool(decoder.device(), || {
            let hidden = decoder.hidden_cached(ids, &ctx, cache);
            sample(decoder.head().logits(hidden), sampling, &draws)
        })?;
        // the device has its next work: read its last one
        if let Some(pending) = pending {
            self.accept_tokens(pending)?;
        }
        self.pending = Some(PendingTokens { tokens, live });
        if self.async_scheduling {
            Ok(())
        } else {
            self.read_pending()
        }
    }

    /// Reads the pending tokens, if there are any.
    fn read_pending(&mut self) -> Result<()> {
        match self.pending.take() {
            Some(pending) => self.accept_tokens(pending),
            None => Ok(()),
        }
    }

    /// Appends a token to every sequence in a slot.
    fn accept_tokens(&mut self, pending: PendingTokens) -> Result<()> {
        let live = self.slots.live();
        self.stats.occupied += live;
        self.stats.overrun += pending.live - live;
        if live == 0 {
            return Ok(());
        }
        for (row, token) in pending.tokens.read()?.into_iter().enumerate() {
            let Some(mut sequence) = self.slots.rows_mut()[row].take() else {
                continue;
            };
            if self.accept(&mut sequence, token)? {
                self.end(sequence);
            } else {
                self.slots.rows_mut()[row] = Some(sequence);
            }
        }
        Ok(())
    }

    /// Makes sure that the cache has a column for the next token. Where the budget has none, prefilled sequences give up their
    /// cache, then the youngest sequences are preempted.
    fn make_column(&mut self) {
        let (arch, device) = (self.args.decoder.arch(), self.args.decoder.device());
        while !self.slots.make_column(arch, device, self.around()) {
            if self.prefill.is_some() || !self.prefilled.is_empty() {
                self.drop_prefilled();
            } else if let Some(youngest) = self.slots.preempt() {
                self.stats.preemptions += 1;
                self.waiting.put_back(youngest);
                self.most = self.slots.live().max(1);
            } else {
                return;
            }
        }
        self.record_cache_bytes();
    }

    /// Sequences that were prefilled or are in prefill wait again.
    fn drop_prefilled(&mut self) {
        self.one_by_one = true;
        for group in self.prefilled.drain(..) {
            self.stats.preemptions += group.members.len();
            self.waiting
                .put_back_together(group.tokens, group.members.into());
        }
        for group in self
            .prefill
            .take()
            .into_iter()
            .flat_map(Prefill::into_groups)
        {
            self.waiting.put_back_together(group.tokens, group.members);
        }
    }

    /// Appends a token; whether the sequence has ended with it.
    fn accept(&mut self, sequence: &mut Sequence, token: SampledToken) -> Result<bool> {
        self.stats.new_tokens += 1;
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
        let request = &self.waiting.requests()[sequence.sample.request];
        let EngineArgs {
            criteria, config, ..
        } = &self.args;
        criteria.max_new_tokens(request, config)
    }

    fn end(&mut self, sequence: Sequence) {
        self.most = (self.most + 1).min(self.room.rows);
        self.one_by_one = false;
        (self.ended)(sequence.sample);
    }

    /// Records the bytes of all caches, in the account and as a peak.
    fn record_cache_bytes(&mut self) {
        let cells = self.slots.cells() + self.staged();
        let bytes = cells * self.args.decoder.arch().cache_bytes_per_token();
        self.stats.peak_cache_bytes = self.stats.peak_cache_bytes.max(bytes);
        let held = self.hold.as_ref().map(MemoryGuard::bytes);
        if let Some(accounts) = self.args.accounts
            && held != Some(bytes as u64)
        {
            self.hold = None;
            self.hold = Some(accounts.hold(Category::KvCache, Home::Device, bytes));
        }
    }

    fn ints(&self, values: Vec<i32>) -> Tensor<1, Int> {
        let count = values.len();
        Tensor::from_data(TensorData::new(values, [count]), self.args.decoder.device())
    }
}
