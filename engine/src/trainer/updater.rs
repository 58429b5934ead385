//! Updates: epochs and mini-batches over a step's rollouts or examples, one optimizer step of the policy or the critic
//! each.

use super::recovery::Recovery;
use super::scorer::replayed;
use super::session::{LrSchedules, Session};
use crate::batch::DropoutStep;
use crate::checkpoint::TrainerState;
use crate::config::{CriticConfig, Mode, OldLogProbs};
use crate::data::SftDataset;
use crate::executor::HeadLoss;
use crate::learner::Updated;
use crate::metrics::{Phase, UpdateReport};
use crate::objective::mismatch::MismatchMetrics;
use crate::objective::{LossSums, OptimizerStep, TokenLoss};
use crate::plan::Role;
use crate::rollout::Rollout;
use crate::sequence::{SampleId, Sequence, TokenColumns};
use crate::{Error, Result};
use firebrick_models::random::Stream;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Stream of the shuffle of groups among mini-batches; the step is added.
const MINI_BATCH_STREAM: u64 = 2 << 32;

/// Non-finite optimizer steps in a row that end a run.
const MAX_SKIPPED: u64 = 10;

/// The loss of an optimizer step, and the phase whose model it updates.
pub(super) struct StepLoss<'l> {
    pub phase: Phase,
    /// What logits are divided by.
    pub temperature: f64,
    pub loss: HeadLoss<'l>,
}

/// Makes optimizer steps, and counts those that are skipped.
pub(super) struct Updater {
    session: Arc<Session>,
    pub schedules: LrSchedules,
    /// Examples of supervised training, where there is or was to come any.
    pub demonstrations: Option<Arc<SftDataset>>,
    /// Optimizer steps skipped in a row, by phase: for gradients that were not finite, or that only overflowed.
    skipped_in_a_row: BTreeMap<Phase, u64>,
    overflows_in_a_row: BTreeMap<Phase, u64>,
}

impl Updater {
    pub fn new(session: &Arc<Session>, schedules: LrSchedules, demonstrations: Option<Arc<SftDataset>>) -> Self {
        Self {
            session: Arc::clone(session),
            schedules,
            demonstrations,
            skipped_in_a_row: BTreeMap::new(),
            overflows_in_a_row: BTreeMap::new(),
        }
    }

    /// Whether the last update of a model was skipped for gradients that were not finite. One that only overflowed
    /// under its loss scale is, where the next, at half the scale, did too.
    pub fn skips_updates(&self) -> bool {
        !self.skipped_in_a_row.is_empty() || self.overflows_in_a_row.values().any(|&count| count > 1)
    }

    /// Forgets what was skipped in a phase whose optimizer is gone.
    pub fn forget(&mut self, phase: Phase) {
        self.skipped_in_a_row.remove(&phase);
        self.overflows_in_a_row.remove(&phase);
    }

    /// Learning rate of the critic in the step after so many; none of a run whose critic has no optimizer of its own.
    pub fn critic_lr(&self, finished: u64) -> Option<f64> {
        self.schedules.critic.as_ref().map(|schedule| schedule.lr(finished))
    }

    /// Learning rate of the policy in the step after so many; none while the critic trains alone.
    pub fn actor_lr(&self, finished: u64) -> Option<f64> {
        self.session.trains_policy(finished).then(|| self.schedules.policy.lr(finished))
    }

    /// The policy's update.
    pub fn update_policy(
        &mut self,
        run: &mut Recovery,
        state: &mut TrainerState,
        rollouts: &[Rollout],
        lr: f64,
    ) -> Result<UpdateReport> {
        let session = Arc::clone(&self.session);
        let config = &session.config;
        let mut report = UpdateReport::new(lr);
        let shared = config.shared_critic();
        report.value_lr = shared.map(|critic| lr * critic.value_rate(&config.optim));
        let objective = session.objective.as_ref();
        let compared = MismatchMetrics(objective);
        for mini in minibatches(&session, rollouts, state.step) {
            let sequences = self.policy_sequences(run, state, &mini)?;
            // until the first step, sampler and trainer have the same weights
            let first = report.grad_norm.value().is_none();
            let tokens: &dyn TokenLoss = if first && compares_with_sampler(run) { &compared } else { objective };
            let loss = match shared {
                Some(critic) => critic.joint_loss(tokens),
                None => tokens.into(),
            };
            let step = StepLoss { phase: Phase::UpdateActor, temperature: config.rollout.temperature, loss };
            if let Some(sums) = self.optimizer_step(run, state, &sequences, step, &mut report)? {
                objective.update_coefficients(&sums, &mut state.coefficients);
            }
        }
        Ok(report)
    }

