//! Optimizer steps of a training step, and what they add up to.

use super::{MAX_SKIPPED, Metrics, Trainer};
use crate::batch::{BatchStats, DropoutStep, Sequence};
use crate::learner::Updated;
use crate::schedule::{HeadLoss, LossSums};
use crate::{Error, Result};
use std::collections::BTreeMap;

/// The phase's name.
pub(super) const UPDATE: &str = "update_actor";
/// The critic's.
pub(super) const UPDATE_CRITIC: &str = "update_critic";

/// Sums over the optimizer steps of a training step, averaged when reported.
pub(super) struct UpdateSums {
    grad_norm: &'static str,
    loss_scale: &'static str,
    num_micro_batches: &'static str,
    /// Of what else is said of the micro-batches.
    prefix: &'static str,
    /// Sums of the metrics, and the optimizer steps that reported them.
    values: BTreeMap<String, (f64, u64)>,
    batch: BatchStats,
}

impl UpdateSums {
    /// Of the policy's update.
    pub fn of_policy() -> Self {
        let names = ["actor/grad_norm", "actor/loss_scale"];
        Self::new(names, "batch/num_micro_batches", "batch/")
    }

    /// Of the critic's.
    pub fn of_critic() -> Self {
        let micro_batches = "batch/num_critic_micro_batches";
        let names = ["critic/grad_norm", "critic/loss_scale"];
        Self::new(names, micro_batches, "batch/critic_")
    }

    fn new(
        [grad_norm, loss_scale]: [&'static str; 2],
        num_micro_batches: &'static str,
        prefix: &'static str,
    ) -> Self {
        Self {
            grad_norm,
            loss_scale,
            num_micro_batches,
            prefix,
            values: BTreeMap::new(),
            batch: BatchStats::default(),
        }
    }

    /// Means over the optimizer steps that reported each.
    pub fn metrics(&self) -> Metrics {
        let mean =
            |(name, &(sum, steps)): (&String, &(f64, u64))| (name.clone(), sum / steps as f64);
        let mut metrics: Metrics = self.values.iter().map(mean).collect();
        let batch = &self.batch;
        metrics.insert(self.num_micro_batches.into(), batch.micro_batches as f64);
        let cut = [
            ("tokens", batch.tokens as f64),
            ("padding", batch.padding()),
            ("attention_padding", batch.attention_padding()),
            ("largest_micro_batch", batch.largest as f64),
            ("token_budget", batch.budget as f64),
            ("imbalance", batch.imbalance),
        ];
        metrics.extend(cut.map(|(name, value)| (format!("{}{name}", self.prefix), value)));
        metrics
    }

    fn absorb(&mut self, updated: &Updated) {
        let outcome = &updated.outcome;
        let norm = (self.grad_norm, outcome.grad_norm);
        let scale = outcome.loss_scale.map(|scale| (self.loss_scale, scale));
        for (name, value) in updated.sums.values().chain([norm]).chain(scale) {
            let (sum, steps) = self.values.entry(name.to_owned()).or_default();
            *sum += value;
            *steps += 1;
        }
        self.batch.absorb(updated.batch);
    }
}

impl Trainer {
    /// One optimizer step: applied, or skipped with a word. Too many skips in a row end the run.
    pub(super) fn optimizer_step(
        &mut self,
        sequences: &[Sequence],
        temperature: f64,
        loss: HeadLoss<'_>,
        lr: f64,
        into: &mut UpdateSums,
    ) -> Result<LossSums> {
        self.learner.dropout = DropoutStep {
            seed: self.config.trainer.seed,
            step: self.learner.optimizer.steps() + self.state.skipped_steps,
        };
        let gradients = self.recovering(UPDATE, |t| {
            t.learner.accumulate(sequences, temperature, loss, lr)
        })?;
        let updated = self.learner.apply(gradients, lr)?;
        self.check_after(UPDATE)?;
        self.concluded(UPDATE, updated, into)
    }

    /// Notes what an optimizer step did. Too many skipped ones in a row end the run.
    pub(super) fn concluded(
        &mut self,
        phase: &'static str,
        updated: Updated,
        into: &mut UpdateSums,
    ) -> Result<LossSums> {
        let outcome = updated.outcome;
        into.absorb(&updated);
        if outcome.applied {
            self.skipped_in_a_row.remove(phase);
            return Ok(updated.sums);
        }
        self.state.skipped_steps += 1;
        if let (true, Some(scale)) = (outcome.rescaled, outcome.loss_scale) {
            let (step, next) = (self.state.step + 1, scale / 2.0);
            tracing::info!(
                "step {step}, {phase}: gradients overflow under a loss scale of {scale}; the update is skipped, and the scale \
                 is {next} from now on"
            );
            return Ok(updated.sums);
        }
        let count = self.skipped_in_a_row.entry(phase).or_default();
        *count += 1;
        let step = self.state.step + 1;
        tracing::warn!(
            "step {step}, {phase}: the gradient norm is {}; the update is skipped",
            outcome.grad_norm
        );
        if *count >= MAX_SKIPPED {
            let count = *count;
            let section = match phase {
                UPDATE_CRITIC => "critic.optim",
                _ => "optim",
            };
            return Err(Error::NonFinite {
                phase,
                section,
                step,
                count,
            });
        }
        Ok(updated.sums)
    }
}
