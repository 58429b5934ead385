//! Validation: greedy completions of the held-out prompts and their rewards.

use super::{Event, Metrics, Trainer};
use crate::Result;
use crate::evaluate::greedy_reward;

impl Trainer {
    /// Mean reward on the validation prompts, as `val-core/<task>/reward`. Nothing where there are none.
    pub(super) fn validate(&mut self) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        if self.data.validation.is_empty() {
            return Ok(metrics);
        }
        let mean = self.phase("testing", &mut metrics, |t| {
            greedy_reward(&t.decoder, &t.source, &t.data, &t.config.rollout)
        })?;
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
}
