//! Continuous batching: a fixed number of slots, each taken again as soon as its sequence has ended.
//!
//! A round lets ready sequences enter free slots, runs one chunk of prompts where slots will be free, and then one token of
//! every sequence in a slot. So prompts, however long, hold decoding up for one forward of `max_num_batched_tokens` at most.
//!
//! A GPU works behind the program's back. There a token is run from the one before it before the host has seen that one, as long as
//! the host has nothing to change: no sequence that waits for a slot, no column to make, no completion that is about to be as long as
//! it may be. So the device always has work, and a sequence that ended with the token unseen has run for one more, which nobody
//! reads.
//!
//! Where the cache runs short, sequences that are ready but not in a slot give theirs back first, then the youngest in a slot
//! lose their place: they wait, and are computed again from their prompt and what they have drawn. A draw depends on the
//! sequence and the position alone, so the tokens are the same. The oldest never loses its place, so all of them end.

use super::choose::{Chosen, Draw, Drawn, choose};
use super::prefill::{Filling, Ready};
use super::queue::{Queue, Sequence};
use super::slots::{Around, Room, Slots};
use super::stats::Stats;
use super::{Finish, Generator, Limits, Request, Sample};
use crate::layer::{Columns, Context};
use crate::{Decoder, Result};
use burn::tensor::{Int, Tensor, TensorData};
use firebrick_backends::accounts::{Category, Hold, Home};
use firebrick_backends::device::{is_accelerator, is_cpu};
use firebrick_backends::kernels::in_thread_pool;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

/// The share of the slots for which prompts are run ahead, at least: short prompts are run a few at a time.
const AHEAD: usize = 8;

/// One run over a list of requests.
pub(super) struct Engine<'a> {
    generator: &'a Generator<'a>,
    decoder: &'a Decoder,
    limits: Limits,
    room: Room,
    queue: Queue<'a>,
    filling: Option<Filling>,
    ready: VecDeque<Ready>,
    slots: Slots,
    /// Sequences that may be in a slot now: fewer for a while after one has lost its place.
    most: usize,
    /// Whether the next prompts are run one at a time: the cache was too short for more.
    one_by_one: bool,
    /// Whether the sequences in the slots have begun to decode.
    begun: bool,
    /// Whether a token is run before the host has seen the one before it.
    ahead: bool,
    /// The last token of every row that had a sequence, which the host has not seen.
    unseen: Option<Unseen>,
    stats: Stats,
    hold: Option<Hold>,
    ended: &'a mut dyn FnMut(Sample),
}

/// Tokens that were run, and of how many sequences.
struct Unseen {
    drawn: Drawn,
    live: usize,
}

impl<'a> Engine<'a> {
    pub fn new(
        generator: &'a Generator<'a>,
        decoder: &'a Decoder,
        requests: &'a [Request],
        n: usize,
        limits: Limits,
        ended: &'a mut dyn FnMut(Sample),
    ) -> Result<Self> {
        let length = |r: &Request| r.tokens.len() + generator.most_new(r, &limits);
        let longest = requests.iter().map(length).max().unwrap_or(0);
        let queue = Queue::new(requests, n);
        let room = Room {
            rows: limits.max_num_seqs.min(queue.waiting()),
            cells: limits.cells(decoder.arch(), longest)?,
            new_tokens: generator.sampling.max_new_tokens,
        };
        Ok(Self {
            generator,
            decoder,
            limits,
            room,
            queue,
            filling: None,
            ready: VecDeque::new(),
            slots: Slots::new(room),
            most: room.rows,
            one_by_one: false,
            begun: false,
            ahead: limits
                .async_scheduling
                .unwrap_or_else(|| is_accelerator(decoder.device())),
            unseen: None,
            stats: Stats::default(),
            hold: None,
            ended,
        })
    }

