//! One optimizer step: micro-batches under the budget, backward through each, one update.

use super::{MAX_SKIPPED, Metrics, Trainer};
use crate::batch::{Cut, MicroBatch, Sequence, pack};
use crate::gradients::Gradients;
use crate::objective::TokenLoss;
use crate::optim::AdamW;
use crate::plan::ModelPlan;
use crate::schedule::{LossSums, Schedule};
use crate::{Error, Result};
use firebrick_models::Decoder;

/// Sums over the optimizer steps of a training step, averaged when reported.
#[derive(Default)]
pub(super) struct UpdateSums {
    values: Metrics,
    steps: u64,
    micro_batches: u64,
}

impl UpdateSums {
    /// Means over the optimizer steps.
    pub fn metrics(&self) -> Metrics {
        let steps = self.steps.max(1) as f64;
        let mut metrics: Metrics = self
            .values
            .iter()
            .map(|(k, v)| (k.clone(), v / steps))
            .collect();
        metrics.insert("batch/num_micro_batches".into(), self.micro_batches as f64);
        metrics
    }

    fn absorb(&mut self, sums: &LossSums, grad_norm: f64) {
        for (name, value) in sums.values() {
            *self.values.entry(name.to_owned()).or_default() += value;
        }
        *self.values.entry("actor/grad_norm".into()).or_default() += grad_norm;
        self.steps += 1;
    }
}

/// Forward and backward over all micro-batches of one optimizer step.
pub(super) fn accumulate(
    decoder: &Decoder,
    plan: &ModelPlan,
    sequences: &[Sequence],
    cut: Cut,
    temperature: f64,
    loss: &dyn TokenLoss,
) -> Result<(Gradients, LossSums, usize)> {
    let schedule = Schedule::new(decoder, plan, temperature);
    let mut gradients = Gradients::new(decoder.specs().count());
    let mut sums = LossSums::default();
    let micros = pack(sequences, cut)?;
    for indices in &micros {
        let own: Vec<&Sequence> = indices.iter().map(|&i| &sequences[i]).collect();
        let micro = MicroBatch::new(decoder.arch(), &own, decoder.device());
        sums.absorb(&schedule.backward(&micro, loss, &mut gradients)?);
    }
    Ok((gradients, sums, micros.len()))
}

impl Trainer {
    /// Applies an update, or skips it and says so. Too many skips in a row end the run.
    pub(super) fn apply(
        &mut self,
        optimizer: &mut AdamW,
        gradients: Gradients,
        sums: &LossSums,
        lr: f64,
        into: &mut UpdateSums,
        micro_batches: usize,
    ) -> Result<()> {
        let outcome = optimizer.step(&mut self.decoder, gradients, lr)?;
        into.absorb(sums, outcome.grad_norm);
        into.micro_batches += micro_batches as u64;
        if outcome.applied {
            self.skipped_in_a_row = 0;
            return Ok(());
        }
        self.state.skipped_steps += 1;
        self.skipped_in_a_row += 1;
        let step = self.state.step + 1;
        tracing::warn!(
            "step {step}: the gradient norm is {}; the update is skipped",
            outcome.grad_norm
        );
        if self.skipped_in_a_row >= MAX_SKIPPED {
            return Err(Error::NonFinite {
                step,
                count: self.skipped_in_a_row,
            });
        }
        Ok(())
    }
}
