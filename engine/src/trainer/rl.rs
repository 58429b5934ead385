//! Reinforcement learning, one step a page: sample, judge, score, credit, update.

use super::critic::value_metrics;
use super::rollout::{Rolled, SAMPLES};
use super::update::{UPDATE, UPDATE_CRITIC, UpdateSums};
use super::{Event, Metrics, Trainer};
use crate::Result;
use crate::batch::{SampleId, Sequence};
use crate::config::OldLogProbs;
use crate::dataset::Prompt;
use crate::learner::score_placed;
use crate::objective::agreement::{Compared, DIFF_MAX, DIFF_MEAN};
use crate::objective::{OptimizerStep, TokenLoss};
use crate::optim::schedule::Schedule as LrSchedule;
use crate::placed::{Placed, Use};
use crate::plan::Role;
use crate::rollout::{Rollout, SampleRecord};
use firebrick_models::generate::Finish;
use firebrick_models::random::Stream;
use std::sync::Arc;
use std::time::Instant;

/// Stream of the shuffle of groups among mini-batches; the step is added.
const MINI_BATCH_STREAM: u64 = 2 << 32;

const POLICY: &[(Role, Use)] = &[(Role::Policy, Use::Pass)];
const REFERENCE: &[(Role, Use)] = &[(Role::Reference, Use::Pass)];
const CRITIC: &[(Role, Use)] = &[(Role::Critic, Use::Pass)];

impl Trainer {
    pub(super) fn train(&mut self) -> Result<()> {
        let steps = self.config.trainer.steps;
        let schedule = self
            .config
            .optim
            .lr_scheduler
            .build(self.config.optim.lr, steps)?;
        if !self.resumed {
            if let Some(sft) = self.config.warmup.sft.clone() {
                self.warm_up(&sft)?;
            }
            self.keep_reference()?;
            self.begin_critic()?;
            let mut metrics = self.validate()?;
            self.flush_memory()?;
            metrics.insert("training/global_step".into(), 0.0);
            self.log(&metrics)?;
        }
        while self.state.step < steps {
            let started = Instant::now();
            self.phase_step = self.state.step + 1;
            let metrics = self.step(&schedule)?;
            let mut metrics = self.finish_step(metrics, started)?;
            self.observer.event(Event::Step {
                step: self.state.step,
                steps,
                metrics: &metrics,
            });
            self.rhythm(&mut metrics, steps)?;
        }
        Ok(())
    }

    fn step(&mut self, schedule: &LrSchedule) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        let Rolled {
            prompts,
            mut rollouts,
        } = self.roll_out(&mut metrics)?;
        if self.objective.needs().greedy {
            let greedy = self.phase("gen_max", SAMPLES, &mut metrics, |t| {
                t.recovering("gen_max", |t| t.greedy_baselines(&prompts))
            })?;
            self.phase("reward_max", &[], &mut metrics, |t| {
                t.judge_baselines(&prompts, &greedy, &mut rollouts)
            })?;
        }
        let shared = self.config.shared_critic().is_some();
        if shared || self.config.update.old_log_probs == OldLogProbs::Trainer {
            self.phase("old_log_prob", POLICY, &mut metrics, |t| {
                t.recovering("old_log_prob", |t| t.score_old(&mut rollouts))
            })?;
        }
        if self.objective.needs().reference {
            let with_adapters = self.learner.decoder().lora().is_some();
            let uses = if with_adapters { POLICY } else { REFERENCE };
            self.phase("ref", uses, &mut metrics, |t| {
                t.recovering("ref", |t| t.score_reference(&mut rollouts))
            })?;
        }
        if self.critic.is_some() {
            self.phase("values", CRITIC, &mut metrics, |t| {
                t.recovering("values", |t| t.score_values(&mut rollouts))
            })?;
        }
        let credited = self.phase("adv", &[], &mut metrics, |t| {
            Ok(t.objective.credit(&mut rollouts, &mut t.state.controls))
        })?;
        if let Some(lr) = self.critic_lr()? {
            let update = self.phase(UPDATE_CRITIC, CRITIC, &mut metrics, |t| {
                t.update_critic(&rollouts, lr)
            })?;
            metrics.extend(update.metrics());
            metrics.insert("critic/lr".into(), lr);
        }
        let lr = schedule.lr(self.state.step);
        if self.updates_policy() {
            let update = self.phase(UPDATE, POLICY, &mut metrics, |t| t.update(&rollouts, lr))?;
            metrics.extend(update.metrics());
            metrics.insert("actor/lr".into(), lr);
            if let Some(critic) = self.config.shared_critic() {
                let rate = critic.value_rate(&self.config.optim);
                metrics.insert("critic/lr".into(), lr * rate);
            }
        }
        self.run
            .append("samples.jsonl", &self.records(&prompts, &rollouts))?;

