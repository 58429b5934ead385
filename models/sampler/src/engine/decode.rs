//! Decoding: the running sequences, and one token of each at a time.

use super::{Engine, PendingTokens};
use crate::decode_steps::StepArgs;
use crate::engine_args::MemoryProbe;
use crate::sampler::{RandomDraw, SampledTokens, sample};
use crate::sequence::Sequence;
use burn::tensor::Tensor;
use firebrick_backends::device::is_cpu;
use firebrick_models::Result;
use firebrick_models::cache::{BlockTable, KvCache};

/// Blocks that stay free when a sequence enters while `running` run, so that it does not preempt others at once: they
/// need as many in four tokens.
pub(super) fn reserve(running: usize) -> usize {
    running.div_ceil(4)
}

/// A sequence that is being decoded, and its blocks.
#[derive(Debug)]
pub(super) struct Row {
    pub sequence: Sequence,
    pub table: BlockTable,
}

/// The rows of a decoding step. An ended sequence leaves a hole until another takes its row or the last one moves into
/// it.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// The rows, holes among them.
    pub rows: Vec<Option<Row>>,
}

impl Running {
    /// Number of sequences.
    pub fn live(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// The blocks of each row.
    pub fn tables(&self) -> Vec<Option<&BlockTable>> {
        self.rows.iter().map(|row| row.as_ref().map(|row| &row.table)).collect()
    }

    /// True if the cache has a block for each sequence that needs one for its next token.
    pub fn could_append(&self, cache: &KvCache) -> bool {
        cache.could_append(self.rows.iter().flatten().map(|row| &row.table), 1)
    }

    /// Takes the first hole, or a new row.
    pub fn admit(&mut self, row: Row) {
        match self.rows.iter_mut().find(|row| row.is_none()) {
            Some(hole) => *hole = Some(row),
            None => self.rows.push(Some(row)),
        }
    }

    /// True if holes should be closed. A quarter of the rows may be holes where the number of rows should not change
    /// often.
    pub fn should_compact(&self, lazy: bool) -> bool {
        let (live, rows) = (self.live(), self.rows.len());
        if lazy { live * 4 <= rows * 3 } else { live < rows }
    }

    /// Closes holes where [`Self::should_compact`] says so: the last sequences move into them.
    pub fn compact(&mut self, lazy: bool) {
        if !self.should_compact(lazy) {
            return;
        }
        for row in (0..self.rows.len()).rev() {
            if self.rows[row].is_none() {
                self.rows.swap_remove(row);
            }
        }
    }

    /// Removes the youngest sequence, which is preempted.
    pub fn preempt(&mut self) -> Option<Row> {
        let rows = self.rows.iter_mut().filter(|row| row.is_some());
        rows.max_by_key(|row| row.as_ref().map(|row| row.sequence.arrival()))?.take()
    }
}

impl Engine<'_> {
    /// True if another token can be launched before the host reads the last one: no token can change the rows.
    pub(super) fn may_launch_ahead(&self) -> bool {
        let (device, live) = (self.args.decoder.device(), self.running.live());
        let waiting = self.prefill.is_some() || !self.prefilled.is_empty() || !self.waiting.is_empty();
        let full = live >= self.most && self.prefill.is_none();
        let lasts = |row: &Row| row.sequence.sample.tokens.len() + 1 < self.max_new_tokens(&row.sequence);
        live > 0
            && (full || !waiting)
            && self.running.could_append(self.cache)
            && !self.running.should_compact(!is_cpu(device))
            && self.running.rows.iter().flatten().all(lasts)
    }

    /// Decodes one token of every running sequence.
    pub(super) fn decode(&mut self) -> Result<()> {
        let pending = self.pending.take();
        if pending.is_none() {
            self.running.compact(!is_cpu(self.args.decoder.device()));
        }
        self.append();
        let live = self.running.live();
        if live == 0 {
            return Ok(());
        }
        // as many rows as there will be until others are admitted
        let begins = !std::mem::replace(&mut self.decoding, true);
        let memory_probe = self.args.memory_probe.only(begins);
        self.record_blocks();
        self.record_waste();
        let later = u32::from(pending.is_some());
        let draws = self.draws(later);
        self.stats.decode_steps += 1;
        self.stats.slots += self.max_num_seqs;
        let unread = pending.as_ref().map(|pending| &pending.tokens);
        let tokens = match unread {
            Some(SampledTokens::Host(_)) => self.run_step(unread, &draws, memory_probe),
            _ if self.steps.is_none() => self.run_step(unread, &draws, memory_probe),
            Some(SampledTokens::Device(tokens)) => self.run_step_on_device(Some(tokens), &draws, memory_probe),
            None => self.run_step_on_device(None, &draws, memory_probe),
        }?;
        // the device has its next work: read its last one
        if let Some(pending) = pending {
            self.accept_tokens(pending)?;
        }
        self.pending = Some(PendingTokens { tokens, live });
        if self.async_scheduling { Ok(()) } else { self.read_pending() }
    }

