//! Scores of rollouts: rewards, log-probs of the policy before its update and of the reference policy, values of the
//! critic.

use super::gather::all_values;
use super::models::Models;
use super::recovery::Recovery;
use super::session::Session;
use crate::Result;
use crate::checkpoint::TrainerState;
use crate::config::OldLogProbs;
use crate::data::Prompt;
use crate::learner::score_placed;
use crate::metrics::{Phase, ProgramStats};
use crate::reward::{Answer, CompletionId, Programs, Progress, RewardManager, RewardWorker};
use crate::rollout::{Rerouted, Rollout};
use crate::sequence::{Sequence, column};
use crate::task::Reward;
use crate::turns::Outcome;
use firebrick_sampler::Sample;
use std::sync::Arc;
use std::time::Instant;

/// Text of a completion and its reward.
pub(super) type Rewarded = (String, Reward);

/// Completions of prompts.
pub(super) struct Sampled {
    /// Prompts, with additions of environments.
    pub prompts: Arc<Vec<Prompt>>,
    /// Index of the first prompt among the run's draws.
    pub first: u64,
    pub samples: Vec<Sample>,
    /// Outcome per completion, with environments.
    pub outcomes: Option<Vec<Outcome>>,
}

/// Scores rollouts.
pub(super) struct Scorer {
    session: Arc<Session>,
    pub reward_manager: RewardManager,
}

impl Scorer {
    pub fn new(session: &Arc<Session>, reward_manager: RewardManager) -> Self {
        Self { session: Arc::clone(session), reward_manager }
    }

    /// Programs that score completions, with the progress of the run.
    pub fn programs(&self, state: &TrainerState) -> Programs {
        self.reward_manager.programs(self.progress(state))
    }

    /// Progress of the run, for reward functions.
    pub fn progress(&self, state: &TrainerState) -> Progress {
        let examples = self.session.data.prompts.examples();
        let epochs = examples.map(|examples| state.draws as f64 / examples.max(1) as f64);
        Progress { global_step: state.step, max_steps: self.session.steps, epoch: epochs.unwrap_or(0.0) }
    }

    /// Texts and rewards of completions: waits for rules and programs, then scores all with the reward models.
    pub fn rewards(
        &mut self,
        run: &mut Recovery,
        sampled: &Sampled,
        worker: RewardWorker,
    ) -> Result<(Vec<Rewarded>, Option<ProgramStats>)> {
        let first = CompletionId { step: run.step, prompt_index: sampled.first, sample: 0 };
        let started = Instant::now();
        let (rules, results) = worker.finish()?;
        let waited = started.elapsed().as_secs_f64();
        let (mut answers, mut rewards) = (Vec::new(), Vec::new());
        for (at, (sample, (text, reward))) in sampled.samples.iter().zip(rules).enumerate() {
            let outcome = sampled.outcomes.as_ref().map(|outcomes| &outcomes[at]);
            answers.push(Answer::new(&sampled.prompts, sample, outcome, text, first));
            rewards.push(reward);
        }
        let scores = run.recovering(Phase::Reward, |_| self.reward_manager.scores(&answers, &results))?;
        if let Some(list) = self.session.data.prompts.task().rewards() {
            list.insert(&mut rewards, scores);
            for (name, values) in all_values(&self.session.world, list.normalized(&rewards))? {
                let statistics = run.state.rewards.entry(name).or_default();
                for value in values {
                    statistics.add(value);
                }
            }
            list.sum(&mut rewards, Some(&run.state.rewards));
        }
        let programs = results.iter().any(|program| !program.is_empty()).then(|| ProgramStats {
            wait_seconds: waited,
            repeated: rewards.iter().filter(|reward| reward.repeated).count(),
            lost: rewards.iter().filter(|reward| reward.lost.is_some()).count(),
        });
        Ok((answers.into_iter().map(|answer| answer.text).zip(rewards).collect(), programs))
    }

