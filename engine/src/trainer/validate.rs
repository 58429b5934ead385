//! Validation: greedy completions of the held-out prompts and their rewards.

use super::{Event, Metrics, Trainer};
use crate::Result;
use crate::evaluate::greedy_reward;
use crate::placed::Use;
use crate::plan::Role;

impl Trainer {
    /// Mean reward on the validation prompts, as `val-core/<task>/reward`. Nothing where there are none.
    pub(super) fn validate(&mut self) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        if self.data.validation.is_empty() {
            return Ok(metrics);
        }
        let mean = self.phase(
            "testing",
            &[(Role::Policy, Use::Rollout)],
            &mut metrics,
            |t| t.recovering("testing", Self::greedy),
        )?;
        let values =
            Metrics::from([(format!("val-core/{}/reward", self.data.task().name()), mean)]);
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
        let (rollout, decoder) = (&self.config.rollout, self.learner.decoder());
        let limits = self.engine_limits()?;
        greedy_reward(decoder, &self.source, &self.data, rollout, &limits)
    }
}
