//! What rollouts are worth and how likely they are: rewards, log-probs before the update and under the reference policy,
//! the critic's values.

use super::evaluate::answers;
use super::gather::all_values;
use super::models::Models;
use super::recovery::Recovery;
use super::session::Session;
use crate::Result;
use crate::checkpoint::TrainerState;
use crate::config::OldLogProbs;
use crate::data::Prompt;
use crate::learner::score_placed;
use crate::metrics::{Phase, RolloutStats};
use crate::reward::{Answer, CompletionId, Programs, Progress, RewardManager, RewardWorker};
use crate::rollout::{Rerouted, Rollout};
use crate::sequence::{Sequence, column};
use crate::task::Reward;
use crate::turns::Outcome;
use firebrick_sampler::Sample;
use std::sync::Arc;
use std::time::Instant;

/// Completions of prompts.
pub(super) struct Sampled {
    /// The prompts, with what environments have added.
    pub prompts: Arc<Vec<Prompt>>,
    /// Index of the first of them among the run's draws.
    pub first: u64,
    pub samples: Vec<Sample>,
    /// What came of each completion where it had an environment.
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

    /// The programs that score completions, told where the run stands.
    pub fn programs(&self, state: &TrainerState) -> Programs {
        self.reward_manager.programs(self.progress(state))
    }

    /// Where the run stands, for reward functions that ask.
    pub fn progress(&self, state: &TrainerState) -> Progress {
        let examples = self.session.data.prompts.examples();
        let epochs = examples.map(|examples| state.draws as f64 / examples.max(1) as f64);
        Progress { global_step: state.step, max_steps: self.session.steps, epoch: epochs.unwrap_or(0.0) }
    }

    /// Texts and rewards of completions that rules and programs are scoring: the reward models score all of them
    /// together.
    pub fn rewards(
        &mut self,
        run: &mut Recovery,
        state: &mut TrainerState,
        sampled: &Sampled,
        worker: RewardWorker,
        stats: &mut RolloutStats,
    ) -> Result<Vec<(String, Reward)>> {
        let first = CompletionId { step: state.step + 1, prompt_index: sampled.first, sample: 0 };
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
                let statistics = state.rewards.entry(name).or_default();
                for value in values {
                    statistics.add(value);
                }
            }
            list.sum(&mut rewards, Some(&state.rewards));
        }
        if results.iter().any(|program| !program.is_empty()) {
            let programs = stats.programs.get_or_insert_default();
            programs.wait_seconds += waited;
            programs.repeated += rewards.iter().filter(|reward| reward.repeated).count();
            programs.lost += rewards.iter().filter(|reward| reward.lost.is_some()).count();
        }
        Ok(answers.into_iter().map(|answer| answer.text).zip(rewards).collect())
    }

    /// Notes the rewards of greedy completions with their prompts' rollouts: they are rewarded like the others, and not
    /// trained on.
    pub fn reward_baselines(
        &mut self,
        run: &mut Recovery,
        state: &TrainerState,
        prompts: &[Prompt],
        samples: &[Sample],
        rollouts: &mut [Rollout],
    ) -> Result<()> {
        let session = Arc::clone(&self.session);
        let (config, source, task) = (&session.config.rollout, &session.source, session.data.prompts.task());
        let sampling = config.greedy(source.ends.ids.clone());
        let first = CompletionId { step: state.step + 1, prompt_index: state.draws, sample: 0 };
        let answers = answers(prompts, samples, None, first, (&source.tokenizer, &sampling))?;
        let (now, longest) = (self.progress(state), config.response_length);
        let rewards = run.recovering(Phase::RewardBaseline, |_| {
            self.reward_manager.score(task, &answers, longest, now, Some(&state.rewards))
        })?;
        for (answer, reward) in answers.iter().zip(rewards) {
            let prompt_index = answer.id.prompt_index;
            for rollout in rollouts.iter_mut().filter(|r| r.prompt_index == prompt_index) {
                rollout.baseline = reward.value();
                // without what it is compared with, the group is left out
                rollout.reward_error.clone_from(&reward.lost);
            }
        }
        Ok(())
    }

    /// Whether the policy scores the rollouts before its update: for its own log-probs, or for the values of a value
    /// head.
    pub fn needs_old_log_probs(&self) -> bool {
        let config = &self.session.config;
        config.shared_critic().is_some() || config.update.old_log_probs == OldLogProbs::Trainer
    }

    /// The policy's log-probs before the update, and its values where it has a value head: one pass for both.
    pub fn score_old(&self, models: &Models, rollouts: &mut [Rollout]) -> Result<()> {
        let config = &self.session.config;
        let mut sequences = unmasked(rollouts);
        if config.rollout.router_replay {
            sequences = replayed(sequences, rollouts.iter());
        }
        let scored = models.policy.score(&sequences, config.rollout.temperature)?;
        let arch = models.policy.decoder().arch();
        let per_token: Vec<usize> = arch.expert_layers().map(|(_, own)| own.per_token).collect();
        for (rollout, now) in rollouts.iter_mut().zip(&scored.routes) {
            let both = rollout.routes.as_ref().zip(now.as_ref());
            rollout.rerouted = both.map(|(then, now)| Rerouted::between(then, now, &per_token));
        }
        let both = scored.logp.into_iter().zip(scored.values);
        for (rollout, (logp, values)) in rollouts.iter_mut().zip(both) {
            // a policy without a value head has none
            rollout.columns.value = (!values.is_empty()).then(|| column(&values));
            if config.update.old_log_probs == OldLogProbs::Trainer {
                rollout.columns.old_logp = Some(column(&logp));
            }
        }
        Ok(())
    }

    /// The log-probs of the reference policy, at the training temperature.
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

/// The critic's values of the states that completion tokens were drawn in, in a run that has one.
pub(super) fn score_values(models: &Models, rollouts: &mut [Rollout]) -> Result<()> {
    let Some(critic) = &models.critic else { return Ok(()) };
    let values = critic.values(&unmasked(rollouts))?;
    for (rollout, values) in rollouts.iter_mut().zip(values) {
        rollout.columns.value = Some(column(&values));
    }
    Ok(())
}

/// Prompts and completions, all completion tokens scored.
fn unmasked(rollouts: &[Rollout]) -> Vec<Sequence> {
    rollouts.iter().map(|r| Sequence::completion(&r.prompt, &r.completion)).collect()
}

/// Sequences of rollouts that go through the experts that they were sampled with.
pub(super) fn replayed<'r>(sequences: Vec<Sequence>, rollouts: impl IntoIterator<Item = &'r Rollout>) -> Vec<Sequence> {
    let pairs = sequences.into_iter().zip(rollouts);
    pairs.map(|(sequence, rollout)| Sequence { routes: rollout.routes.clone(), ..sequence }).collect()
}