    /// The critic's update.
    pub fn update_critic(
        &mut self,
        run: &mut Recovery,
        state: &mut TrainerState,
        rollouts: &[Rollout],
        lr: f64,
    ) -> Result<UpdateReport> {
        let session = Arc::clone(&self.session);
        let mut report = UpdateReport::new(lr);
        let Some(critic) = &session.config.critic else { unreachable!("a phase of the critic") };
        let loss = critic.loss();
        for mini in minibatches(&session, rollouts, state.step) {
            let sequences = critic_sequences(critic, session.config.rollout.response_length, &mini);
            let step = StepLoss { phase: Phase::UpdateCritic, temperature: 1.0, loss: loss.into() };
            self.optimizer_step(run, state, &sequences, step, &mut report)?;
        }
        Ok(report)
    }

    /// One optimizer step of the model that a phase updates, at the report's learning rate: applied, or skipped with a
    /// warning. Too many skips in a row end the run. Where no token has a weight in the loss there is no step: neither
    /// decay nor momentum moves the model, and the result is none.
    pub fn optimizer_step(
        &mut self,
        run: &mut Recovery,
        state: &mut TrainerState,
        sequences: &[Sequence],
        StepLoss { phase, temperature, loss }: StepLoss<'_>,
        report: &mut UpdateReport,
    ) -> Result<Option<LossSums>> {
        if !sequences.iter().any(teaches) {
            report.skipped_empty += 1;
            let step = state.step + 1;
            tracing::warn!(
                "step {step}, {phase}: no token has a weight in the loss, so no optimizer step is taken; the metrics \
                 rollout/unjudged and rollout/masked count completions without a reward and masked ones"
            );
            return Ok(None);
        }
        let lr = report.lr;
        let learner = run.models.learner(phase);
        let step = learner.optimizer.steps() + state.skipped_steps;
        learner.dropout = DropoutStep { seed: self.session.config.trainer.seed, step };
        let accumulate = |run: &mut Recovery| run.models.learner(phase).accumulate(sequences, temperature, loss, lr);
        let gradients = run.recovering(phase, accumulate).map_err(|error| match error {
            Error::PartlyApplied { .. } => Error::PartlyApplied { way_back: run.way_back(state) },
            error => error,
        })?;
        let updated = run.run_irreversible(phase, |models| models.learner(phase).apply(gradients, lr))?;
        run.check_after(phase)?;
        report.add(&updated);
        self.check_skipped(run, state, phase, &updated)?;
        Ok(Some(updated.sums))
    }

