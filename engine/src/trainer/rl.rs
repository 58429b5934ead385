//! Reinforcement learning, one step a page: sample, reward, score, advantages, update.

use super::Trainer;
use crate::Result;
use crate::config::OldLogProbs;
use crate::metrics::{Phase, RolloutReport, StepReport};
use crate::rollout::{Rollout, most_common_in_cut, share_cut_for_nothing};
use firebrick_models::tokenizer::EndTokens;

impl Trainer {
    /// One RL step.
    pub(super) fn rl_step(&mut self) -> Result<StepReport> {
        let mut rollout = self.roll_out()?;
        self.warn_of_cut_completions(&rollout.rollouts);
        let needs = self.objective.needs();
        if needs.greedy {
            let RolloutReport { prompts, rollouts, .. } = &mut rollout;
            let greedy = self.recovering_phase(Phase::GenerateBaseline, |t| t.greedy_baselines(prompts))?;
            self.phase(Phase::RewardBaseline, |t| t.reward_baselines(prompts, &greedy, rollouts))?;
            rollout.leave_out_lost();
            self.ensure_nonempty(&rollout)?;
        }
        let RolloutReport { rollouts, advantages, .. } = &mut rollout;
        if self.scores_old_log_probs() {
            self.recovering_phase(Phase::OldLogProbs, |t| t.score_old(rollouts))?;
        }
        if needs.reference {
            self.recovering_phase(Phase::ReferenceLogProbs, |t| t.score_reference(rollouts))?;
        }
        if self.critic.is_some() {
            self.recovering_phase(Phase::Values, |t| t.score_values(rollouts))?;
        }
        *advantages =
            self.phase(Phase::Advantages, |t| Ok(t.objective.compute_advantages(rollouts, &mut t.state.coefficients)))?;
        // whatever the objective says, what an environment wrote is not learnt, nor what has no reward
        rollouts.iter_mut().for_each(Rollout::mask_inserted);
        rollouts.iter_mut().filter(|r| r.reward.is_none()).for_each(Rollout::leave_out);
        let mut report = StepReport::default();
        if let Some(lr) = self.critic_lr() {
            let update = self.phase(Phase::UpdateCritic, |t| t.update_critic(rollouts, lr))?;
            report.critic = Some(update);
        }
        if let Some(lr) = self.actor_lr() {
            let update = self.phase(Phase::UpdateActor, |t| t.update_policy(rollouts, lr))?;
            report.actor = Some(update);
        }
        rollout.entropy_coeff = self.state.coefficients.entropy.as_ref().map(|c| c.coeff);
        self.state.draws += rollout.prompts.len() as u64;
        self.state.tokens += rollout.total_tokens() as u64;
        report.rollout = Some(rollout);
        Ok(report)
    }

    /// Says once in a session that most completions are cut before they can earn anything.
    fn warn_of_cut_completions(&mut self, rollouts: &[Rollout]) {
        let share = share_cut_for_nothing(rollouts).filter(|_| !self.warned_of_cut_completions);
        if let Some(share) = share {
            self.warned_of_cut_completions = true;
            tracing::warn!(
                "step {}: {:.0} % of the completions were truncated at rollout.response_length = {} tokens, and none \
                 of them was rewarded; {}",
                self.phase_step,
                100.0 * share,
                self.config.rollout.response_length,
                self.cure_of_cut_completions(rollouts)
            );
        }
    }

    /// What may help: another end, where a special token is in most of the completions and does not end them, or more
    /// room.
    fn cure_of_cut_completions(&self, rollouts: &[Rollout]) -> String {
        let (tokenizer, ends) = (&self.source.tokenizer, &self.source.ends);
        let shown = |ids: &[u32]| EndTokens::shown(ids, tokenizer);
        let special = tokenizer.special_tokens().iter();
        let special = special.filter(|(id, token)| !ends.ids.contains(id) && names_an_end(token)).map(|(id, _)| *id);
        let special: Vec<u32> = special.collect();
        let room = format!(
            "completions end with {}: if the model does not learn to write it, check its chat template and `eos_token_id`; \
             otherwise raise rollout.response_length, or ask for shorter answers",
            shown(&ends.ids)
        );
        match most_common_in_cut(rollouts, &special) {
            Some((id, share)) => format!(
                "{:.0} % of these contain {}, which does not end a completion ({} does): if the model ends with it, add it \
                 to rollout.stop, or to `eos_token_id` in the model's generation_config.json; otherwise raise \
                 rollout.response_length",
                100.0 * share,
                shown(&[id]),
                shown(&ends.ids)
            ),
            None => room,
        }
    }

    /// Whether the policy scores the rollouts before its update: for its own log-probs, or for the values of a value
    /// head.
    fn scores_old_log_probs(&self) -> bool {
        let shared = self.config.shared_critic().is_some();
        shared || self.config.update.old_log_probs == OldLogProbs::Trainer
    }

    /// Learning rate of the critic in this step; none of a run whose critic has no optimizer of its own.
    fn critic_lr(&self) -> Option<f64> {
        let schedule = self.critic_lr_schedule.as_ref();
        schedule.map(|schedule| schedule.lr(self.state.step))
    }

    /// Learning rate of the policy in this step; none while the critic trains alone.
    pub(super) fn actor_lr(&self) -> Option<f64> {
        let warmup = self.config.critic.as_ref().map_or(0, |c| c.warmup);
        (self.state.step >= warmup).then(|| self.lr_schedule.lr(self.state.step))
    }
}

/// Whether a special token is spelled as ends of texts and turns are: `<|im_end|>`, `</s>`, `<|eot_id|>`, ….
fn names_an_end(token: &str) -> bool {
    let token = token.to_lowercase();
    ["end", "eos", "eot", "eom", "/s>", "return", "stop"].iter().any(|part| token.contains(part))
}
