//! Times and validations at which a session saves or ends: `trainer.save_minutes`, `trainer.max_minutes` and
//! `trainer.keep_best`.

use super::Trainer;
use crate::checkpoint::trainer_state::BestValidation;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Latest steps, of which the longest predicts the next.
const RECENT: usize = 8;

/// Metrics of validations that are better if they are smaller.
const LOSSES: [&str; 2] = ["val/loss", "val/perplexity"];

/// Times of a session.
#[derive(Debug)]
pub(super) struct SessionTimes {
    /// Start of the session, before anything is loaded.
    started: Instant,
    /// Start, end of the last checkpoint, or the last request for one.
    saved: Instant,
    /// Durations of the latest steps, with validation and checkpoint.
    steps: VecDeque<Duration>,
    /// Duration of the longest checkpoint.
    saving: Duration,
}

impl SessionTimes {
    pub fn new(started: Instant) -> Self {
        Self { started, saved: started, steps: VecDeque::new(), saving: Duration::ZERO }
    }

    /// Adds a step.
    pub fn add_step(&mut self, duration: Duration) {
        self.steps.push_back(duration);
        if self.steps.len() > RECENT {
            self.steps.pop_front();
        }
    }

    /// Adds a checkpoint.
    pub fn add_save(&mut self, began: Instant, now: Instant) {
        self.saved = now;
        self.saving = self.saving.max(now.duration_since(began));
    }

    /// Returns true if the last checkpoint is this many minutes old.
    fn is_save_due(&self, minutes: f64, now: Instant) -> bool {
        now.duration_since(self.saved).as_secs_f64() >= 60.0 * minutes
    }

    /// Returns true if another step and a checkpoint would end after this many minutes.
    fn is_end_due(&self, minutes: f64, now: Instant) -> bool {
        let next = self.steps.iter().max().copied().unwrap_or_default() + self.saving;
        (now.duration_since(self.started) + next).as_secs_f64() > 60.0 * minutes
    }
}

impl Trainer {
    /// Saves, or saves and ends the session, if the clock of rank 0 says so.
    pub(super) fn heed_times(&mut self) -> Result<()> {
        let (config, step, now) = (&self.session.config.trainer, self.finished_steps(), Instant::now());
        if config.max_minutes.or(config.save_minutes).is_none() || self.is_over() {
            return Ok(());
        }
        let ends = config.max_minutes.is_some_and(|minutes| self.times.is_end_due(minutes, now));
        let saves = config.save_minutes.is_some_and(|minutes| self.times.is_save_due(minutes, now));
        let [ends, saves] = self.session.world.broadcast([ends, saves])?;
        if ends && self.session.world.writes() {
            tracing::warn!(
                "trainer.max_minutes: the session ends after step {step}, because another step might not end in time; \
                 continue with --resume"
            );
        }
        if ends || saves {
            // also where no checkpoint is written, which the next step would not change
            self.times.saved = now;
            self.save()?;
        }
        self.stopped = ends;
        Ok(())
    }

    /// The finished step's validation by `trainer.keep_best`, if it is better than all before and a checkpoint of the
    /// step can be written.
    ///
    /// # Errors
    /// `Error::Config` if the validation has no such metric.
    pub(super) fn new_best(&self) -> Result<Option<BestValidation>> {
        let (state, config) = (&self.recovery.state, &self.session.config.trainer);
        let Some(metric) = &config.keep_best else { return Ok(None) };
        let Some(&value) = state.last_validation.get(metric) else {
            let known: Vec<&str> = state.last_validation.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            return Err(Error::Config(format!(
                "trainer.keep_best: {metric} is not a metric of this run's validation; choose one of them: {known}"
            )));
        };
        let sign = if LOSSES.contains(&metric.as_str()) { -1.0 } else { 1.0 };
        let earlier = state.best.as_ref().filter(|best| best.metric == *metric);
        let is_better = !value.is_nan() && earlier.is_none_or(|best| sign * value > sign * best.value);
        let best = || BestValidation { step: state.step, metric: metric.clone(), value };
        Ok((state.step > 0 && is_better && !self.updater.skips_updates()).then(best))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_due_minutes_after_the_last_one() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut times = SessionTimes::new(start);
        assert!(!times.is_save_due(2.0, at(119)) && times.is_save_due(2.0, at(120)));
        times.add_save(at(120), at(130));
        assert!(!times.is_save_due(2.0, at(249)) && times.is_save_due(2.0, at(250)));
    }

    #[test]
    fn a_step_that_might_not_end_in_time_does_not_start() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut times = SessionTimes::new(start);
        times.add_step(Duration::from_secs(20));
        assert!(!times.is_end_due(1.0, at(40)) && times.is_end_due(1.0, at(41)));
        times.add_save(at(20), at(25));
        assert!(!times.is_end_due(1.0, at(35)) && times.is_end_due(1.0, at(36)));
        // a slow first step is forgotten
        (0..RECENT).for_each(|_| times.add_step(Duration::from_secs(2)));
        assert!(!times.is_end_due(1.0, at(53)) && times.is_end_due(1.0, at(54)));
    }
}