    /// Counts an optimizer step that was skipped. Too many in a row end the run.
    fn check_skipped(
        &mut self,
        run: &mut Recovery,
        state: &mut TrainerState,
        phase: Phase,
        updated: &Updated,
    ) -> Result<()> {
        let outcome = updated.outcome;
        if outcome.applied {
            self.forget(phase);
            return Ok(());
        }
        state.skipped_steps += 1;
        let step = state.step + 1;
        if let (true, Some(scale)) = (outcome.rescaled, outcome.loss_scale) {
            let next = scale / 2.0;
            tracing::info!(
                "step {step}, {phase}: gradients overflow under a loss scale of {scale}; the update is skipped, and the scale \
                 is {next} from now on"
            );
            // before the first update the scale is looked for, and the weights are those that the run began with
            if run.models.learner(phase).optimizer.steps() > 0 {
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
        let (section, way_back) = (self.optimizer_section(phase), run.way_back(state));
        Err(Error::NonFinite { phase: phase.name(), section, step, count, way_back })
    }

    /// The section of the optimizer of a phase.
    fn optimizer_section(&self, phase: Phase) -> &'static str {
        match (phase.updates(), self.session.mode) {
            (Some(Role::Critic), _) => "critic.optim",
            (_, Mode::Rl) if phase != Phase::WarmUp => "optim",
            (_, Mode::Sft) if self.session.config.sft.is_some() => "sft.optim",
            (_, Mode::Rl | Mode::Sft) => "warmup.sft.optim",
        }
    }

    /// Sequences of one optimizer step of the policy, with everything fixed that they share.
    fn policy_sequences(
        &self,
        run: &mut Recovery,
        state: &mut TrainerState,
        mini: &[&Rollout],
    ) -> Result<Vec<Sequence>> {
        let (config, objective) = (&self.session.config, &self.session.objective);
        let mut sequences: Vec<Sequence> = mini.iter().map(|r| sequence(r)).collect();
        if sequences.is_empty() {
            return Ok(sequences);
        }
        if config.rollout.router_replay {
            sequences = replayed(sequences, mini.iter().copied());
        }
        let score = |run: &mut Recovery| run.models.policy.score(&sequences, config.rollout.temperature);
        let scores = if objective.needs().scores { Some(run.recovering(Phase::UpdateActor, score)?) } else { None };
        let mut step = OptimizerStep {
            sequences: &mut sequences,
            max_length: config.rollout.response_length,
            scores: scores.as_ref(),
            seed: config.trainer.seed,
            step: run.models.policy.optimizer.steps() + state.skipped_steps,
        };
        objective.prepare(&mut step, &mut state.coefficients);
        if let Some(critic) = config.shared_critic() {
            let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
            let weights = critic.weights(&lengths, config.rollout.response_length);
            for (sequence, weights) in sequences.iter_mut().zip(weights) {
                sequence.columns.value_weight = Some(weights);
            }
        }
        Ok(sequences)
    }
}

/// Whether the update's own forward measures the mismatch of sampler and trainer: nobody computed the sampler's
/// log-probs again, and no dropout is in between.
fn compares_with_sampler(run: &Recovery) -> bool {
    let lora = run.models.policy.decoder().lora();
    let drops = lora.is_some_and(|lora| lora.dropout > 0.0);
    run.session.config.update.old_log_probs == OldLogProbs::Sampler && !drops
}

/// Sequences of one optimizer step of the critic, with their weights.
fn critic_sequences(critic: &CriticConfig, longest: usize, mini: &[&Rollout]) -> Vec<Sequence> {
    let mut sequences: Vec<Sequence> = mini.iter().map(|r| critic_sequence(r)).collect();
    let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
    for (sequence, weights) in sequences.iter_mut().zip(critic.weights(&lengths, longest)) {
        sequence.columns.weight = Some(weights);
    }
    sequences
}

/// Groups of a step, cut into the mini-batches of all epochs, without the completions of which no token is scored;
/// shuffled by (seed, step, epoch) where an epoch has several.
fn minibatches<'r>(session: &Session, rollouts: &'r [Rollout], finished: u64) -> Vec<Vec<&'r Rollout>> {
    let (update, seed) = (&session.config.update, session.config.trainer.seed);
    let mut minis = Vec::new();
    for epoch in 0..update.ppo_epochs {
        let mut groups: Vec<&[Rollout]> = rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index).collect();
        let size = update.ppo_mini_batch_size.unwrap_or(groups.len());
        if size < groups.len() {
            let stream = MINI_BATCH_STREAM + (finished << 8) + epoch as u64;
            Stream::new(seed, stream).shuffle(&mut groups);
        }
        let scored = |mini: &[&'r [Rollout]]| mini.iter().copied().flatten().filter(|r| r.is_scored()).collect();
        minis.extend(groups.chunks(size).map(scored));
    }
    minis
}

/// The sequence of a rollout as the policy learns from it, its scored tokens being those of the mask.
fn sequence(rollout: &Rollout) -> Sequence {
    let scored = rollout.columns.select(&rollout.mask);
    let old_logp = scored.old_logp.or_else(|| scored.full_logp.clone());
    let columns = TokenColumns { old_logp, sampler_logp: None, ..scored };
    masked(rollout, columns)
}

/// The sequence of a rollout as a critic learns from it: values and returns alone.
fn critic_sequence(rollout: &Rollout) -> Sequence {
    let known = TokenColumns {
        value: rollout.columns.value.clone(),
        returns: rollout.columns.returns.clone(),
        ..TokenColumns::default()
    };
    masked(rollout, known.select(&rollout.mask))
}

/// A rollout's tokens with the columns of those that are scored.
fn masked(rollout: &Rollout, columns: TokenColumns<Vec<f64>>) -> Sequence {
    let whole = Sequence::completion(&rollout.prompt, &rollout.completion);
    Sequence {
        positions: rollout.scored(&whole.positions),
        columns,
        id: SampleId { prompt_index: rollout.prompt_index, sample: rollout.sample },
        ..whole
    }
}

/// Whether a token of a sequence has a weight in the loss of the policy, in its entropy bonus, or in the value loss.
fn teaches(sequence: &Sequence) -> bool {
    let TokenColumns { weight, bonus, value_weight, .. } = &sequence.columns;
    [weight, bonus, value_weight].into_iter().flatten().flatten().any(|weight| *weight != 0.0)
}
