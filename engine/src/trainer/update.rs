//! Updates: epochs and mini-batches over a step's rollouts, one optimizer step of the policy or the critic each.

use super::sequences::{critic_sequence, replayed, sequence};
use super::{MAX_SKIPPED, Trainer};
use crate::batch::DropoutStep;
use crate::config::{CriticConfig, Mode, OldLogProbs};
use crate::executor::HeadLoss;
use crate::learner::{Learner, Updated};
use crate::metrics::{Phase, UpdateReport};
use crate::objective::mismatch::MismatchMetrics;
use crate::objective::{LossSums, OptimizerStep, TokenLoss};
use crate::plan::Role;
use crate::rollout::Rollout;
use crate::sequence::{Sequence, TokenColumns};
use crate::{Error, Result};
use firebrick_models::random::Stream;
use std::sync::Arc;

/// Stream of the shuffle of groups among mini-batches; the step is added.
const MINI_BATCH_STREAM: u64 = 2 << 32;

impl Trainer {
    /// Epochs and mini-batches over a step's rollouts. `step` makes one optimizer step of a mini-batch's completions, those
    /// apart of which no token is scored.
    pub(super) fn update(
        &mut self,
        rollouts: &[Rollout],
        mut step: impl FnMut(&mut Self, &[&Rollout]) -> Result<()>,
    ) -> Result<()> {
        for epoch in 0..self.config.update.ppo_epochs {
            for mut mini in self.minibatches(rollouts, epoch) {
                mini.retain(|rollout| rollout.is_scored());
                step(self, &mini)?;
            }
        }
        Ok(())
    }

    /// The policy's update.
    pub(super) fn update_policy(&mut self, rollouts: &[Rollout], lr: f64) -> Result<UpdateReport> {
        let mut report = UpdateReport::new(lr);
        let shared = self.config.shared_critic();
        report.value_lr = shared.map(|critic| lr * critic.value_rate(&self.config.optim));
        let objective = Arc::clone(&self.objective);
        let temperature = self.config.rollout.temperature;
        let compared = MismatchMetrics(objective.as_ref());
        self.update(rollouts, |t, mini| {
            let sequences = t.policy_sequences(mini)?;
            // until the first step, sampler and trainer have the same weights
            let first = report.grad_norm.value().is_none();
            let tokens: &dyn TokenLoss =
                if first && t.compares_with_sampler() { &compared } else { objective.as_ref() };
            let loss = match t.config.shared_critic() {
                Some(critic) => critic.joint_loss(tokens),
                None => tokens.into(),
            };
            let phase = Phase::UpdateActor;
            if let Some(own) = t.optimizer_step(phase, &sequences, temperature, loss, &mut report)? {
                objective.update_coefficients(&own, &mut t.state.coefficients);
            }
            Ok(())
        })?;
        Ok(report)
    }

    /// The critic's update.
    pub(super) fn update_critic(&mut self, rollouts: &[Rollout], lr: f64) -> Result<UpdateReport> {
        let mut report = UpdateReport::new(lr);
        let loss = self.critic().1.loss();
        self.update(rollouts, |t, mini| {
            let sequences = t.critic_sequences(mini);
            let phase = Phase::UpdateCritic;
            t.optimizer_step(phase, &sequences, 1.0, loss.into(), &mut report)?;
            Ok(())
        })?;
        Ok(report)
    }

    /// One optimizer step of the model that a phase updates, at the report's learning rate: applied, or skipped with a
    /// warning. Too many skips in a row end the run. Where no token has a weight in the loss there is no step: neither
    /// decay nor momentum moves the model, and the result is none.
    pub(super) fn optimizer_step(
        &mut self,
        phase: Phase,
        sequences: &[Sequence],
        temperature: f64,
        loss: HeadLoss<'_>,
        report: &mut UpdateReport,
    ) -> Result<Option<LossSums>> {
        if !sequences.iter().any(teaches) {
            report.skipped_empty += 1;
            let step = self.state.step + 1;
            tracing::warn!(
                "step {step}, {phase}: no token has a weight in the loss, so no optimizer step is taken; the metrics \
                 rollout/unjudged and rollout/masked count completions without a reward and masked ones"
            );
            return Ok(None);
        }
        let lr = report.lr;
        let (seed, skipped) = (self.config.trainer.seed, self.state.skipped_steps);
        let learner = self.learner_of(phase);
        learner.dropout = DropoutStep { seed, step: learner.optimizer.steps() + skipped };
        let gradients = self.recovering(phase, |t| t.learner_of(phase).accumulate(sequences, temperature, loss, lr));
        let gradients = gradients.map_err(|error| match error {
            Error::PartlyApplied { .. } => Error::PartlyApplied { way_back: self.way_back() },
            error => error,
        })?;
        let updated = self.run_irreversible(phase, |t| t.learner_of(phase).apply(gradients, lr))?;
        self.check_after(phase)?;
        report.add(&updated);
        self.check_skipped(phase, &updated)?;
        Ok(Some(updated.sums))
    }

    /// The learner that a phase updates.
    pub(super) fn learner_of(&mut self, phase: Phase) -> &mut Learner {
        match phase.updates() {
            Some(Role::Critic) => self.critic().0,
            Some(Role::Policy | Role::Reference | Role::RewardModel) | None => &mut self.learner,
        }
    }

