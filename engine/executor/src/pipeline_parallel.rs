//! Stages of a model on ranks of their own (Huang et al., 2019, arXiv:1811.06965): rows go from stage to stage, and
//! their gradients back, a micro-batch at a time, in the order of [`one_forward_one_backward`]. A stage has no more
//! than one message a micro-batch and direction. While it scores, a stage sends the rows of a micro-batch when the next
//! one has taken those of the one before, so that no more than one micro-batch's wait there, whichever stage is faster.
//!
//! A tied matrix is on the first stage, as the embedding, and on the last, as the projection. Both add up its gradient,
//! and update it alike.

use super::boundary_log::{Boundary, BoundaryKind};
use super::embedding::embed;
use super::gradient::Gradient;
use super::gradients::Gradients;
use super::head::{self, HeadLoss};
use super::pipeline_schedule::{PipelineStep, one_forward_one_backward};
use super::runtime::Runtime;
use super::segment_executor::Executor;
use super::segment_graph::run;
use super::training_pass::{Done, Pass};
use crate::batch::MicroBatch;
use burn::tensor::{DType, Tensor};
use firebrick_arch::PipelineStage;
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::{Element, Flat};
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::HostTensor;
use firebrick_core::sequence::Sequence;
use firebrick_core::{Error, Result};
use firebrick_models::head::Head;
use firebrick_models::{Arch, Decoder};
use firebrick_objectives::LossSums;
use firebrick_plan::Role;
use std::collections::VecDeque;

/// Refuses a model that cannot be cut into so many stages.
///
/// # Errors
/// `Error::Ranks` with the key, the model's role, why not, and what to do instead.
pub fn check_stages(role: Role, arch: &Arch, stages: usize) -> Result<()> {
    PipelineStage::check(arch, stages).map_err(|why| {
        Error::Ranks(format!(
            "memory.pipeline_model_parallel_size: {stages} splits the layers of the {}, but {why}",
            role.name()
        ))
    })
}

/// What this stage exchanges with the ones beside it.
#[derive(Clone, Copy)]
struct Neighbours<'a> {
    runtime: &'a Runtime,
    stage: PipelineStage,
    /// Width of a row.
    hidden: usize,
    /// Type of its numbers.
    stored: DType,
}

impl<'a> Neighbours<'a> {
    fn of(decoder: &Decoder, runtime: &'a Runtime) -> Result<Self> {
        let (world, arch) = (runtime.world(), decoder.arch());
        match decoder.stage() {
            Some(stage) if world.pipeline_stage() == Some(stage) => {
                Ok(Self { runtime, stage, hidden: arch.hidden_size, stored: arch.precision.dtype(decoder.device()) })
            }
            _ => Err(Error::Ranks(format!(
                "the model is split into {} stages, and the ranks into {}",
                decoder.stage().map_or(1, |stage| stage.stages()),
                world.stages()
            ))),
        }
    }

    /// Sends the rows of a micro-batch, or their gradient, to another stage.
    fn send(self, stage: usize, rows: Tensor<2>) -> Result<()> {
        let own = HostTensor::download(rows)?;
        let accounts = &self.runtime.accounts;
        let _held = accounts.hold(Category::Communication, Home::Host, own.bytes());
        let world = self.runtime.world();
        world.part_ranks().send(stage, Flat::as_stored(own))
    }

    /// Tells the stage before that its rows were taken: it may send the next ones.
    fn say_taken(self) -> Result<()> {
        let world = self.runtime.world();
        world.part_ranks().send(self.stage.stage() - 1, Flat::Bytes(Vec::new()))
    }

    /// Waits until the stage behind says that it has taken the rows that were sent last.
    fn wait_until_taken(self) -> Result<()> {
        let world = self.runtime.world();
        let behind = self.stage.stage() + 1;
        world.part_ranks().receive(behind, 0, Element::Byte).map(drop)
    }

    /// The rows of a micro-batch, or their gradient, from another stage.
    fn receive(self, stage: usize, micro: &MicroBatch) -> Result<Tensor<2>> {
        let [tokens] = micro.ids.dims();
        let shape = [tokens, self.hidden];
        let element = match self.stored {
            DType::F64 => Element::F64,
            DType::BF16 => Element::Bf16,
            DType::F16 => Element::F16,
            _ => Element::F32,
        };
        let world = self.runtime.world();
        let values = world.part_ranks().receive(stage, tokens * self.hidden, element)?;
        let rows = values.into_host_tensor(shape);
        let accounts = &self.runtime.accounts;
        let _held = accounts.hold(Category::Communication, Home::Host, rows.bytes());
        Ok(stored_as(rows.into_device(self.runtime.device()), self.stored))
    }
}