    /// Rewards greedy completions like all others and sets them as baselines of their prompts' rollouts.
    pub fn reward_baselines(
        &mut self,
        run: &mut Recovery,
        prompts: &[Prompt],
        samples: &[Sample],
        rollouts: &mut [Rollout],
    ) -> Result<()> {
        let session = Arc::clone(&self.session);
        let (config, source, task) = (&session.config.rollout, &session.source, session.data.prompts.task());
        let sampling = config.greedy(source.ends.ids.clone());
        let first = CompletionId { step: run.step, prompt_index: run.state.draws, sample: 0 };
        let answer = |sample| Answer::decoded(prompts, sample, None, first, (&source.tokenizer, &sampling));
        let answers = samples.iter().map(answer).collect::<Result<Vec<_>>>()?;
        let rewards = run.recovering(Phase::RewardBaseline, |run| {
            let (progress, statistics) = (self.progress(&run.state), Some(&run.state.rewards));
            self.reward_manager.score(task, &answers, config.response_length, progress, statistics)
        })?;
        for (answer, reward) in answers.iter().zip(rewards) {
            let prompt_index = answer.id.prompt_index;
            for rollout in rollouts.iter_mut().filter(|r| r.prompt_index == prompt_index) {
                rollout.baseline = reward.value();
                // without a baseline, the group is left out
                rollout.reward_error.clone_from(&reward.lost);
            }
        }
        Ok(())
    }

    /// Returns true if the policy scores the rollouts before its update: for its log-probs, or the values of its value
    /// head.
    pub fn needs_old_log_probs(&self) -> bool {
        self.session.config.shared_critic().is_some() || self.session.old_log_probs() == OldLogProbs::Trainer
    }

    /// Scores rollouts with the policy before its update, in one pass: log-probs, and values if it has a value head.
    pub fn score_old(&self, models: &Models, rollouts: &mut [Rollout]) -> Result<()> {
        let config = &self.session.config;
        let mut sequences = unmasked(rollouts);
        if config.rollout.router_replay {
            sequences = replayed(sequences, rollouts.iter());
        }
        let scored = models.policy.score(&sequences, config.rollout.temperature)?;
        let arch = models.policy.decoder().arch();
        let per_token: Vec<usize> = arch.expert_layers().map(|(_, experts)| experts.per_token).collect();
        let scores = scored.logp.into_iter().zip(scored.values).zip(&scored.routes);
        for (rollout, ((logp, values), routes)) in rollouts.iter_mut().zip(scores) {
            let compared = rollout.routes.as_ref().zip(routes.as_ref());
            rollout.rerouted = compared.map(|(sampler, trainer)| Rerouted::between(sampler, trainer, &per_token));
            // a policy without a value head has none
            rollout.columns.value = (!values.is_empty()).then(|| column(&values));
            if self.session.old_log_probs() == OldLogProbs::Trainer {
                rollout.columns.old_logp = Some(column(&logp));
            }
        }
        Ok(())
    }

    /// Scores rollouts with the reference policy, at the training temperature.
    pub fn score_reference(&self, models: &Models, rollouts: &mut [Rollout]) -> Result<()> {
        let (policy, temperature) = (&models.policy, self.session.config.rollout.temperature);
        let sequences = unmasked(rollouts);
        let scored = match &models.reference {
            Some(reference) => score_placed(reference, &policy.runtime, &sequences, temperature)?,
            // adapters are trained: the reference is the policy with them off
            None => policy.score_base(&sequences, temperature)?,
        };
        for (rollout, logp) in rollouts.iter_mut().zip(scored.logp) {
            rollout.columns.ref_logp = Some(column(&logp));
        }
        Ok(())
    }
}

/// Scores rollouts with the critic, if there is one: a value per completion token.
pub(super) fn score_values(models: &Models, rollouts: &mut [Rollout]) -> Result<()> {
    let Some(critic) = &models.critic else { return Ok(()) };
    let values = critic.values(&unmasked(rollouts))?;
    for (rollout, values) in rollouts.iter_mut().zip(values) {
        rollout.columns.value = Some(column(&values));
    }
    Ok(())
}

/// Sequences of rollouts with all completion tokens scored.
fn unmasked(rollouts: &[Rollout]) -> Vec<Sequence> {
    rollouts.iter().map(|r| Sequence::completion(&r.prompt, &r.completion)).collect()
}

/// Sequences with the expert routes of their rollouts.
pub(super) fn replayed<'r>(sequences: Vec<Sequence>, rollouts: impl IntoIterator<Item = &'r Rollout>) -> Vec<Sequence> {
    let pairs = sequences.into_iter().zip(rollouts);
    pairs.map(|(sequence, rollout)| Sequence { routes: rollout.routes.clone(), ..sequence }).collect()
}
