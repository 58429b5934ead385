//! Validation: completions of the held-out prompts and their rewards; the loss of held-out examples.

use super::Trainer;
use super::evaluate::{EvaluatedSample, judged, judged_samples, mean_reward, unjudged, validation_samples};
use super::sampler::SamplingPolicy;
use super::session::Session;
use crate::Result;
use crate::config::Mode;
use crate::metrics::{Phase, ValidationReport};

impl Trainer {
    /// Validates and records it: the mean reward on the validation prompts, and in supervised training the loss of the
    /// held-out examples; each where there are any.
    pub(super) fn validate(&mut self) -> Result<()> {
        let loss = match self.session.mode {
            Mode::Rl => None,
            Mode::Sft => self.validation_loss()?,
        };
        let has_prompts = !self.session.data.prompts.validation.is_empty();
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
        let Self { session, recovery, state, .. } = self;
        let telemetry = &mut recovery.telemetry;
        let report = ValidationReport {
            step: state.step,
            timings: std::mem::take(&mut telemetry.timings),
            task: session.data.prompts.task().name().to_owned(),
            reward,
            samples: judged_samples(&samples),
            unjudged,
            loss,
        };
        let values = telemetry.recorder.validation(&report, &telemetry.ledger.take())?;
        state.validated(&values);
        Ok(())
    }

    /// Scored completions of the validation prompts, as many at a time as the current plan allows.
    pub(super) fn validation_samples(&mut self) -> Result<Vec<EvaluatedSample>> {
        let Self { session, scorer, recovery: run, state, .. } = self;
        let Session { config, source, data, turns, world, .. } = session.as_ref();
        let (rollout, prompts) = (&config.rollout, &data.prompts);
        let samples = run.recovering_phase(Phase::Validation, |run| {
            let policy = SamplingPolicy::as_trained(run)?;
            let (decoder, limits) = (&policy.decoder, &policy.limits);
            validation_samples(decoder, source, prompts, turns.as_ref(), rollout, limits, world)
        })?;
        run.recovering_phase(Phase::ValidationReward, |_| {
            let now = scorer.progress(state);
            judged(&mut scorer.reward_manager, source, prompts, &samples, rollout, now)
        })
    }
}
