//! Supervised training on the task's solutions: the warm-up of `train`, and the whole of `sft`.

use super::update::UpdateSums;
use super::{Event, Metrics, Trainer};
use crate::batch::{SampleId, Sequence};
use crate::config::SftConfig;
use crate::objective::aggregate::{Denominators, LossAggMode, token_weights};
use crate::objective::sft::Nll;
use crate::optim::schedule::Schedule as LrSchedule;
use crate::placed::Use;
use crate::plan::Role;
use crate::{Error, Result};
use std::time::Instant;

/// Supervised training draws from here on, far from the draws of RL: an endless task gives it other examples, a finite
/// one other epochs.
const SFT_DRAWS: u64 = 1 << 40;

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
        let Some(config) = config else {
            unreachable!("checked before the run folder was made")
        };
        let schedule = config
            .optim
            .lr_scheduler
            .build(config.optim.lr, config.steps)?;
        if !self.resumed {
            let mut metrics = self.validate()?;
            self.flush_memory()?;
            metrics.insert("training/global_step".into(), 0.0);
            self.log(&metrics)?;
        }
        while self.state.step < config.steps {
            let started = Instant::now();
            self.phase_step = self.state.step + 1;
            let lr = schedule.lr(self.state.step);
            let metrics = self.sft_step(&config, self.state.step, lr)?;
            self.state.optimizer_steps = self.learner.optimizer.steps();
            let mut metrics = self.finish_step(metrics, started)?;
            self.observer.event(Event::Sft {
                step: self.state.step,
                steps: config.steps,
                metrics: &metrics,
            });
            self.rhythm(&mut metrics, config.steps)?;
        }
        Ok(())
    }

    /// The warm-up before the first RL step. It leaves weights behind and nothing else.
    pub(super) fn warm_up(&mut self, config: &SftConfig) -> Result<()> {
        let schedule = config
            .optim
            .lr_scheduler
            .build(config.optim.lr, config.steps)?;
        let own = self.learner.fresh_optimizer(config.optim.clone());
        let rl = std::mem::replace(&mut self.learner.optimizer, own);
        let warmed = self.warm_up_steps(config, &schedule);
        self.learner.optimizer = rl;
        warmed
    }

    fn warm_up_steps(&mut self, config: &SftConfig, schedule: &LrSchedule) -> Result<()> {
        for step in 0..config.steps {
            let started = Instant::now();
            let metrics = self.sft_step(config, step, schedule.lr(step))?;
            self.state.seconds += started.elapsed().as_secs_f64();
            self.observer.event(Event::Sft {
                step: step + 1,
                steps: config.steps,
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
        let samples = &[(Role::Policy, Use::Rollout)];
        let reward = self.phase("testing", samples, &mut Metrics::new(), |t| {
            t.recovering("testing", Self::greedy)
        })?;
        Ok(reward >= target)
    }

    fn sft_step(&mut self, config: &SftConfig, step: u64, lr: f64) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        let passes = &[(Role::Policy, Use::Pass)];
        let sums = self.phase("update_actor", passes, &mut metrics, |t| {
            let sequences = t.demonstrations(step, config.batch_size)?;
            t.state.tokens += sequences.iter().map(|s| s.tokens.len() as u64).sum::<u64>();
            let mut update = UpdateSums::of_policy();
            t.optimizer_step(&sequences, 1.0, &Nll, lr, &mut update)?;
            Ok(update)
        })?;
        metrics.extend(sums.metrics());
        metrics.insert("actor/lr".into(), lr);
        Ok(metrics)
    }

    /// The examples of a step, prompt and solution, with the solution's tokens (and its end) scored.
    fn demonstrations(&self, step: u64, batch: usize) -> Result<Vec<Sequence>> {
        let seed = self.config.trainer.seed;
        let first = SFT_DRAWS + step * batch as u64;
        let mut sequences = Vec::with_capacity(batch);
        for i in 0..batch as u64 {
            let prompt = self.data.draw(seed, first + i)?;
            let Some(solution) = &prompt.example.solution else {
                return Err(Error::Config(format!(
                    "supervised training needs solutions, and the task has none for prompt {:?}; give `solution` in \
                     the task's configuration",
                    prompt.text
                )));
            };
            let mut completion = self.source.tokenizer.encode(solution, false)?;
            completion.extend(self.source.end_of_answer());
            let mut sequence = Sequence::completion(&prompt.tokens, &completion);
            sequence.id = SampleId {
                draw: first + i,
                sample: 0,
            };
            self.check_demonstration(&sequence.tokens, &prompt.text)?;
            sequences.push(sequence);
        }
        let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
        let weights = token_weights(
            LossAggMode::TokenMean,
            &lengths,
            Denominators::new(&lengths, 1),
        );
        for (sequence, weights) in sequences.iter_mut().zip(weights) {
            sequence.weights = weights;
        }
        Ok(sequences)
    }

    fn check_demonstration(&self, tokens: &[u32], prompt: &str) -> Result<()> {
        let arch = self.learner.decoder().arch();
        let context = self.source.trained_context();
        if tokens.len() > context {
            let what = format!("prompt {prompt:?} with its solution");
            let length = tokens.len();
            return Err(firebrick_models::Error::TooLong {
                what,
                length,
                context,
            }
            .into());
        }
        let budget = self.learner.model.plan.train_tokens;
        if tokens.len() > budget {
            let key = "memory.train_tokens";
            return Err(Error::Budget {
                tokens: tokens.len(),
                budget,
                key,
            });
        }
        Ok(firebrick_models::generate::check_ids(
            tokens,
            arch.vocab_size,
        )?)
    }
}