    /// Runs until every sequence has ended.
    pub fn run(mut self) -> Result<Stats> {
        loop {
            if !self.may_run_ahead() {
                let started = Instant::now();
                self.look()?;
                self.stats.decode_time += started.elapsed();
            }
            self.enter();
            if self.wants_prompts() {
                let started = Instant::now();
                self.prefill()?;
                self.stats.prefill_time += started.elapsed();
                // sequences that begin together have windows alike: decoding waits until all slots are taken
                if !self.begun {
                    continue;
                }
            }
            if self.slots.live() > 0 {
                let started = Instant::now();
                self.decode()?;
                self.stats.decode_time += started.elapsed();
            } else if self.queue.is_empty() && self.ready.is_empty() && self.filling.is_none() {
                return Ok(self.stats);
            }
        }
    }

    /// Sequences whose keys and values are there, and that have no slot.
    fn outside(&self) -> usize {
        self.ready.iter().map(|ready| ready.members.len()).sum()
    }

    /// Cells of caches outside of the slots.
    fn staged(&self) -> usize {
        let mut seen: Vec<*const crate::cache::KvCache> = Vec::new();
        let mut cells = self.filling.as_ref().map_or(0, Filling::cells);
        for ready in &self.ready {
            let cache = Rc::as_ptr(&ready.cache);
            if !seen.contains(&cache) {
                seen.push(cache);
                cells += ready.cache.cells();
            }
        }
        cells
    }

    fn around(&self) -> Around {
        let filling = self.filling.iter().flat_map(Filling::jobs);
        let filling: usize = filling.map(|job| job.members.len()).sum();
        Around {
            cells: self.staged(),
            waiting: (self.outside() + filling + self.queue.waiting()).min(self.most),
        }
    }

    /// Lets ready sequences take free slots.
    fn enter(&mut self) {
        if self.slots.live() == 0 {
            self.begun = false;
        }
        while let Some(ready) = self.ready.front() {
            let live = self.slots.live();
            if live >= self.most {
                break;
            }
            let (arch, device) = (self.decoder.arch(), self.decoder.device());
            // before decoding begins, columns are chosen for all prompts that are about to enter
            let longest = if self.begun {
                0
            } else {
                self.queue.longest(self.most - live)
            };
            let around = self.around();
            let len = ready.tokens.len();
            if !self.slots.make_room(arch, device, len, longest, around) {
                if live == 0 {
                    self.give_up_staged();
                    self.slots.release();
                }
                break;
            }
            self.note();
            if let Some(ready) = self.ready.front_mut() {
                self.slots.enter(ready, self.most - live);
                if ready.members.is_empty() {
                    self.ready.pop_front();
                }
            }
        }
        self.note();
    }

    /// Whether a chunk of prompts should run now: one is under way, or slots are free that no ready sequence will take.
    fn wants_prompts(&mut self) -> bool {
        if self.filling.is_some() {
            return true;
        }
        let free = (self.most - self.slots.live().min(self.most)).saturating_sub(self.outside());
        if free == 0 || self.queue.is_empty() || (self.one_by_one && !self.ready.is_empty()) {
            return false;
        }
        self.filling = self.next_prompts(free);
        self.note();
        self.filling.is_some()
    }

    /// The next prompts: as many as have sequences for the free slots, within the tokens of one forward and the cache's
    /// budget. None where the budget has no room beside the sequences in the slots.
    fn next_prompts(&mut self, free: usize) -> Option<Filling> {
        if self.slots.live() == 0 && self.ready.is_empty() && self.one_by_one {
            self.slots.release();
        }
        let (staged, outside) = (self.staged(), self.outside());
        let wanted = free.max(self.room.rows / AHEAD);
        let (mut jobs, mut members, mut width) = (Vec::new(), 0, 0);
        while let Some(len) = self.queue.front() {
            let tokens = (jobs.len() + 1) * width.max(len);
            let fits = self
                .slots
                .could_take(outside + 1, width.max(len), staged + tokens);
            if jobs.is_empty() {
                if !fits && self.slots.live() > 0 {
                    return None;
                }
            } else if members >= wanted
                || self.one_by_one
                || !fits
                || tokens > self.limits.max_num_batched_tokens
            {
                break;
            }
            let Some(job) = self.queue.pop() else { break };
            width = width.max(len);
            members += job.members.len();
            jobs.push(job);
        }
        if jobs.is_empty() {
            return None;
        }
        let around = Around {
            cells: staged + jobs.len() * width,
            ..self.around()
        };
        self.slots
            .make_way(self.decoder.arch(), self.decoder.device(), around);
        Some(Filling::new(self.decoder, jobs))
    }

