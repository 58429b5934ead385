//! Supervised training on rows of a file or on the task's solutions: the warm-up of `train`, and the whole of `sft`.

use super::Trainer;
use super::evaluate::mean_reward;
use super::recovery::Recovery;
use super::updater::StepLoss;
use crate::Result;
use crate::config::SftConfig;
use crate::data::SftDataset;
use crate::lr_scheduler::LrSchedule;
use crate::metrics::{Phase, PhaseTimings, StepReport, UpdateReport};
use crate::objective::sft::Nll;
use std::sync::Arc;
use std::time::Instant;

/// Steps between validations of a warm-up that may end early.
const WARM_UP_CHECK: u64 = 10;

impl Trainer {
    /// One step of `firebrick sft`.
    pub(super) fn sft_step(&mut self) -> Result<StepReport> {
        let Some(examples) = self.updater.demonstrations.clone() else {
            unreachable!("checked before the run folder was made")
        };
        let step = self.finished_steps();
        let lr = self.updater.schedules.policy.lr(step);
        self.supervised_step(Phase::UpdateActor, &examples, step, lr)
    }

    /// Warm-up before the first RL step. Only the weights remain of it.
    pub(super) fn warm_up(&mut self, config: &SftConfig) -> Result<()> {
        let Some(examples) = self.updater.demonstrations.clone() else { unreachable!("read with the configuration") };
        let schedule = config.optim.lr_scheduler.build(config.optim.lr, examples.steps)?;
        let policy = &mut self.recovery.models.policy;
        let fresh = policy.fresh_optimizer(config.optim.clone());
        let rl = std::mem::replace(&mut policy.optimizer, fresh);
        let warmed = self.warm_up_steps(config, &examples, &schedule);
        let policy = &mut self.recovery.models.policy;
        let mut warm = std::mem::replace(&mut policy.optimizer, rl);
        policy.optimizer.adopt_masters(&mut warm);
        self.updater.demonstrations = None;
        self.updater.reset_skips(Phase::WarmUp);
        warmed
    }

    fn warm_up_steps(&mut self, config: &SftConfig, examples: &Arc<SftDataset>, schedule: &LrSchedule) -> Result<()> {
        for step in 0..examples.steps {
            let started = Instant::now();
            let mut report = self.supervised_step(Phase::WarmUp, examples, step, schedule.lr(step))?;
            report.seconds = started.elapsed().as_secs_f64();
            let Recovery { telemetry, state, .. } = &mut self.recovery;
            report.timings = std::mem::take(&mut telemetry.timings);
            report.step = step + 1;
            state.seconds += report.seconds;
            telemetry.recorder.warm_up_step(&report, examples.steps);
            if (step + 1).is_multiple_of(WARM_UP_CHECK) && self.is_warm(config)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns true if the validation reward that ends the warm-up is reached.
    fn is_warm(&mut self, config: &SftConfig) -> Result<bool> {
        let Some(target) = config.until_reward.filter(|_| !self.session.data.prompts.validation.is_empty()) else {
            return Ok(false);
        };
        let reward = mean_reward(&self.validation_samples()?);
        // these belong to no step
        self.recovery.telemetry.timings = PhaseTimings::default();
        Ok(reward.is_some_and(|reward| reward >= target))
    }

    /// One optimizer step on a step's examples, in a phase of the run or of its warm-up.
    fn supervised_step(&mut self, phase: Phase, examples: &SftDataset, step: u64, lr: f64) -> Result<StepReport> {
        let Self { session, updater, recovery: run, .. } = self;
        let (actor, epoch) = run.phase(phase, |run| {
            let seed = session.config.trainer.seed;
            let (sequences, epoch) = examples.step(step, seed, &session.source, &session.data.prompts)?;
            run.state.tokens += sequences.iter().map(|s| s.tokens.len() as u64).sum::<u64>();
            let mut update = UpdateReport::new(lr);
            let loss = StepLoss { phase, temperature: 1.0, loss: (&Nll).into() };
            updater.optimizer_step(run, &sequences, loss, &mut update)?;
            Ok((update, epoch))
        })?;
        Ok(StepReport { actor: Some(actor), epoch, ..StepReport::default() })
    }

    /// Mean negative log-likelihood of the scored tokens of held-out examples, if there are any.
    pub(super) fn validation_loss(&mut self) -> Result<Option<f64>> {
        let examples = self.updater.demonstrations.clone();
        let Some(examples) = examples.filter(|e| !e.validation.is_empty()) else {
            return Ok(None);
        };
        let score = |run: &mut Recovery| run.models.policy.score(&examples.validation, 1.0);
        let scores = self.recovery.recovering_phase(Phase::ValidationLoss, score)?;
        let scored = scores.logp.iter().zip(&examples.validation);
        let loss: f64 = scored
            .flat_map(|(logp, s)| logp.iter().zip(s.columns.weight.iter().flatten()))
            .map(|(&logp, weight)| -f64::from(logp) * weight)
            .sum();
        Ok(Some(loss))
    }
}