    /// The last token of every row that the host has read.
    fn last_tokens(&self) -> Vec<i32> {
        let last =
            |row: &Option<Row>| row.as_ref().and_then(|row| row.sequence.sample.tokens.last()).map_or(0, |&t| t as i32);
        self.running.rows.iter().map(last).collect()
    }

    /// The random numbers of every row's next token, `later` tokens after that.
    fn draws(&self, later: u32) -> Vec<RandomDraw> {
        let next = |row: &Row| {
            let sequence = &row.sequence;
            let draw = RandomDraw::next(sequence.key, sequence.sample.tokens.len());
            RandomDraw { position: draw.position + later, ..draw }
        };
        self.running.rows.iter().map(|row| row.as_ref().map_or(RandomDraw::NONE, next)).collect()
    }

    /// A token of every row, by operations that the device may not have kernels for.
    fn run_step(
        &mut self,
        unread: Option<&SampledTokens>,
        draws: &[RandomDraw],
        memory_probe: MemoryProbe<'_>,
    ) -> Result<SampledTokens> {
        let (decoder, sampling) = (self.args.decoder, self.args.criteria.sampling);
        let ids = match unread {
            Some(tokens) => tokens.ids(decoder.device()),
            None => self.ints(self.last_tokens()),
        };
        let metadata = self.cache.decode(decoder.arch(), &self.running.tables());
        let (cache, fingerprint) = (&mut *self.cache, self.fingerprint);
        decoder.with_team(|| {
            let hidden = decoder.hidden_cached(ids, &metadata, cache);
            let logits = memory_probe.logits(decoder, hidden, fingerprint);
            decoder.check_ranks()?;
            sample(&logits, sampling, draws, decoder.is_exact())
        })
    }

    /// [`Self::run_step`] on a GPU with all kernels.
    fn run_step_on_device(
        &mut self,
        previous: Option<&Tensor<2>>,
        draws: &[RandomDraw],
        memory_probe: MemoryProbe<'_>,
    ) -> Result<SampledTokens> {
        let mut ids = self.last_tokens();
        let Some(steps) = &mut self.steps else { unreachable!("a device without steps") };
        let (decoder, sampling) = (self.args.decoder, self.args.criteria.sampling);
        let padded = steps.padded(ids.len());
        ids.resize(padded, 0);
        let mut tables = self.running.tables();
        tables.resize(padded, None);
        let uniforms = (!sampling.is_greedy()).then(|| {
            let mut uniforms: Vec<f32> = draws.iter().map(RandomDraw::uniform).collect();
            uniforms.resize(padded, RandomDraw::NONE.uniform());
            uniforms
        });
        let stride = steps.stride;
        let inputs = self.cache.step_inputs(decoder.arch(), &tables, ids, uniforms, stride);
        let args = StepArgs { decoder, cache: &mut *self.cache, sampling, previous, memory_probe };
        let tokens = steps.run(args, &inputs)?;
        self.stats.graph_replays = steps.replays;
        Ok(SampledTokens::Device(tokens))
    }

    /// Reads the pending tokens, if there are any.
    pub(super) fn read_pending(&mut self) -> Result<()> {
        self.pending.take().map_or(Ok(()), |pending| self.accept_tokens(pending))
    }

    /// Gives every running sequence its token.
    fn accept_tokens(&mut self, pending: PendingTokens) -> Result<()> {
        let live = self.running.live();
        self.stats.occupied += live;
        self.stats.overrun += pending.live - live;
        if live == 0 {
            return Ok(());
        }
        let rows = self.running.rows.len();
        // rows after these were padding
        for (row, token) in pending.tokens.read()?.into_iter().enumerate().take(rows) {
            let Some(mut member) = self.running.rows[row].take() else {
                continue;
            };
            if self.accept(&mut member.sequence, token)? {
                self.end(member.sequence, Some(member.table))?;
            } else {
                self.running.rows[row] = Some(member);
            }
        }
        Ok(())
    }
}