/// Tensors that a stage holds between two steps of the schedule.
#[derive(Default)]
struct StageBuffers<'a, 'r> {
    /// The micro-batch whose rows were received and not used.
    next: Option<Pass<'a, 'r>>,
    /// Rows, before this stage's layers or behind them.
    rows: Option<Tensor<2>>,
    /// The gradient of rows behind its layers.
    d_rows: Option<Tensor<2>>,
    /// The gradient of rows before its layers.
    d_input: Option<Tensor<2>>,
    /// Micro-batches that went forward and not backward, the first one first.
    in_flight: VecDeque<Pass<'a, 'r>>,
}

/// What an earlier step of the schedule has left.
fn left<T>(of: Option<T>) -> T {
    match of {
        Some(left) => left,
        None => unreachable!("the schedule makes it before it is used"),
    }
}

/// A stage's way through an optimizer step.
struct StagePass<'a, 'r> {
    executor: &'a Executor<'r>,
    neighbours: Neighbours<'a>,
    loss: HeadLoss<'a>,
    sums: LossSums,
    at_hand: StageBuffers<'a, 'r>,
}

impl<'a, 'r> StagePass<'a, 'r> {
    fn pass(&self, decoder: &Decoder, sequences: &[&Sequence]) -> Pass<'a, 'r> {
        let micro = self.executor.dropped(decoder, sequences);
        let visits = self.executor.forward_visits(decoder);
        Pass::new(self.executor, vec![micro], visits)
    }

