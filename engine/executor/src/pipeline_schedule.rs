//! The order in which a stage of a pipeline works on micro-batches: one forward, one backward (1F1B; Narayanan et al.,
//! 2019, `PipeDream`, arXiv:1806.03377, in the variant that flushes at the end of every step, arXiv:2006.09503).
//!
//! A stage begins with as many forward passes as there are stages behind it, then takes a backward pass after every
//! forward pass, and ends with the backward passes that are left. So it never has more than `stages - stage`
//! micro-batches whose activations it keeps, whatever number a step has, and the backward passes of all stages are in
//! the order of the micro-batches: gradients are added in the same order as on one rank.

use super::gradients::Gradients;
use super::head::HeadLoss;
use super::pipeline_parallel::Neighbors;
use super::segment_executor::Executor;
use super::training_pass::{Pass, UnitHook};
use burn::tensor::Tensor;
use firebrick_arch::PipelineStage;
use firebrick_core::Result;
use firebrick_core::sequence::Sequence;
use firebrick_models::Decoder;
use firebrick_objectives::LossSums;
use std::collections::VecDeque;

/// A step of a stage, with its micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PipelineStep {
    /// Receives the rows of the stage before.
    ReceiveRows(usize),
    /// Runs its layers forward.
    Forward(usize),
    /// Sends its rows to the stage behind.
    SendRows(usize),
    /// Receives the gradient of its rows from the stage behind.
    ReceiveGradient(usize),
    /// Runs its layers backward.
    Backward(usize),
    /// Sends the gradient of the rows that it received to the stage before.
    SendGradient(usize),
}

