//! Validation: completions of the held-out prompts and their rewards; the loss of held-out examples.

use super::Trainer;
use super::evaluate::{judged, validation_samples};
use super::evaluated_sample::{EvaluatedSample, judged_samples, mean_reward, unjudged};
use crate::Result;
use crate::config::Mode;
use crate::metrics::{Phase, ValidationReport};

impl Trainer {
    /// Validates and records it: the mean reward on the validation prompts, and in supervised training the loss of the
    /// held-out examples; each where there are any.
    pub(super) fn validate(&mut self) -> Result<()> {
        let loss = match self.state.mode {
            Mode::Rl => None,
            Mode::Sft => self.validation_loss()?,
        };
        let has_prompts = !self.data.validation.is_empty();
        let samples = has_prompts.then(|| self.validation_samples()).transpose()?;
        let reward = samples.as_deref().and_then(mean_reward);
        if let (None, Some(samples)) = (reward, &samples) {
            tracing::warn!(
                "step {}: no reward applies to any of the {} validation completions, so there is no validation reward",
                self.state.step,
                samples.len()
            );
        }
        let unjudged = samples.as_deref().map(unjudged);
        let samples = samples.unwrap_or_default();
        let report = ValidationReport {
            step: self.state.step,
            timings: std::mem::take(&mut self.timings),
            task: self.data.task().name().to_owned(),
            reward,
            samples: judged_samples(&samples),
            unjudged,
            loss,
        };
        let values = self.recorder.validation(&report, &self.ledger.take())?;
        self.state.validated(&values);
        Ok(())
    }

    /// Scored completions of the validation prompts, as many at a time as the current plan allows.
    pub(super) fn validation_samples(&mut self) -> Result<Vec<EvaluatedSample>> {
        let samples = self.recovering_phase(Phase::Validation, |t| {
            let (rollout, sampler) = (&t.config.rollout, t.own_sampler()?);
            let decoder = &sampler.decoder;
            let limits = t.engine_limits()?;
            let (turns, world) = (t.turns.as_ref(), &t.world);
            validation_samples(decoder, &t.source, &t.data, turns, rollout, &limits, world)
        })?;
        self.recovering_phase(Phase::ValidationReward, |t| {
            let now = t.progress();
            judged(&mut t.reward_manager, &t.source, &t.data, &samples, &t.config.rollout, now)
        })
    }
}