        metrics.extend(credited);
        if let Some(control) = &self.state.controls.entropy {
            metrics.insert("actor/entropy_coeff".into(), control.coeff);
        }
        self.rollout_metrics(&rollouts, &mut metrics);
        value_metrics(&rollouts, &mut metrics);
        self.state.optimizer_steps = self.learner.optimizer.steps();
        self.state.loss_scale = self.learner.optimizer.scaler();
        self.state.draws += prompts.len() as u64;
        Ok(metrics)
    }

    /// The policy's log-probs before the update, and its values where it has a value head: one pass for both.
    fn score_old(&self, rollouts: &mut [Rollout]) -> Result<()> {
        let temperature = self.config.rollout.temperature;
        let scored = self.learner.score(&bare(rollouts), temperature)?;
        let both = scored.logp.into_iter().zip(scored.values);
        for (rollout, (logp, values)) in rollouts.iter_mut().zip(both) {
            rollout.values = values;
            if self.config.update.old_log_probs == OldLogProbs::Trainer {
                rollout.old_logp = Some(logp);
            }
        }
        Ok(())
    }

    fn score_reference(&self, rollouts: &mut [Rollout]) -> Result<()> {
        let scored = match &self.reference {
            Some(reference) => self.log_probs(reference, rollouts)?,
            // adapters are trained: the reference is the policy with them off
            None => {
                let temperature = self.config.rollout.temperature;
                self.learner.score_base(&bare(rollouts), temperature)?.logp
            }
        };
        for (rollout, logp) in rollouts.iter_mut().zip(scored) {
            rollout.ref_logp = Some(logp);
        }
        Ok(())
    }

    /// Log-probs of the completions under a model, at the training temperature.
    fn log_probs(&self, model: &Placed, rollouts: &[Rollout]) -> Result<Vec<Vec<f32>>> {
        let (runtime, temperature) = (&self.learner.runtime, self.config.rollout.temperature);
        Ok(score_placed(model, runtime, &bare(rollouts), temperature)?.logp)
    }

    /// Epochs and mini-batches over a step's rollouts: one optimizer step each.
    fn update(&mut self, rollouts: &[Rollout], lr: f64) -> Result<UpdateSums> {
        let mut sums = UpdateSums::of_policy();
        let objective = Arc::clone(&self.objective);
        let temperature = self.config.rollout.temperature;
        let compared = Compared(objective.as_ref());
        for epoch in 0..self.config.update.ppo_epochs {
            for (i, mini) in self.minibatches(rollouts, epoch).into_iter().enumerate() {
                let sequences = self.prepared(&mini)?;
                let tokens: &dyn TokenLoss = if epoch + i == 0 && self.compares() {
                    &compared
                } else {
                    objective.as_ref()
                };
                let loss = match self.config.shared_critic() {
                    Some(critic) => critic.joint_loss(tokens),
                    None => tokens.into(),
                };
                let own = self.optimizer_step(&sequences, temperature, loss, lr, &mut sums)?;
                objective.observe(&own, &mut self.state.controls);
            }
        }
        Ok(sums)
    }

    /// Whether the update's own forward says what the sampler's log-probs are worth: nobody computed them again, and no
    /// dropout is in between.
    fn compares(&self) -> bool {
        let lora = self.learner.decoder().lora();
        let drops = lora.is_some_and(|lora| lora.dropout > 0.0);
        self.config.update.old_log_probs == OldLogProbs::Sampler && !drops
    }

    /// Sequences of one optimizer step, with everything fixed that they share.
    fn prepared(&mut self, mini: &[&Rollout]) -> Result<Vec<Sequence>> {
        let mut sequences: Vec<Sequence> = mini.iter().map(|r| sequence(r)).collect();
        let temperature = self.config.rollout.temperature;
        let score = |t: &mut Self| t.learner.score(&sequences, temperature);
        let scores = if self.objective.needs().scores {
            Some(self.recovering(UPDATE, score)?)
        } else {
            None
        };
        let mut step = OptimizerStep {
            sequences: &mut sequences,
            max_length: self.config.rollout.response_length,
            scores: scores.as_ref(),
            seed: self.config.trainer.seed,
            step: self.learner.optimizer.steps() + self.state.skipped_steps,
        };
        self.objective.prepare(&mut step, &mut self.state.controls);
        if let Some(critic) = self.config.shared_critic() {
            let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
            let weights = critic.weights(&lengths, self.config.rollout.response_length);
            for (sequence, weights) in sequences.iter_mut().zip(weights) {
                sequence.value_weights = weights;
            }
        }
        Ok(sequences)
    }

    /// Groups of a step, cut into mini-batches; shuffled by (seed, step, epoch) where there are several.
    pub(super) fn minibatches<'r>(
        &self,
        rollouts: &'r [Rollout],
        epoch: usize,
    ) -> Vec<Vec<&'r Rollout>> {
        let mut groups: Vec<&[Rollout]> = rollouts.chunk_by(|a, b| a.draw == b.draw).collect();
        let size = self
            .config
            .update
            .ppo_mini_batch_size
            .unwrap_or(groups.len());
        if size < groups.len() {
            let stream = MINI_BATCH_STREAM + (self.state.step << 8) + epoch as u64;
            Stream::new(self.config.trainer.seed, stream).shuffle(&mut groups);
        }
        groups
            .chunks(size)
            .map(|c| c.iter().flat_map(|g| g.iter()).collect())
            .collect()
    }

    fn records<'r>(&self, prompts: &'r [Prompt], rollouts: &'r [Rollout]) -> Vec<SampleRecord<'r>> {
        rollouts
            .iter()
            .map(|r| {
                let prompt = &prompts[(r.draw - self.state.draws) as usize];
                SampleRecord {
                    step: self.state.step + 1,
                    draw: r.draw,
                    sample: r.sample,
                    prompt: &prompt.text,
                    completion: &r.text,
                    answer: &prompt.example.answer,
                    reward: r.reward,
                    reward_parts: &r.reward_parts,
                    advantage: mean(r.advantages.iter().copied()),
                    finish: r.finish,
                    tokens: r.completion.len(),
                }
            })
            .collect()
    }

    fn rollout_metrics(&mut self, rollouts: &[Rollout], metrics: &mut Metrics) {
        let mut spread = |name: &str, values: &[f64]| spread(name, values, metrics);
        let of = |f: fn(&Rollout) -> f64| rollouts.iter().map(f).collect::<Vec<f64>>();
        let rewards = of(|r| r.reward);
        spread("critic/score", &rewards);
        spread("critic/rewards", &of(|r| r.penalised));
        spread(
            "critic/advantages",
            &of(|r| mean(r.advantages.iter().copied())),
        );
        spread("response_length", &of(|r| r.completion.len() as f64));
        spread("prompt_length", &of(|r| r.prompt.len() as f64));
        let cut = rollouts
            .iter()
            .filter(|r| r.finish == Finish::Length)
            .count();
        metrics.insert(
            "response_length/clip_ratio".into(),
            cut as f64 / rollouts.len() as f64,
        );
        for (name, _) in rollouts
            .first()
            .map(|r| r.reward_parts.clone())
            .unwrap_or_default()
        {
            let part = |r: &Rollout| {
                r.reward_parts
                    .iter()
                    .find(|(n, _)| *n == name)
                    .map_or(0.0, |(_, v)| *v)
            };
            metrics.insert(
                format!("reward/{name}/mean"),
                mean(rollouts.iter().map(part)),
            );
            if let Some(running) = self.state.rewards.get(&name) {
                metrics.insert(format!("reward/{name}/running_mean"), running.mean);
                metrics.insert(format!("reward/{name}/running_std"), running.std());
            }
        }
        let differences: Vec<f64> = rollouts.iter().flat_map(probability_differences).collect();
        if !differences.is_empty() {
            let most = differences.iter().copied().fold(0.0, f64::max);
            let centre = mean(differences.iter().copied());
            metrics.extend([(DIFF_MAX.into(), most), (DIFF_MEAN.into(), centre)]);
        }
        let generated: usize = rollouts.iter().map(|r| r.completion.len()).sum();
        let total: usize = rollouts
            .iter()
            .map(|r| r.prompt.len() + r.completion.len())
            .sum();
        self.state.tokens += total as u64;
        metrics.insert("perf/total_num_tokens".into(), total as f64);
        let seconds: f64 = metrics
            .iter()
            .filter(|(k, _)| k.starts_with("timing_s/"))
            .map(|(_, v)| v)
            .sum();
        metrics.insert("perf/throughput".into(), total as f64 / seconds.max(1e-9));
        for (phase, tokens) in [("gen", generated), ("update_actor", total)] {
            let ms = metrics
                .get(&format!("timing_s/{phase}"))
                .map_or(0.0, |s| s * 1e3);
            metrics.insert(
                format!("timing_per_token_ms/{phase}"),
                ms / tokens.max(1) as f64,
            );
        }
    }
}

