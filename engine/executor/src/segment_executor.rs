//! Runs a plan: scores of sequences by forward passes over segments and the head in chunks of rows. `training_pass` has
//! the backward passes.

use super::boundary_log::{Boundary, BoundaryKind};
use super::fetch::{Fetched, Fetcher};
use super::head::{self, TokenChunk};
use super::non_finite::FiniteCheck;
use super::pipeline_parallel::Neighbors;
use super::runtime::Runtime;
use super::segment::{PassContext, Sharding, Unsharded, run};
use super::sequence_parallel::{Ulysses, check_shared_sequences};
use super::tensor_parallel::TensorParallel;
use super::uneven_inputs::rounds;
use crate::batch::{Batch, DropoutStep, MicroBatch, MicroBatchLimits, Part, scoring_layout, training_layout};
use burn::tensor::Tensor;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::trace::span_on;
use firebrick_core::Result;
use firebrick_core::error::device_error;
use firebrick_core::sequence::Sequence;
use firebrick_models::Decoder;
use firebrick_models::head::Head;
use firebrick_objectives::MicroScores;
use firebrick_plan::{Layout, ModelPlan, Order, Role, Zero};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::Range;

/// Executes a [`ModelPlan`] on a decoder.
#[derive(Clone, Copy, Debug)]
pub struct Executor<'a> {
    pub(super) plan: &'a ModelPlan,
    pub(super) runtime: &'a Runtime,
    pub(super) temperature: f64,
    pub(super) role: Role,
    dropout: Option<DropoutStep>,
    pub(super) loss_scale: f64,
    /// The coefficient of the auxiliary loss of routers, and the tokens of all ranks' micro-batches.
    pub(super) router_loss: (f64, usize),
    /// Passes that every rank makes through the model in a backward pass over all micro-batches.
    pub(super) rounds: usize,
    /// Of a search for NaN and infinite numbers.
    pub(super) finite_check: Option<&'a FiniteCheck>,
}

impl<'a> Executor<'a> {
    /// An executor for the policy. Logits are divided by `temperature`.
    pub fn new(plan: &'a ModelPlan, runtime: &'a Runtime, temperature: f64) -> Self {
        Self {
            plan,
            runtime,
            temperature,
            role: Role::Policy,
            dropout: None,
            loss_scale: 1.0,
            router_loss: (0.0, 0),
            rounds: 0,
            finite_check: None,
        }
    }

    /// Checks the tensors of backward passes.
    #[must_use]
    pub(super) fn with_finite_check(mut self, check: &'a FiniteCheck) -> Self {
        self.finite_check = Some(check);
        self
    }

    /// Sets the least number of passes for one of several ranks: as many as any of them, those without a micro-batch
    /// for what the others need of it.
    #[must_use]
    pub fn with_rounds(mut self, rounds: usize) -> Self {
        self.rounds = rounds;
        self
    }