    fn take(
        &mut self,
        step: PipelineStep,
        decoder: &mut Decoder,
        micros: &[Vec<&Sequence>],
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (neighbours, stage) = (self.neighbours, self.neighbours.stage.stage());
        match step {
            PipelineStep::ReceiveRows(micro) => {
                let pass = self.pass(decoder, &micros[micro]);
                self.at_hand.rows = Some(neighbours.receive(stage - 1, &pass.micros[0])?);
                self.at_hand.next = Some(pass);
            }
            PipelineStep::Forward(micro) => {
                let pass = self.at_hand.next.take();
                let pass = pass.unwrap_or_else(|| self.pass(decoder, &micros[micro]));
                self.forward(pass, decoder, gradients)?;
            }
            PipelineStep::SendRows(_) => {
                neighbours.send(stage + 1, left(self.at_hand.rows.take()))?;
            }
            PipelineStep::ReceiveGradient(_) => {
                let pass = left(self.at_hand.in_flight.front());
                let d_rows = neighbours.receive(stage + 1, &pass.micros[0])?;
                self.at_hand.d_rows = Some(d_rows);
            }
            PipelineStep::Backward(_) => self.backward(decoder, gradients)?,
            PipelineStep::SendGradient(_) => {
                neighbours.send(stage - 1, left(self.at_hand.d_input.take()))?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, mut pass: Pass<'a, 'r>, decoder: &Decoder, gradients: &mut Gradients) -> Result<()> {
        let rows = match self.at_hand.rows.take() {
            Some(rows) => vec![rows],
            None => pass.embed(decoder)?,
        };
        let mut rows = pass.forward(decoder, rows)?;
        if decoder.has_head() {
            let mut d_rows = pass.head(decoder, rows, self.loss, gradients, &mut self.sums)?;
            self.at_hand.d_rows = d_rows.pop();
        } else {
            self.at_hand.rows = rows.pop();
        }
        // weights that are copied ahead of their use would wait beside those of every micro-batch in flight
        pass.visit(Vec::new());
        self.at_hand.in_flight.push_back(pass);
        Ok(())
    }

    fn backward(&mut self, decoder: &mut Decoder, gradients: &mut Gradients) -> Result<()> {
        let nobody: Done<'_> = &mut |_, _, _| Ok(());
        let mut pass = left(self.at_hand.in_flight.pop_front());
        let d_rows = left(self.at_hand.d_rows.take());
        pass.visit(self.executor.backward_visits().collect());
        let mut d_input = pass.backward(decoder, vec![d_rows], gradients, nobody)?;
        if decoder.embeds() {
            return pass.embedding_backward(decoder, d_input, gradients, nobody);
        }
        self.at_hand.d_input = d_input.pop();
        Ok(())
    }
}

impl Executor<'_> {
    /// Forward and backward of an optimizer step's micro-batches through this rank's stage: adds to `gradients`,
    /// returns the sums of the loss on the last stage.
    pub(super) fn backward_in_stages(
        &self,
        decoder: &mut Decoder,
        micros: &[Vec<&Sequence>],
        loss: HeadLoss<'_>,
        gradients: &mut Gradients,
    ) -> Result<LossSums> {
        let neighbours = Neighbours::of(decoder, self.runtime)?;
        let mut pass =
            StagePass { executor: self, neighbours, loss, sums: LossSums::default(), at_hand: StageBuffers::default() };
        for step in one_forward_one_backward(neighbours.stage, micros.len()) {
            pass.take(step, decoder, micros, gradients)?;
        }
        let sums = pass.sums;
        gradients.finish()?;
        Ok(sums)
    }

    /// Runs micro-batches through this rank's stage without a graph; the last stage reads their scored rows off the
    /// head, the others give nothing.
    pub(super) fn forward_in_stages<T>(
        &self,
        decoder: &Decoder,
        micros: &[Vec<&Sequence>],
        read: impl Fn(&Head<'_>, &MicroBatch, Tensor<2>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let neighbours = Neighbours::of(decoder, self.runtime)?;
        let stage = neighbours.stage.stage();
        let mut all = Vec::new();
        for (place, sequences) in micros.iter().enumerate() {
            let micro = self.micro(decoder, sequences);
            let mut fetch = self.fetcher(self.forward_visits(decoder));
            let mut rows = if decoder.embeds() {
                let (fetched, own) = (fetch.next(decoder)?, std::slice::from_ref(&micro));
                let mut rows = embed(decoder, &fetched, own, self.runtime)?;
                left(rows.pop())
            } else {
                let rows = neighbours.receive(stage - 1, &micro)?;
                if place + 1 < micros.len() {
                    neighbours.say_taken()?;
                }
                rows
            };
            for (i, segment) in self.plan.segments.iter().enumerate() {
                let fetched = fetch.next(decoder)?;
                let units = segment.units.clone();
                let weights = &fetched.weights;
                run(decoder, units, weights, &mut rows, &micro, self.runtime)?;
                self.runtime.boundary(Boundary::at(BoundaryKind::Forward, i))?;
            }
            if !decoder.has_head() {
                if place > 0 {
                    neighbours.wait_until_taken()?;
                }
                neighbours.send(stage + 1, rows)?;
                continue;
            }
            let fetched = fetch.next(decoder)?;
            let head = decoder.head_with(&fetched.weights[0]);
            let hidden = head::scored_rows(rows, &micro);
            self.runtime.boundary(BoundaryKind::Head)?;
            all.push(read(&head, &micro, hidden)?);
        }
        Ok(all)
    }
}

impl Gradients {
    /// Adds up what the first and the last stage have of the gradient of a tied matrix: afterwards both have the same,
    /// to the bit. A stage that had no micro-batch contributes zeros.
    pub(super) fn sum_tied_ends(&mut self, decoder: &Decoder, runtime: &Runtime) -> Result<()> {
        let Some(stage) = decoder.stage() else {
            return Ok(());
        };
        let (arch, embedding) = (decoder.arch(), &decoder.units()[0]);
        if !arch.tied || decoder.is_elsewhere(0) || !embedding.trains() {
            return Ok(());
        }
        self.finish()?;
        let other = if stage.is_first() { stage.stages() - 1 } else { 0 };
        let element = match arch.precision.dtype(decoder.device()) {
            DType::F64 => Element::F64,
            _ => Element::F32,
        };
        for (spec, index) in embedding.specs.iter().zip(embedding.range.clone()) {
            if !spec.trainable {
                continue;
            }
            let own = match self.take_own(index) {
                Some(gradient) => Flat::from(gradient.into_host()?),
                None => Flat::zeros(element, spec.numel()),
            };
            let bytes = 2 * own.as_bytes().len();
            let held = self.accounts().hold(Category::Communication, Home::Host, bytes);
            let world = runtime.world();
            world.part_ranks().send(other, own.clone())?;
            let theirs = world.part_ranks().receive(other, own.len(), element)?;
            let [first, last] = if stage.is_first() { [own, theirs] } else { [theirs, own] };
            let mut sum = first.into_host_tensor(spec.rows_cols());
            sum.add(last.into_host_tensor(spec.rows_cols()));
            drop(held);
            self.put(index, Gradient::Host(sum), decoder.device());
        }
        Ok(())
    }
}
