//! Updates: epochs and mini-batches over a step's rollouts or examples, one optimizer step of policy or critic each.

use super::non_finite::{BadNumber, search};
use super::recovery::Recovery;
use super::scorer::replayed;
use super::session::{LrSchedules, Session};
use crate::batch::DropoutStep;
use crate::config::{CriticConfig, Mode, OldLogProbs};
use crate::data::SftDataset;
use crate::executor::HeadLoss;
use crate::metrics::{Phase, UpdateReport};
use crate::objective::mismatch::MismatchMetrics;
use crate::objective::{LossSums, OptimizerStep, TokenLoss};
use crate::optim::StepOutcome;
use crate::plan::Role;
use crate::rollout::Rollout;
use crate::sequence::{SampleId, Sequence, TokenColumns};
use crate::{Error, Result};
use firebrick_models::random::Stream;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Stream of the shuffle of groups among mini-batches; the step is added.
const MINI_BATCH_STREAM: u64 = 2 << 32;

/// The loss of an optimizer step, and the phase whose model it updates.
#[derive(Clone, Copy)]
pub(super) struct StepLoss<'l> {
    pub phase: Phase,
    /// Divisor of the logits.
    pub temperature: f64,
    pub loss: HeadLoss<'l>,
}

/// Runs optimizer steps and counts skipped ones.
pub(super) struct Updater {
    session: Arc<Session>,
    pub schedules: LrSchedules,
    /// Examples of supervised training, until it is over.
    pub demonstrations: Option<Arc<SftDataset>>,
    /// A NaN or infinite number in the rollouts of the step.
    pub non_finite: Option<BadNumber>,
    /// Consecutive optimizer steps skipped for NaN or infinite numbers, except rewards, by phase.
    consecutive_skips: BTreeMap<Phase, u64>,
    /// Consecutive optimizer steps skipped for rewards, by phase: the weights are still good.
    reward_skips: BTreeMap<Phase, u64>,
    /// Consecutive optimizer steps whose gradients overflowed under the loss scale, by phase.
    consecutive_overflows: BTreeMap<Phase, u64>,
}

impl Updater {
    pub fn new(session: &Arc<Session>, schedules: LrSchedules, demonstrations: Option<Arc<SftDataset>>) -> Self {
        Self {
            session: Arc::clone(session),
            schedules,
            demonstrations,
            non_finite: None,
            consecutive_skips: BTreeMap::new(),
            reward_skips: BTreeMap::new(),
            consecutive_overflows: BTreeMap::new(),
        }
    }

    /// Returns true if the last update of a model was skipped for numbers that its weights may cause. An overflow under
    /// the loss scale counts if the next update, at half the scale, overflowed too.
    pub fn skips_updates(&self) -> bool {
        !self.consecutive_skips.is_empty() || self.consecutive_overflows.values().any(|&count| count > 1)
    }

    /// Resets the counts of a phase.
    pub fn reset_skips(&mut self, phase: Phase) {
        self.consecutive_skips.remove(&phase);
        self.reward_skips.remove(&phase);
        self.consecutive_overflows.remove(&phase);
    }

    /// Learning rate of a critic with its own optimizer, in the step after `finished` steps.
    pub fn critic_lr(&self, finished: u64) -> Option<f64> {
        self.schedules.critic.as_ref().map(|schedule| schedule.lr(finished))
    }

    /// Learning rate of the policy in the step after `finished` steps; `None` while only the critic trains.
    pub fn actor_lr(&self, finished: u64) -> Option<f64> {
        self.session.trains_policy(finished).then(|| self.schedules.policy.lr(finished))
    }

    /// Updates the policy.
    pub fn update_policy(&mut self, run: &mut Recovery, rollouts: &[Rollout], lr: f64) -> Result<UpdateReport> {
        let session = Arc::clone(&self.session);
        let (config, objective) = (&session.config, session.objective.as_ref());
        let shared = config.shared_critic();
        let value_lr = shared.map(|critic| lr * critic.value_rate(&config.optim));
        let with_mismatch = MismatchMetrics(objective);
        self.update(run, rollouts, UpdateReport { value_lr, ..UpdateReport::new(lr) }, |updater, run, mini, report| {
            let sequences = updater.policy_sequences(run, mini)?;
            // before the first optimizer step, sampler and trainer have the same weights
            let first = report.grad_norm.value().is_none();
            let tokens: &dyn TokenLoss = if first && compares_with_sampler(run) { &with_mismatch } else { objective };
            let loss = shared.map_or(tokens.into(), |critic| critic.joint_loss(tokens));
            let step = StepLoss { phase: Phase::UpdateActor, temperature: config.rollout.temperature, loss };
            if let Some(sums) = updater.optimizer_step(run, &sequences, step, report)? {
                objective.update_coefficients(&sums, &mut run.state.coefficients);
            }
            Ok(())
        })
    }