    /// Its runtime.
    pub fn runtime(&self) -> &'a Runtime {
        self.runtime
    }

    /// Sets the loss scale.
    #[must_use]
    pub fn with_loss_scale(mut self, scale: f64) -> Self {
        self.loss_scale = scale;
        self
    }

    /// Adds the auxiliary loss of routers, times a coefficient, in backward passes over sequences of `tokens` tokens on
    /// all ranks. 0 is none.
    #[must_use]
    pub fn with_router_loss(mut self, coefficient: f64, tokens: usize) -> Self {
        self.router_loss = (coefficient, tokens);
        self
    }

    /// Adds the dropout of an optimizer step in backward passes.
    #[must_use]
    pub fn with_dropout(mut self, at: DropoutStep) -> Self {
        self.dropout = Some(at);
        self
    }

    /// Sets the model's role, to which its weights are accounted.
    #[must_use]
    pub fn for_role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// Accounts for what tracing has added to `before`, where bytes can be read on the way.
    pub(super) fn hold_graph(&self, before: Option<u64>) -> Option<MemoryGuard> {
        let (now, before) = self.runtime.in_use().zip(before)?;
        let bytes = now.saturating_sub(before) as usize;
        Some(self.runtime.accounts.for_model(self.role).hold(Category::LiveGraph, Home::Device, bytes))
    }

    pub(super) fn fetcher(&self, visits: Vec<Range<usize>>) -> Fetcher<'a> {
        Fetcher::new(self.runtime, self.role, visits, self.plan)
    }

    /// The units of a training pass in the order in which it visits them.
    pub(super) fn training_visits(&self, decoder: &Decoder) -> Vec<Range<usize>> {
        let mut visits = self.forward_visits(decoder);
        visits.extend(self.backward_visits());
        visits
    }

    /// Embedding, segments, head: those that run here.
    pub(super) fn forward_visits(&self, decoder: &Decoder) -> Vec<Range<usize>> {
        let head = decoder.units().len() - 1;
        let segments = self.plan.segments.iter().map(|s| s.units.clone());
        let embedding = decoder.embeds().then_some(0..1).into_iter();
        let head = decoder.has_head().then_some(head..head + 1);
        embedding.chain(segments).chain(head).collect()
    }

    /// Segments, the last one first.
    pub(super) fn backward_visits(&self) -> impl Iterator<Item = Range<usize>> + use<'a> {
        self.plan.segments.iter().rev().map(|s| s.units.clone())
    }

    /// Rejects a model that sequence parallelism does not support.
    pub(super) fn check(&self, decoder: &Decoder, router_loss: f64) -> Result<()> {
        let world = self.runtime.world();
        let shared = (world.sequence_key(), world.sequence_size());
        check_shared_sequences(self.role.name(), decoder.arch(), shared, router_loss)
    }

    fn micro(&self, decoder: &Decoder, sequences: &[&Sequence], layout: Layout) -> MicroBatch {
        let attention_rows = self.plan.attention_rows;
        let (arch, device) = (decoder.arch(), decoder.device());
        let part = Part::new(self.runtime.world());
        decoder.in_exact(|| MicroBatch::part(arch, sequences, layout, attention_rows, part, device))
    }

    /// A micro-batch on its way through a model, with the ranks that divide its arithmetic.
    pub(super) fn at<'b>(&'b self, decoder: &'b Decoder, micro: &'b MicroBatch) -> PassContext<'b> {
        let sharding: &dyn Sharding = if decoder.share().is_some() {
            &TensorParallel
        } else if micro.whole.is_some() {
            &Ulysses
        } else {
            &Unsharded
        };
        PassContext { decoder, micro, runtime: self.runtime, sharding }
    }

    /// Rows of micro-batches, `[tokens, hidden]` each.
    pub(super) fn embed(&self, decoder: &Decoder, fetched: &Fetched, micros: &[MicroBatch]) -> Result<Vec<Tensor<2>>> {
        let contexts = micros.iter().map(|micro| self.at(decoder, micro));
        contexts.map(|at| at.sharding.embed(at, &fetched.weights[0])).collect()
    }

    /// A micro-batch as training sees it.
    pub(super) fn micro_with_dropout(&self, decoder: &Decoder, sequences: &[&Sequence]) -> MicroBatch {
        let micro = self.micro(decoder, sequences, training_layout(self.plan.layout, decoder));
        match self.dropout {
            Some(at) => micro.with_dropout(decoder, sequences, at),
            None => micro,
        }
    }

    /// Micro-batches that go through the segments together.
    pub(super) fn groups<'b, T>(&self, micros: &'b [T]) -> impl Iterator<Item = &'b [T]> + use<'b, T> {
        micros.chunks(match self.plan.order {
            Order::MicroMajor => 1,
            Order::SegmentMajor => micros.len().max(1),
        })
    }

    /// Scores micro-batches without a graph, in their order; with values if the policy has a value head.
    ///
    /// # Errors
    /// `Error::Ranks` where ranks cannot share the sequences of this model; `Error::OutOfMemory` above `memory.limit`;
    /// `Error::Model` and `Error::Device` where the device, a copy or another rank fails.
    pub fn score(&self, decoder: &Decoder, micros: &[Vec<&Sequence>]) -> Result<Vec<MicroScores>> {
        let _span = span_on("scoring", decoder.device());
        self.forward(decoder, micros, |head, micro, hidden| {
            let (mut logp, mut entropy) = (Vec::new(), Vec::new());
            for (start, len) in head::chunks(micro.scored(), self.plan.head_rows) {
                let rows = hidden.clone().narrow(0, start, len);
                let targets = micro.targets.clone().narrow(0, start, len);
                let scores = TokenChunk::score(head, rows, targets, self.temperature, true, self.runtime)?;
                let scores = scores.scores().clone();
                logp.push(scores.logp);
                entropy.push(scores.entropy);
            }
            Ok(MicroScores {
                logp: split_by_sequence(logp, &micro.lengths)?,
                entropy: split_by_sequence(entropy, &micro.lengths)?,
                routes: micro.routes(),
                values: match head.joint_value().filter(|_| self.role == Role::Policy) {
                    Some(head) => self.read_values(&head, micro, &hidden)?,
                    None => Vec::new(),
                },
            })
        })
    }

    /// Values of a micro-batch's scored rows.
    fn read_values(&self, head: &Head<'_>, micro: &MicroBatch, hidden: &Tensor<2>) -> Result<Vec<Vec<f32>>> {
        let chunks = head::chunks(micro.scored(), self.plan.head_rows);
        let values = chunks.map(|(start, n)| head.scalar(hidden.clone().narrow(0, start, n)));
        split_by_sequence(values.collect(), &micro.lengths)
    }

    /// A critic's values of the scored tokens of micro-batches, without a graph, by sequence.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub fn values(&self, critic: &Decoder, micros: &[Vec<&Sequence>]) -> Result<Vec<Vec<Vec<f32>>>> {
        self.forward(critic, micros, |head, micro, hidden| self.read_values(head, micro, &hidden))
    }

    /// Runs micro-batches without a graph and reads their scored rows off the head.
    fn forward<T>(
        &self,
        decoder: &Decoder,
        micros: &[Vec<&Sequence>],
        read: impl Fn(&Head<'_>, &MicroBatch, Tensor<2>) -> Result<T>,
    ) -> Result<Vec<T>> {
        self.check(decoder, 0.0)?;
        let neighbors = Neighbors::new(decoder, self.runtime)?;
        let groups: Vec<_> = match &neighbors {
            None => self.groups(micros).collect(),
            Some(_) => micros.chunks(1).collect(),
        };
        let mut results = Vec::with_capacity(micros.len());
        for (place, group) in groups.iter().enumerate() {
            let micros: Vec<MicroBatch> = group.iter().map(|s| self.scored(decoder, s)).collect();
            let mut fetch = self.fetcher(self.forward_visits(decoder));
            let mut rows = match &neighbors {
                Some(neighbors) if !decoder.embeds() => {
                    let rows = neighbors.receive_rows(&micros[0])?;
                    if place + 1 < groups.len() {
                        neighbors.acknowledge()?;
                    }
                    vec![rows]
                }
                _ => self.embed(decoder, &fetch.next(decoder)?, &micros)?,
            };
            for (i, segment) in self.plan.segments.iter().enumerate() {
                let fetched = fetch.next(decoder)?;
                for (x, micro) in rows.iter_mut().zip(&micros) {
                    run(self.at(decoder, micro), segment.units.clone(), &fetched.weights, x)?;
                }
                self.runtime.boundary(Boundary::at(BoundaryKind::Forward, i))?;
            }
            if let Some(neighbors) = neighbors.filter(|_| !decoder.has_head()) {
                if place > 0 {
                    neighbors.wait_for_acknowledgement()?;
                }
                rows.into_iter().try_for_each(|rows| neighbors.send_rows(rows))?;
                continue;
            }
            let fetched = fetch.next(decoder)?;
            let head = decoder.head_with(&fetched.weights[0]);
            for (hidden, micro) in rows.into_iter().zip(&micros) {
                let hidden = head::scored_rows(hidden, micro);
                self.runtime.boundary(BoundaryKind::Head)?;
                results.push(read(&head, micro, hidden)?);
            }
        }
        let rounds = if neighbors.is_none() { self.rounds } else { 0 };
        for _ in groups.len()..rounds {
            self.idle_forward(decoder)?;
        }
        Ok(results)
    }

    /// A micro-batch as scoring sees it: with the routes of its experts, unless they are on several stages.
    fn scored(&self, decoder: &Decoder, sequences: &[&Sequence]) -> MicroBatch {
        let micro = self.micro(decoder, sequences, scoring_layout(self.plan.layout, decoder));
        if decoder.stage().is_some() { micro } else { micro.recorded(decoder.arch()) }
    }
}