/// The steps of a stage over `micros` micro-batches. Between two stages that exchange rows and gradients the first one
/// receives before it sends, so that no order of messages waits for itself, not even where a send waits until it is
/// received.
pub(super) fn one_forward_one_backward(stage: PipelineStage, micros: usize) -> Vec<PipelineStep> {
    use PipelineStep::{Backward, Forward, ReceiveGradient, ReceiveRows, SendGradient, SendRows};
    let (first, last) = (stage.is_first(), stage.is_last());
    let ahead = (stage.stages() - stage.stage() - 1).min(micros);
    let mut steps = Vec::new();
    let mut take = |step: PipelineStep| match step {
        ReceiveRows(_) | SendGradient(_) if first => {}
        ReceiveGradient(_) | SendRows(_) if last => {}
        step => steps.push(step),
    };
    for micro in 0..ahead {
        [ReceiveRows(micro), Forward(micro), SendRows(micro)].into_iter().for_each(&mut take);
    }
    for micro in ahead..micros {
        let earlier = micro - ahead;
        [
            ReceiveRows(micro),
            Forward(micro),
            ReceiveGradient(earlier),
            SendRows(micro),
            Backward(earlier),
            SendGradient(earlier),
        ]
        .into_iter()
        .for_each(&mut take);
    }
    for micro in micros - ahead..micros {
        [ReceiveGradient(micro), Backward(micro), SendGradient(micro)].into_iter().for_each(&mut take);
    }
    steps
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

/// The tensor of an earlier step of the schedule.
fn scheduled<T>(of: Option<T>) -> T {
    match of {
        Some(left) => left,
        None => unreachable!("the schedule makes it before it is used"),
    }
}

/// A stage's way through an optimizer step.
struct StagePass<'a, 'r> {
    executor: &'a Executor<'r>,
    neighbors: Neighbors<'a>,
    loss: HeadLoss<'a>,
    sums: LossSums,
    buffers: StageBuffers<'a, 'r>,
}

impl<'a, 'r> StagePass<'a, 'r> {
    fn pass(&self, decoder: &Decoder, sequences: &[&Sequence]) -> Pass<'a, 'r> {
        let micro = self.executor.micro_with_dropout(decoder, sequences);
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
        let neighbors = self.neighbors;
        match step {
            PipelineStep::ReceiveRows(micro) => {
                let pass = self.pass(decoder, &micros[micro]);
                self.buffers.rows = Some(neighbors.receive_rows(&pass.micros[0])?);
                self.buffers.next = Some(pass);
            }
            PipelineStep::Forward(micro) => {
                let pass = self.buffers.next.take().unwrap_or_else(|| self.pass(decoder, &micros[micro]));
                self.forward(pass, decoder, gradients)?;
            }
            PipelineStep::SendRows(_) => {
                neighbors.send_rows(scheduled(self.buffers.rows.take()))?;
            }
            PipelineStep::ReceiveGradient(_) => {
                let pass = scheduled(self.buffers.in_flight.front());
                let d_rows = neighbors.receive_gradient(&pass.micros[0])?;
                self.buffers.d_rows = Some(d_rows);
            }
            PipelineStep::Backward(_) => self.backward(decoder, gradients)?,
            PipelineStep::SendGradient(_) => {
                neighbors.send_gradient(scheduled(self.buffers.d_input.take()))?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, mut pass: Pass<'a, 'r>, decoder: &Decoder, gradients: &mut Gradients) -> Result<()> {
        let rows = match self.buffers.rows.take() {
            Some(rows) => vec![rows],
            None => pass.embed(decoder)?,
        };
        let mut rows = pass.forward(decoder, rows)?;
        if decoder.has_head() {
            let mut d_rows = pass.head(decoder, rows, self.loss, gradients, &mut self.sums)?;
            self.buffers.d_rows = d_rows.pop();
        } else {
            self.buffers.rows = rows.pop();
        }
        // weights that are copied ahead of their use would wait beside those of every micro-batch in flight
        pass.visit(Vec::new());
        self.buffers.in_flight.push_back(pass);
        Ok(())
    }

    fn backward(&mut self, decoder: &mut Decoder, gradients: &mut Gradients) -> Result<()> {
        let nobody: UnitHook<'_> = &mut |_, _, _| Ok(());
        let mut pass = scheduled(self.buffers.in_flight.pop_front());
        let d_rows = scheduled(self.buffers.d_rows.take());
        pass.visit(self.executor.backward_visits().collect());
        let mut d_input = pass.backward(decoder, vec![d_rows], gradients, nobody)?;
        if decoder.embeds() {
            return pass.embedding_backward(decoder, d_input, gradients, nobody);
        }
        self.buffers.d_input = d_input.pop();
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
        let neighbors = scheduled(Neighbors::new(decoder, self.runtime)?);
        let mut pass =
            StagePass { executor: self, neighbors, loss, sums: LossSums::default(), buffers: StageBuffers::default() };
        for step in one_forward_one_backward(neighbors.stage, micros.len()) {
            pass.take(step, decoder, micros, gradients)?;
        }
        let sums = pass.sums;
        gradients.finish()?;
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PipelineStep::{Backward, Forward, ReceiveGradient, ReceiveRows, SendGradient, SendRows};

    fn all(stages: usize, micros: usize) -> Vec<Vec<PipelineStep>> {
        (0..stages).map(|stage| one_forward_one_backward(PipelineStage::new(stage, stages), micros)).collect()
    }

    fn sizes() -> impl Iterator<Item = (usize, usize)> {
        (1..9).flat_map(|stages| (0..20).map(move |micros| (stages, micros)))
    }

    /// The other stage of a message, whether it is sent, and what is on the way.
    fn message(stage: usize, step: PipelineStep) -> Option<(usize, bool, (bool, usize))> {
        match step {
            SendRows(micro) => Some((stage + 1, true, (true, micro))),
            ReceiveRows(micro) => Some((stage - 1, false, (true, micro))),
            SendGradient(micro) => Some((stage - 1, true, (false, micro))),
            ReceiveGradient(micro) => Some((stage + 1, false, (false, micro))),
            Forward(_) | Backward(_) => None,
        }
    }

    #[test]
    fn every_stage_runs_every_micro_batch_once_each_way_and_in_their_order() {
        for (stages, micros) in sizes() {
            for steps in all(stages, micros) {
                let forward = steps.iter().filter_map(|step| match step {
                    Forward(micro) => Some(*micro),
                    _ => None,
                });
                assert!(forward.eq(0..micros), "{stages} {micros}");
                let backward = steps.iter().filter_map(|step| match step {
                    Backward(micro) => Some(*micro),
                    _ => None,
                });
                assert!(backward.eq(0..micros), "{stages} {micros}");
            }
        }
    }

    #[test]
    fn a_stage_keeps_at_most_as_many_micro_batches_as_there_are_stages_from_it_on() {
        for (stages, micros) in sizes() {
            for (stage, steps) in all(stages, micros).into_iter().enumerate() {
                let (mut kept, mut most) = (0, 0);
                for step in steps {
                    match step {
                        Forward(_) => kept += 1,
                        Backward(_) => kept -= 1,
                        _ => {}
                    }
                    most = most.max(kept);
                }
                assert_eq!(most, micros.min(stages - stage), "{stages} {micros}");
            }
        }
    }

    #[test]
    fn no_stage_waits_for_itself_where_a_send_waits_until_it_is_received() {
        for (stages, micros) in sizes() {
            let steps = all(stages, micros);
            let mut at = vec![0; stages];
            loop {
                let before = at.clone();
                for stage in 0..stages {
                    let Some(&step) = steps[stage].get(at[stage]) else {
                        continue;
                    };
                    let Some((other, sends, what)) = message(stage, step) else {
                        at[stage] += 1;
                        continue;
                    };
                    let theirs = steps[other].get(at[other]).and_then(|&step| message(other, step));
                    // both have come to the same message
                    if theirs == Some((stage, !sends, what)) {
                        at[stage] += 1;
                        at[other] += 1;
                    }
                }
                if at == before {
                    break;
                }
            }
            let ends: Vec<usize> = steps.iter().map(Vec::len).collect();
            assert_eq!(at, ends, "{stages} stages, {micros} micro-batches");
        }
    }

    #[test]
    fn two_stages_take_turns() {
        let first = [
            Forward(0),
            SendRows(0),
            Forward(1),
            ReceiveGradient(0),
            SendRows(1),
            Backward(0),
            ReceiveGradient(1),
            Backward(1),
        ];
        let last = [
            ReceiveRows(0),
            Forward(0),
            Backward(0),
            SendGradient(0),
            ReceiveRows(1),
            Forward(1),
            Backward(1),
            SendGradient(1),
        ];
        assert_eq!(all(2, 2), [first, last]);
    }
}