    /// Updates the critic.
    pub fn update_critic(&mut self, run: &mut Recovery, rollouts: &[Rollout], lr: f64) -> Result<UpdateReport> {
        let session = Arc::clone(&self.session);
        let Some(critic) = &session.config.critic else { unreachable!("a phase of the critic") };
        let loss = critic.loss();
        self.update(run, rollouts, UpdateReport::new(lr), |updater, run, mini, report| {
            let sequences = critic_sequences(critic, session.config.rollout.response_length, mini);
            let step = StepLoss { phase: Phase::UpdateCritic, temperature: 1.0, loss: loss.into() };
            updater.optimizer_step(run, &sequences, step, report).map(drop)
        })
    }

    /// Runs `step` on the mini-batches of all epochs.
    fn update(
        &mut self,
        run: &mut Recovery,
        rollouts: &[Rollout],
        mut report: UpdateReport,
        mut step: impl FnMut(&mut Self, &mut Recovery, &[&Rollout], &mut UpdateReport) -> Result<()>,
    ) -> Result<UpdateReport> {
        for mini in minibatches(&run.session, rollouts, run.state.step) {
            step(self, run, &mini, &mut report)?;
        }
        Ok(report)
    }

    /// One optimizer step of the model that a phase updates, at the report's learning rate: applied, or skipped with a
    /// warning. Too many consecutive skips end the run. Returns `None` without a step, so without weight decay and
    /// momentum, if no token has a weight in the loss or a number is NaN or infinite.
    pub fn optimizer_step(
        &mut self,
        run: &mut Recovery,
        sequences: &[Sequence],
        step: StepLoss<'_>,
        report: &mut UpdateReport,
    ) -> Result<Option<LossSums>> {
        let StepLoss { phase, temperature, loss } = step;
        if !sequences.iter().any(has_weight) {
            report.skipped_empty += 1;
            let step = run.state.step + 1;
            tracing::warn!(
                "step {step}, {phase}: no token has a weight in the loss, so no optimizer step is taken; the metrics \
                 rollout/unjudged and rollout/masked count completions without a reward and masked ones"
            );
            return Ok(None);
        }
        let lr = report.lr;
        let learner = run.models.learner(phase);
        let steps = learner.optimizer.steps() + run.state.skipped_steps;
        learner.dropout = DropoutStep { seed: self.session.config.trainer.seed, step: steps };
        if let Some(bad) = self.non_finite.clone() {
            report.skipped_non_finite += 1;
            self.count_skip(run, sequences, step, &bad)?;
            return Ok(None);
        }
        let accumulate = |run: &mut Recovery| run.models.learner(phase).accumulate(sequences, temperature, loss, lr);
        let gradients = run.recovering(phase, accumulate).map_err(|error| match error {
            Error::PartlyApplied { .. } => Error::PartlyApplied { way_back: run.resume_advice() },
            error => error,
        })?;
        let updated = run.run_irreversible(phase, |models| models.learner(phase).apply(gradients, lr))?;
        run.check_after(phase)?;
        report.add(&updated);
        let outcome = updated.outcome;
        if outcome.applied {
            self.reset_skips(phase);
            return Ok(Some(updated.sums));
        }
        report.skipped_non_finite += 1;
        if self.count_overflow(run, phase, outcome) {
            return Ok(Some(updated.sums));
        }
        let (name, number) = if outcome.grad_norm.is_finite() {
            ("the loss", updated.sums.loss)
        } else {
            ("the gradient norm", outcome.grad_norm)
        };
        self.count_skip(run, sequences, step, &BadNumber::of_step(name, number))?;
        Ok(None)
    }

    /// Counts a step that was skipped because gradients overflowed under the loss scale; returns false if it was not.
    fn count_overflow(&mut self, run: &mut Recovery, phase: Phase, outcome: StepOutcome) -> bool {
        let (true, Some(scale)) = (outcome.rescaled, outcome.loss_scale) else {
            return false;
        };
        run.state.skipped_steps += 1;
        let (step, next) = (run.state.step + 1, scale / 2.0);
        tracing::info!(
            "step {step}, {phase}: gradients overflow under a loss scale of {scale}; the update is skipped, and the scale \
             is {next} from now on"
        );
        // until the first update, overflows only search for the scale, and the weights are the initial ones
        if run.models.learner(phase).optimizer.steps() > 0 {
            *self.consecutive_overflows.entry(phase).or_default() += 1;
        }
        true
    }

