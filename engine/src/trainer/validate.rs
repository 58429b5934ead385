//! Validation: greedy completions of the held-out prompts and their rewards; the loss of held-out examples.

use super::evaluate::{greedy_samples, mean_reward};
use super::{Event, Metrics, Trainer};
use crate::Result;
use crate::config::Mode;
use crate::metrics::Phase;

impl Trainer {
    /// Mean reward on the validation prompts, as `val-core/<task>/reward`; in supervised training the loss of the held-out
    /// examples too. Nothing where there are none.
    pub(super) fn validate(&mut self) -> Result<Metrics> {
        let mut values = match self.state.mode {
            Mode::Rl => Metrics::new(),
            Mode::Sft => self.validation_loss()?,
        };
        if !self.data.validation.is_empty() {
            let mean = self.greedy()?;
            values.insert(format!("val-core/{}/reward", self.data.task().name()), mean);
        }
        let mut metrics = self.take_timings();
        if values.is_empty() {
            return Ok(metrics);
        }
        self.state.validated(&values);
        self.observer.event(Event::Validated {
            step: self.state.step,
            metrics: &values,
        });
        metrics.extend(values);
        Ok(metrics)
    }

    /// Mean reward of greedy completions, as many at a time as the plan in force allows.
    pub(super) fn greedy(&mut self) -> Result<f64> {
        let samples = self.recovering_phase(Phase::Validation, |t| {
            let (rollout, decoder) = (&t.config.rollout, t.learner.decoder());
            greedy_samples(decoder, &t.source, &t.data, rollout, &t.engine_limits()?)
        })?;
        let longest = self.config.rollout.response_length;
        self.recovering_phase(Phase::ValidationReward, |t| {
            mean_reward(&mut t.judge, &t.source, &t.data, &samples, longest)
        })
    }
}