/// Difference between the sampler's and the trainer's probability of every token whose old log-prob was computed again.
fn probability_differences(rollout: &Rollout) -> impl Iterator<Item = f64> {
    let old = rollout.old_logp.as_deref().unwrap_or_default();
    rollout
        .full_logp
        .iter()
        .zip(old)
        .map(|(a, b)| (f64::from(*a).exp() - f64::from(*b).exp()).abs())
}

pub(super) fn bare(rollouts: &[Rollout]) -> Vec<Sequence> {
    rollouts
        .iter()
        .map(|r| Sequence::completion(&r.prompt, &r.completion))
        .collect()
}

/// The sequence of a rollout, its scored tokens being those of the mask.
pub(super) fn sequence(rollout: &Rollout) -> Sequence {
    let whole = Sequence::completion(&rollout.prompt, &rollout.completion);
    Sequence {
        positions: rollout.scored(&whole.positions),
        advantages: rollout.scored(&rollout.advantages),
        old_logp: rollout.scored(rollout.old()),
        ref_logp: rollout
            .ref_logp
            .as_deref()
            .map_or_else(Vec::new, |l| rollout.scored(l)),
        sampler_logp: rollout.scored(&rollout.sampler_logp),
        correction: rollout.correction.clone(),
        values: rollout.scored(&rollout.values),
        returns: rollout.scored(&rollout.returns),
        id: SampleId {
            draw: rollout.draw,
            sample: rollout.sample,
        },
        ..whole
    }
}

/// Mean, largest and smallest of some values.
pub(super) fn spread(name: &str, values: &[f64], metrics: &mut Metrics) {
    let fold = |from, pick: fn(f64, f64) -> f64| values.iter().copied().fold(from, pick);
    metrics.insert(format!("{name}/mean"), mean(values.iter().copied()));
    metrics.insert(format!("{name}/max"), fold(f64::NEG_INFINITY, f64::max));
    metrics.insert(format!("{name}/min"), fold(f64::INFINITY, f64::min));
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.sum::<f64>() / n
}