    /// Counts an optimizer step that a number which is not finite skips. `trainer.max_consecutive_skips` end the run
    /// with the first tensor and sample, which is searched by passes over the sequences.
    fn count_skip(
        &mut self,
        run: &mut Recovery,
        sequences: &[Sequence],
        StepLoss { phase, temperature, loss }: StepLoss<'_>,
        bad: &BadNumber,
    ) -> Result<()> {
        run.state.skipped_steps += 1;
        let step = run.state.step + 1;
        let counts = if bad.is_reward { &mut self.reward_skips } else { &mut self.consecutive_skips };
        let count = counts.entry(phase).or_default();
        *count += 1;
        let count = *count;
        let text = bad.text(&self.session);
        tracing::warn!("step {step}, {phase}: {text}; the update is skipped");
        if count < self.session.config.trainer.max_consecutive_skips {
            return Ok(());
        }
        let (found, advice) = if bad.is_reward {
            let way_back = match run.checkpoints.newest {
                Some(_) => "continue with --resume --allow-changed-inputs from the last good checkpoint",
                None => "start again: no checkpoint was written before",
            };
            (text, format!("Correct the reward, and {way_back}"))
        } else {
            let section = self.optimizer_section(phase);
            let advice = format!("Lower {section}.lr, check the rewards in samples.jsonl, and {}", run.resume_advice());
            (
                search(run, phase, |learner| learner.find_non_finite(sequences, temperature, loss)).unwrap_or(text),
                advice,
            )
        };
        Err(Error::NonFinite { phase: phase.name(), step, count, found, advice })
    }

    /// Configuration section of a phase's optimizer.
    fn optimizer_section(&self, phase: Phase) -> &'static str {
        match (phase.updates(), self.session.mode) {
            (Some(Role::Critic), _) => "critic.optim",
            (_, Mode::Rl) if phase != Phase::WarmUp => "optim",
            (_, Mode::Sft) if self.session.config.sft.is_some() => "sft.optim",
            (_, Mode::Rl | Mode::Sft) => "warmup.sft.optim",
        }
    }

    /// Sequences of one optimizer step of the policy, prepared by the objective.
    fn policy_sequences(&self, run: &mut Recovery, mini: &[&Rollout]) -> Result<Vec<Sequence>> {
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
            step: run.models.policy.optimizer.steps() + run.state.skipped_steps,
        };
        objective.prepare(&mut step, &mut run.state.coefficients);
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

/// Returns true if the forward pass of the update measures the mismatch of sampler and trainer: the trainer has not
/// recomputed the sampler's log-probs, and there is no dropout.
fn compares_with_sampler(run: &Recovery) -> bool {
    let lora = run.models.policy.decoder().lora();
    let drops = lora.is_some_and(|lora| lora.dropout > 0.0);
    run.session.old_log_probs() == OldLogProbs::Sampler && !drops
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

/// Mini-batches of all epochs, without completions that have no scored token; groups are shuffled by (seed, step,
/// epoch) if an epoch has several.
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

/// Sequence of a rollout for the policy; the mask selects the scored tokens.
fn sequence(rollout: &Rollout) -> Sequence {
    let scored = rollout.columns.select(&rollout.mask);
    let old_logp = scored.old_logp.or_else(|| scored.full_logp.clone());
    let columns = TokenColumns { old_logp, sampler_logp: None, ..scored };
    masked(rollout, columns)
}

/// Sequence of a rollout for a critic: values and returns only.
fn critic_sequence(rollout: &Rollout) -> Sequence {
    let columns = TokenColumns {
        value: rollout.columns.value.clone(),
        returns: rollout.columns.returns.clone(),
        ..TokenColumns::default()
    };
    masked(rollout, columns.select(&rollout.mask))
}

/// Tokens of a rollout with the columns of its scored tokens.
fn masked(rollout: &Rollout, columns: TokenColumns<Vec<f64>>) -> Sequence {
    let whole = Sequence::completion(&rollout.prompt, &rollout.completion);
    Sequence {
        positions: rollout.scored(&whole.positions),
        columns,
        id: SampleId { prompt_index: rollout.prompt_index, sample: rollout.sample },
        ..whole
    }
}

/// Returns true if a token of a sequence has a weight in the policy loss, the entropy bonus or the value loss.
fn has_weight(sequence: &Sequence) -> bool {
    let TokenColumns { weight, bonus, value_weight, .. } = &sequence.columns;
    [weight, bonus, value_weight].into_iter().flatten().flatten().any(|weight| *weight != 0.0)
}