    /// The critic and its settings, in a phase that only a run with a critic has.
    pub(super) fn critic(&mut self) -> (&mut Learner, &CriticConfig) {
        match (&mut self.critic, &self.config.critic) {
            (Some(critic), Some(config)) => (critic, config),
            _ => unreachable!("a phase of the critic"),
        }
    }

    /// Counts an optimizer step that was skipped. Too many in a row end the run.
    fn check_skipped(&mut self, phase: Phase, updated: &Updated) -> Result<()> {
        let outcome = updated.outcome;
        if outcome.applied {
            self.skipped_in_a_row.remove(&phase);
            self.overflows_in_a_row.remove(&phase);
            return Ok(());
        }
        self.state.skipped_steps += 1;
        let step = self.state.step + 1;
        if let (true, Some(scale)) = (outcome.rescaled, outcome.loss_scale) {
            let next = scale / 2.0;
            tracing::info!(
                "step {step}, {phase}: gradients overflow under a loss scale of {scale}; the update is skipped, and the scale \
                 is {next} from now on"
            );
            // before the first update the scale is looked for, and the weights are those that the run began with
            if self.learner_of(phase).optimizer.steps() > 0 {
                *self.overflows_in_a_row.entry(phase).or_default() += 1;
            }
            return Ok(());
        }
        let skipped = self.skipped_in_a_row.entry(phase).or_default();
        *skipped += 1;
        let count = *skipped;
        tracing::warn!("step {step}, {phase}: the gradient norm is {}; the update is skipped", outcome.grad_norm);
        if count < MAX_SKIPPED {
            return Ok(());
        }
        Err(Error::NonFinite {
            phase: phase.name(),
            section: self.optimizer_section(phase),
            step,
            count,
            way_back: self.way_back(),
        })
    }

    /// The section of the optimizer of a phase.
    fn optimizer_section(&self, phase: Phase) -> &'static str {
        match (phase.updates(), self.state.mode) {
            (Some(Role::Critic), _) => "critic.optim",
            (_, Mode::Rl) if phase != Phase::WarmUp => "optim",
            (_, Mode::Sft) if self.config.sft.is_some() => "sft.optim",
            (_, Mode::Rl | Mode::Sft) => "warmup.sft.optim",
        }
    }

    /// Whether the update's own forward measures the mismatch of sampler and trainer: nobody computed the sampler's
    /// log-probs again, and no dropout is in between.
    fn compares_with_sampler(&self) -> bool {
        let lora = self.learner.decoder().lora();
        let drops = lora.is_some_and(|lora| lora.dropout > 0.0);
        self.config.update.old_log_probs == OldLogProbs::Sampler && !drops
    }

    /// Sequences of one optimizer step of the policy, with everything fixed that they share.
    fn policy_sequences(&mut self, mini: &[&Rollout]) -> Result<Vec<Sequence>> {
        let mut sequences: Vec<Sequence> = mini.iter().map(|r| sequence(r)).collect();
        if sequences.is_empty() {
            return Ok(sequences);
        }
        if self.config.rollout.router_replay {
            sequences = replayed(sequences, mini.iter().copied());
        }
        let temperature = self.config.rollout.temperature;
        let score = |t: &mut Self| t.learner.score(&sequences, temperature);
        let scores =
            if self.objective.needs().scores { Some(self.recovering(Phase::UpdateActor, score)?) } else { None };
        let mut step = OptimizerStep {
            sequences: &mut sequences,
            max_length: self.config.rollout.response_length,
            scores: scores.as_ref(),
            seed: self.config.trainer.seed,
            step: self.learner.optimizer.steps() + self.state.skipped_steps,
        };
        self.objective.prepare(&mut step, &mut self.state.coefficients);
        if let Some(critic) = self.config.shared_critic() {
            let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
            let weights = critic.weights(&lengths, self.config.rollout.response_length);
            for (sequence, weights) in sequences.iter_mut().zip(weights) {
                sequence.columns.value_weight = Some(weights);
            }
        }
        Ok(sequences)
    }

    /// Sequences of one optimizer step of the critic, with their weights.
    fn critic_sequences(&mut self, mini: &[&Rollout]) -> Vec<Sequence> {
        let longest = self.config.rollout.response_length;
        let mut sequences: Vec<Sequence> = mini.iter().map(|r| critic_sequence(r)).collect();
        let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
        let weights = self.critic().1.weights(&lengths, longest);
        for (sequence, weights) in sequences.iter_mut().zip(weights) {
            sequence.columns.weight = Some(weights);
        }
        sequences
    }

    /// Groups of a step, cut into mini-batches; shuffled by (seed, step, epoch) where there are several.
    fn minibatches<'r>(&self, rollouts: &'r [Rollout], epoch: usize) -> Vec<Vec<&'r Rollout>> {
        let mut groups: Vec<&[Rollout]> = rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index).collect();
        let size = self.config.update.ppo_mini_batch_size.unwrap_or(groups.len());
        if size < groups.len() {
            let stream = MINI_BATCH_STREAM + (self.state.step << 8) + epoch as u64;
            Stream::new(self.config.trainer.seed, stream).shuffle(&mut groups);
        }
        groups.chunks(size).map(|c| c.iter().flat_map(|g| g.iter()).collect()).collect()
    }
}

/// Whether a token of a sequence has a weight in the loss of the policy, in its entropy bonus, or in the value loss.
fn teaches(sequence: &Sequence) -> bool {
    let TokenColumns { weight, bonus, value_weight, .. } = &sequence.columns;
    [weight, bonus, value_weight].into_iter().flatten().flatten().any(|weight| *weight != 0.0)
}
