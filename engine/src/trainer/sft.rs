//! Supervised training on rows of a file or on the task's solutions: the warm-up of `train`, and the whole of `sft`.

use super::update::UpdateSums;
use super::{Event, Metrics, Trainer};
use crate::Result;
use crate::config::SftConfig;
use crate::demonstrations::Demonstrations;
use crate::objective::sft::Nll;
use crate::optim::schedule::Schedule as LrSchedule;
use crate::placed::Use;
use crate::plan::Role;
use std::sync::Arc;
use std::time::Instant;

/// Steps between looks at the validation reward during a warm-up that may end early.
const WARM_UP_CHECK: u64 = 10;

impl Trainer {
    /// `firebrick sft`: every step logged, validated and saved in the run's rhythm.
    pub(super) fn sft(&mut self) -> Result<()> {
        let config = self
            .config
            .sft
            .clone()
            .or_else(|| self.config.warmup.sft.clone());
        let (Some(config), Some(examples)) = (config, self.demonstrations.clone()) else {
            unreachable!("checked before the run folder was made")
        };
        let steps = examples.steps;
        let schedule = config.optim.lr_scheduler.build(config.optim.lr, steps)?;
        if !self.resumed {
            let mut metrics = self.validate()?;
            self.flush_memory()?;
            metrics.insert("training/global_step".into(), 0.0);
            self.log(&metrics)?;
        }
        while self.state.step < steps {
            let started = Instant::now();
            self.phase_step = self.state.step + 1;
            let lr = schedule.lr(self.state.step);
            let metrics = self.sft_step(&examples, self.state.step, lr)?;
            self.state.optimizer_steps = self.learner.optimizer.steps();
            self.state.loss_scale = self.learner.optimizer.scaler();
            let mut metrics = self.finish_step(metrics, started)?;
            self.observer.event(Event::Sft {
                step: self.state.step,
                steps,
                metrics: &metrics,
            });
            self.rhythm(&mut metrics, steps)?;
        }
        Ok(())
    }

    /// The warm-up before the first RL step. It leaves weights behind and nothing else.
    pub(super) fn warm_up(&mut self, config: &SftConfig) -> Result<()> {
        let Some(examples) = self.demonstrations.clone() else {
            unreachable!("read with the configuration")
        };
        let schedule = config
            .optim
            .lr_scheduler
            .build(config.optim.lr, examples.steps)?;
        let own = self.learner.fresh_optimizer(config.optim.clone());
        let rl = std::mem::replace(&mut self.learner.optimizer, own);
        let warmed = self.warm_up_steps(config, &examples, &schedule);
        let mut warm = std::mem::replace(&mut self.learner.optimizer, rl);
        self.learner.optimizer.adopt_masters(&mut warm);
        self.demonstrations = None;
        warmed
    }

    fn warm_up_steps(
        &mut self,
        config: &SftConfig,
        examples: &Arc<Demonstrations>,
        schedule: &LrSchedule,
    ) -> Result<()> {
        for step in 0..examples.steps {
            let started = Instant::now();
            let metrics = self.sft_step(examples, step, schedule.lr(step))?;
            self.state.seconds += started.elapsed().as_secs_f64();
            self.observer.event(Event::Sft {
                step: step + 1,
                steps: examples.steps,
                metrics: &metrics,
            });
            if (step + 1).is_multiple_of(WARM_UP_CHECK) && self.is_warm(config)? {
                break;
            }
        }
        Ok(())
    }

    /// Whether the validation reward that ends the warm-up is reached.
    fn is_warm(&mut self, config: &SftConfig) -> Result<bool> {
        let Some(target) = config
            .until_reward
            .filter(|_| !self.data.validation.is_empty())
        else {
            return Ok(false);
        };
        Ok(self.greedy(&mut Metrics::new())? >= target)
    }

    fn sft_step(&mut self, examples: &Demonstrations, step: u64, lr: f64) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        let passes = &[(Role::Policy, Use::Pass)];
        let (sums, epochs) = self.phase("update_actor", passes, &mut metrics, |t| {
            let seed = t.config.trainer.seed;
            let (sequences, epochs) = examples.step(step, seed, &t.source, &t.data)?;
            t.state.tokens += sequences.iter().map(|s| s.tokens.len() as u64).sum::<u64>();
            let mut update = UpdateSums::of_policy();
            t.optimizer_step(&sequences, 1.0, (&Nll).into(), lr, &mut update)?;
            Ok((update, epochs))
        })?;
        metrics.extend(sums.metrics());
        metrics.insert("actor/lr".into(), lr);
        if let Some(epochs) = epochs {
            metrics.insert("training/epoch".into(), epochs);
        }
        Ok(metrics)
    }

    /// Mean negative log-likelihood of the held-out examples' scored tokens, as `val/loss`, and its exponential. Nothing where
    /// there are none.
    pub(super) fn validation_loss(&mut self, metrics: &mut Metrics) -> Result<Metrics> {
        let examples = self.demonstrations.clone();
        let Some(examples) = examples.filter(|e| !e.validation.is_empty()) else {
            return Ok(Metrics::new());
        };
        let scores = self.phase("val_loss", &[(Role::Policy, Use::Pass)], metrics, |t| {
            t.recovering("val_loss", |t| t.learner.score(&examples.validation, 1.0))
        })?;
        let all = scores.logp.iter().zip(&examples.validation);
        let loss: f64 = all
            .flat_map(|(logp, s)| logp.iter().zip(&s.weights))
            .map(|(&logp, weight)| -f64::from(logp) * weight)
            .sum();
        Ok(Metrics::from([
            ("val/loss".into(), loss),
            ("val/perplexity".into(), loss.exp()),
        ]))
    }
}