/// Log-probs and entropies of sequences, in their order, in micro-batches under the budget.
///
/// # Errors
/// `Error::Budget` for a sequence longer than the budget; `Error::Ranks` where ranks cannot share the sequences of this
/// model; `Error::OutOfMemory` above `memory.limit`; `Error::Model` and `Error::Device` where the device, a copy or
/// another rank fails.
pub fn score_all(
    executor: &Executor<'_>,
    decoder: &Decoder,
    sequences: &[Sequence],
    cut: MicroBatchLimits,
) -> Result<MicroScores> {
    let mut scores = MicroScores {
        logp: vec![Vec::new(); sequences.len()],
        entropy: vec![Vec::new(); sequences.len()],
        values: vec![Vec::new(); sequences.len()],
        routes: vec![None; sequences.len()],
    };
    let scored = by_micro_batch(executor, sequences, cut, |executor, micros| {
        executor.runtime.pass(|| executor.score(decoder, micros))
    })?;
    for (indices, micro) in scored {
        let scores_of_tokens = micro.logp.into_iter().zip(micro.entropy);
        for (&i, (logp, entropy)) in indices.iter().zip(scores_of_tokens) {
            scores.logp[i] = logp;
            scores.entropy[i] = entropy;
        }
        for (&i, routes) in indices.iter().zip(micro.routes) {
            scores.routes[i] = routes;
        }
        for (&i, values) in indices.iter().zip(micro.values) {
            scores.values[i] = values;
        }
    }
    Ok(scores)
}

