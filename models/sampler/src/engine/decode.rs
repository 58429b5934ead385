//! Decoding: one token of every running sequence at a time.

use super::{Engine, PendingTokens};
use crate::decode_steps::StepArgs;
use crate::engine_args::MemoryProbe;
use crate::running::Row;
use crate::sampler::{RandomDraw, SampledTokens, sample};
use burn::tensor::Tensor;
use firebrick_backends::device::is_cpu;
use firebrick_models::Result;

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
            sample(logits, sampling, draws)
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