    /// Runs a chunk of prompts; after the last, every sequence gets its first token.
    fn prefill(&mut self) -> Result<()> {
        let Some(filling) = &mut self.filling else {
            return Ok(());
        };
        let Some(hidden) = filling.run(self.decoder, self.limits.max_num_batched_tokens) else {
            return Ok(());
        };
        let Some(filling) = self.filling.take() else {
            return Ok(());
        };
        for job in filling.jobs() {
            let count = if job.again {
                &mut self.stats.recomputed_tokens
            } else {
                &mut self.stats.prefill_tokens
            };
            *count += job.tokens.len();
        }
        let mut ready: Vec<Ready> = filling.done().collect();
        let mut drawing: Vec<(usize, Sequence)> = Vec::new();
        for (job, ready) in ready.iter_mut().enumerate() {
            drawing.extend(ready.members.drain(..).map(|sequence| (job, sequence)));
        }
        // no more rows of logits at a time than decoding has
        let mut drawing = drawing.into_iter().peekable();
        while drawing.peek().is_some() {
            let few: Vec<(usize, Sequence)> = drawing.by_ref().take(self.room.rows).collect();
            let rows: Vec<usize> = few.iter().map(|(job, _)| *job).collect();
            let hidden = hidden
                .clone()
                .select(0, self.ints(rows.iter().map(|&r| r as i32).collect()));
            let draws: Vec<Draw> = few.iter().map(|(_, sequence)| draw(sequence)).collect();
            let chosen = choose(
                self.decoder.head().logits(hidden),
                self.generator.sampling,
                &draws,
            )?
            .read()?;
            for ((job, mut sequence), chosen) in few.into_iter().zip(chosen) {
                if self.accept(&mut sequence, chosen)? {
                    self.end(sequence);
                } else {
                    ready[job].members.push_back(sequence);
                }
            }
        }
        self.ready
            .extend(ready.into_iter().filter(|ready| !ready.members.is_empty()));
        Ok(())
    }

    /// Whether another token can be run before the host sees the last: nothing changes the rows, whatever that is.
    fn may_run_ahead(&self) -> bool {
        let (device, live) = (self.decoder.device(), self.slots.live());
        let waiting = self.filling.is_some() || !self.ready.is_empty() || !self.queue.is_empty();
        let full = live >= self.most && self.filling.is_none();
        let lasts = |sequence: &Sequence| {
            let request = &self.queue.requests()[sequence.sample.request];
            sequence.sample.tokens.len() + 1 < self.generator.most_new(request, &self.limits)
        };
        live > 0
            && (full || !waiting)
            && self.slots.has_column()
            && !self.slots.should_close(!is_cpu(device))
            && self.slots.rows().iter().flatten().all(lasts)
    }

    /// One token of every sequence in a slot.
    fn decode(&mut self) -> Result<()> {
        let unseen = self.unseen.take();
        if unseen.is_none() {
            self.slots.close(!is_cpu(self.decoder.device()));
            self.make_column();
        }
        self.begun = true;
        let (rows, live) = (self.slots.rows(), self.slots.live());
        let last = |row: &Option<Sequence>| {
            let token = row.as_ref().and_then(|s| s.sample.tokens.last());
            token.map_or(0, |&t| t as i32)
        };
        let ids = match &unseen {
            Some(unseen) => unseen.drawn.ids(self.decoder.device()),
            None => self.ints(rows.iter().map(last).collect()),
        };
        let later = u32::from(unseen.is_some());
        let next = |sequence: &Sequence| {
            let draw = draw(sequence);
            Draw {
                position: draw.position + later,
                ..draw
            }
        };
        let draws: Vec<Draw> = rows
            .iter()
            .map(|row| row.as_ref().map_or(Draw::NONE, next))
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
        let (decoder, sampling) = (self.decoder, self.generator.sampling);
        let ctx = Context::cached(decoder.arch(), columns, decoder.device());
        let drawn = in_thread_pool(decoder.device(), || {
            let hidden = decoder.hidden_cached(ids, &ctx, cache);
            choose(decoder.head().logits(hidden), sampling, &draws)
        })?;
        // the device has its next work: time to look at what it did before
        if let Some(unseen) = unseen {
            self.see(unseen)?;
        }
        self.unseen = Some(Unseen { drawn, live });
        if self.ahead { Ok(()) } else { self.look() }
    }