/// A critic's values of sequences' scored tokens, in their order, in micro-batches under the budget.
pub(super) fn values_all(
    executor: &Executor<'_>,
    critic: &Decoder,
    sequences: &[Sequence],
    cut: MicroBatchLimits,
) -> Result<Vec<Vec<f32>>> {
    let mut placed = vec![Vec::new(); sequences.len()];
    let scored = by_micro_batch(executor, sequences, cut, |executor, micros| {
        executor.runtime.pass(|| executor.values(critic, micros))
    })?;
    for (indices, values) in scored {
        for (i, values) in indices.into_iter().zip(values) {
            placed[i] = values;
        }
    }
    Ok(placed)
}

/// Scores of a micro-batch, which ranks exchange.
trait Scored: Serialize + DeserializeOwned {
    /// Adds what the next rank has of the same sequences.
    fn append(&mut self, next: Self);
}

impl Scored for Vec<Vec<f32>> {
    fn append(&mut self, next: Self) {
        self.iter_mut().zip(next).for_each(|(values, next)| values.extend(next));
    }
}

impl Scored for MicroScores {
    fn append(&mut self, next: Self) {
        Scored::append(&mut self.logp, next.logp);
        Scored::append(&mut self.entropy, next.entropy);
        Scored::append(&mut self.values, next.values);
        for (routes, next) in self.routes.iter_mut().zip(next.routes) {
            if let (Some(routes), Some(next)) = (routes, next) {
                routes.append(next);
            }
        }
    }
}

/// The results of micro-batches, with the indices of their sequences: each rank scores those that it is dealt, and has
/// those of all.
fn by_micro_batch<T: Scored>(
    executor: &Executor<'_>,
    sequences: &[Sequence],
    cut: MicroBatchLimits,
    score: impl FnOnce(&Executor<'_>, &[Vec<&Sequence>]) -> Result<Vec<T>>,
) -> Result<Vec<(Vec<usize>, T)>> {
    let world = executor.runtime().world();
    let batch = Batch::pack_for(sequences, cut, world.data_size())?;
    let (indices, micros) = (batch.indices(), batch.micros());
    let dealt = batch.deal(world.data_size());
    // as many passes as every rank makes, where each of them gathers weights
    let executor = executor.with_rounds(rounds(executor.plan, &dealt, Zero::Stage3));
    if world.is_solo() {
        return Ok(indices.iter().cloned().zip(score(&executor, &micros)?).collect());
    }
    let assigned: Vec<_> = dealt[world.data_rank()].iter().map(|&i| micros[i].clone()).collect();
    let gathered = world.gather::<Vec<T>>(&score(&executor, &assigned)?)?;
    // those of the last stage have the results
    let behind = gathered.len() - gathered.len() / world.stages();
    let mut results = gathered.into_iter().skip(behind);
    let mut scored = Vec::with_capacity(indices.len());
    for micros in dealt {
        let group = world.sequence_size() * world.tensor_size();
        let mut parts = results.by_ref().take(group);
        let mut whole = parts.next().unwrap_or_default();
        if world.tensor_size() > 1 {
            // those that share matrices have the same results
            parts.by_ref().for_each(drop);
        }
        for part in parts {
            for (scores, next) in whole.iter_mut().zip(part) {
                scores.append(next);
            }
        }
        scored.extend(micros.into_iter().map(|micro| indices[micro].clone()).zip(whole));
    }
    Ok(scored)
}

/// Values of chunks of scored tokens, by sequence.
///
/// # Errors
/// `Error::Device` if the values cannot be read.
fn split_by_sequence(chunks: Vec<Tensor<1>>, lengths: &[usize]) -> Result<Vec<Vec<f32>>> {
    let mut flat: Vec<f32> = Vec::new();
    for chunk in chunks {
        flat.extend(chunk.try_into_vec_as::<f32>().map_err(|e| device_error("reading log-probs", &e))?);
    }
    let mut rest = flat.as_slice();
    Ok(lengths
        .iter()
        .map(|&n| {
            let (values, others) = rest.split_at(n);
            rest = others;
            values.to_vec()
        })
        .collect())
}
