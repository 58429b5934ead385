//! Supervised training on rows of a file or on the task's solutions: the warm-up of `train`, and the whole of `sft`.

use super::update::UpdateSums;
use super::{Event, Metrics, Trainer};
use crate::Result;
use crate::config::SftConfig;
use crate::data::SftDataset;
use crate::lr_scheduler::LrSchedule;
use crate::metrics::Phase;
use crate::objective::sft::Nll;
use std::sync::Arc;
use std::time::Instant;

/// Steps between looks at the validation reward during a warm-up that may end early.
const WARM_UP_CHECK: u64 = 10;

impl Trainer {
    /// One step of `firebrick sft`.
    pub(super) fn sft_step(&mut self) -> Result<Metrics> {
        let Some(examples) = self.demonstrations.clone() else {
            unreachable!("checked before the run folder was made")
        };
        let step = self.state.step;
        self.supervised_step(&examples, step, self.lr.lr(step))
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
        examples: &Arc<SftDataset>,
        schedule: &LrSchedule,
    ) -> Result<()> {
        for step in 0..examples.steps {
            let started = Instant::now();
            let metrics = self.supervised_step(examples, step, schedule.lr(step))?;
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
        let reward = self.greedy()?;
        self.take_timings();
        Ok(reward >= target)
    }

    /// One optimizer step on a step's examples.
    fn supervised_step(&mut self, examples: &SftDataset, step: u64, lr: f64) -> Result<Metrics> {
        let (update, epochs) = self.phase(Phase::UpdateActor, |t| {
            let seed = t.config.trainer.seed;
            let (sequences, epochs) = examples.step(step, seed, &t.source, &t.data)?;
            t.state.tokens += sequences.iter().map(|s| s.tokens.len() as u64).sum::<u64>();
            let mut update = UpdateSums::of_policy();
            let loss = (&Nll).into();
            t.optimizer_step(Phase::UpdateActor, &sequences, 1.0, loss, lr, &mut update)?;
            Ok((update, epochs))
        })?;
        let mut metrics = self.take_timings();
        metrics.extend(update.metrics());
        metrics.insert("actor/lr".into(), lr);
        if let Some(epochs) = epochs {
            metrics.insert("training/epoch".into(), epochs);
        }
        Ok(metrics)
    }

    /// Mean negative log-likelihood of the held-out examples' scored tokens, as `val/loss`, and its exponential. Nothing where
    /// there are none.
    pub(super) fn validation_loss(&mut self) -> Result<Metrics> {
        let examples = self.demonstrations.clone();
        let Some(examples) = examples.filter(|e| !e.validation.is_empty()) else {
            return Ok(Metrics::new());
        };
        let scores = self.recovering_phase(Phase::ValidationLoss, |t| {
            t.learner.score(&examples.validation, 1.0)
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