    /// Looks at tokens that nobody has seen, if there are any.
    fn look(&mut self) -> Result<()> {
        match self.unseen.take() {
            Some(unseen) => self.see(unseen),
            None => Ok(()),
        }
    }

    /// Gives every sequence in a slot its token.
    fn see(&mut self, unseen: Unseen) -> Result<()> {
        let live = self.slots.live();
        self.stats.occupied += live;
        self.stats.overrun += unseen.live - live;
        if live == 0 {
            return Ok(());
        }
        for (row, chosen) in unseen.drawn.read()?.into_iter().enumerate() {
            let Some(mut sequence) = self.slots.rows_mut()[row].take() else {
                continue;
            };
            if self.accept(&mut sequence, chosen)? {
                self.end(sequence);
            } else {
                self.slots.rows_mut()[row] = Some(sequence);
            }
        }
        Ok(())
    }

    /// A column for the next token of every sequence. Where there is none within the budget, what is ready gives its cache
    /// back, then the youngest sequences their places.
    fn make_column(&mut self) {
        let (arch, device) = (self.decoder.arch(), self.decoder.device());
        while !self.slots.make_column(arch, device, self.around()) {
            if self.filling.is_some() || !self.ready.is_empty() {
                self.give_up_staged();
            } else if let Some(youngest) = self.slots.evict() {
                self.stats.preemptions += 1;
                self.queue.put_back(youngest);
                self.most = self.slots.live().max(1);
            } else {
                return;
            }
        }
        self.note();
    }

    /// Sequences outside of the slots wait again.
    fn give_up_staged(&mut self) {
        self.one_by_one = true;
        for ready in self.ready.drain(..) {
            self.stats.preemptions += ready.members.len();
            self.queue
                .put_back_together(ready.tokens, ready.members.into());
        }
        for job in self.filling.take().into_iter().flat_map(Filling::into_jobs) {
            self.queue.put_back_together(job.tokens, job.members);
        }
    }

    /// Adds a token; says whether the sequence has ended.
    fn accept(&mut self, sequence: &mut Sequence, chosen: Chosen) -> Result<bool> {
        self.stats.new_tokens += 1;
        let sample = &mut sequence.sample;
        sample.tokens.push(chosen.token);
        sample.logps.push(chosen.logp);
        sample.full_logps.push(chosen.full_logp);
        if self.generator.stops(sample)? {
            sample.finish = Finish::Stop;
            return Ok(true);
        }
        let request = &self.queue.requests()[sample.request];
        Ok(sample.tokens.len() >= self.generator.most_new(request, &self.limits))
    }

    fn end(&mut self, sequence: Sequence) {
        self.most = (self.most + 1).min(self.room.rows);
        self.one_by_one = false;
        (self.ended)(sequence.sample);
    }

    /// Tells the account, and remembers the most.
    fn note(&mut self) {
        let cells = self.slots.cells() + self.staged();
        let bytes = cells * self.decoder.arch().cache_bytes_per_token();
        self.stats.peak_cache_bytes = self.stats.peak_cache_bytes.max(bytes);
        if let Some(accounts) = &self.generator.accounts
            && self
                .hold
                .as_ref()
                .is_none_or(|hold| hold.bytes() != bytes as u64)
        {
            self.hold = None;
            self.hold = Some(accounts.hold(Category::KvCache, Home::Device, bytes));
        }
    }

    fn ints(&self, values: Vec<i32>) -> Tensor<1, Int> {
        let count = values.len();
        Tensor::from_data(TensorData::new(values, [count]), self.decoder.device())
    }
}

/// The draw that decides a sequence's next token.
fn draw(sequence: &Sequence) -> Draw {
    Draw {
        key: Some(sequence.key),
        position: sequence.sample.tokens.len() as u32,
    }
}
