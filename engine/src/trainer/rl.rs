//! Reinforcement learning, one step a page: sample, reward, score, advantages, update.

use super::{Metrics, Trainer};
use crate::Result;
use crate::config::OldLogProbs;
use crate::data::Prompt;
use crate::metrics::Phase;
use crate::objective::mismatch::{DIFF_MAX, DIFF_MEAN};
use crate::objective::value::explained_variance;
use crate::rollout::{Rollout, SampleRecord};
use firebrick_models::generate::FinishReason;

impl Trainer {
    /// One RL step.
    pub(super) fn rl_step(&mut self) -> Result<Metrics> {
        let mut metrics = Metrics::new();
        let (prompts, mut rollouts) = self.roll_out(&mut metrics)?;
        if self.objective.needs().greedy {
            let greedy =
                self.recovering_phase(Phase::GenerateBaseline, |t| t.greedy_baselines(&prompts))?;
            self.phase(Phase::RewardBaseline, |t| {
                t.judge_baselines(&prompts, &greedy, &mut rollouts)
            })?;
        }
        let shared = self.config.shared_critic().is_some();
        if shared || self.config.update.old_log_probs == OldLogProbs::Trainer {
            self.recovering_phase(Phase::OldLogProbs, |t| t.score_old(&mut rollouts))?;
        }
        if self.objective.needs().reference {
            self.recovering_phase(Phase::ReferenceLogProbs, |t| {
                t.score_reference(&mut rollouts)
            })?;
        }
        if self.critic.is_some() {
            self.recovering_phase(Phase::Values, |t| t.score_values(&mut rollouts))?;
        }
        let credited = self.phase(Phase::Advantages, |t| {
            Ok(t.objective
                .compute_advantages(&mut rollouts, &mut t.state.coefficients))
        })?;
        let step = self.state.step;
        if let Some(lr) = self.critic_lr.as_ref().map(|schedule| schedule.lr(step)) {
            let update = self.phase(Phase::UpdateCritic, |t| t.update_critic(&rollouts, lr))?;
            metrics.extend(update.metrics());
            metrics.insert("critic/lr".into(), lr);
        }
        if self.updates_policy() {
            let lr = self.lr.lr(step);
            let update = self.phase(Phase::UpdateActor, |t| t.update_policy(&rollouts, lr))?;
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
        if let Some(control) = &self.state.coefficients.entropy {
            metrics.insert("actor/entropy_coeff".into(), control.coeff);
        }
        self.rollout_metrics(&rollouts, &mut metrics);
        value_metrics(&rollouts, &mut metrics);
        metrics.extend(self.take_timings());
        self.state.draws += prompts.len() as u64;
        Ok(metrics)
    }

    /// Whether the policy is updated in the step at hand, or the critic alone.
    fn updates_policy(&self) -> bool {
        let warmup = self.config.critic.as_ref().map_or(0, |c| c.warmup);
        self.state.step >= warmup
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
            .filter(|r| r.finish == FinishReason::Length)
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
        let seconds = self.timings.total();
        metrics.insert("perf/throughput".into(), total as f64 / seconds.max(1e-9));
        for (phase, tokens) in [(Phase::Generate, generated), (Phase::UpdateActor, total)] {
            let ms = self.timings.seconds(phase) * 1e3;
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

/// Mean, largest and smallest of some values.
fn spread(name: &str, values: &[f64], metrics: &mut Metrics) {
    let fold = |from, pick: fn(f64, f64) -> f64| values.iter().copied().fold(from, pick);
    metrics.insert(format!("{name}/mean"), mean(values.iter().copied()));
    metrics.insert(format!("{name}/max"), fold(f64::NEG_INFINITY, f64::max));
    metrics.insert(format!("{name}/min"), fold(f64::INFINITY, f64::min));
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = values.len().max(1) as f64;
    values.sum::<f64>() / n
}

/// What a critic knows of a step's scored tokens, under verl's names. Nothing without a critic.
pub(super) fn value_metrics(rollouts: &[Rollout], metrics: &mut Metrics) {
    let all = |of: fn(&Rollout) -> Vec<f64>| -> Vec<f64> {
        rollouts.iter().flat_map(|r| r.scored(&of(r))).collect()
    };
    let values = all(|r| r.values.iter().map(|&v| f64::from(v)).collect());
    if values.is_empty() {
        return;
    }
    let returns = all(|r| r.returns.clone());
    spread("critic/values", &values, metrics);
    spread("critic/returns", &returns, metrics);
    spread("critic/advantages", &all(|r| r.advantages.clone()), metrics);
    let explained = explained_variance(&values, &returns);
    metrics.insert("critic/vf_explained_var".into(), explained);
}
