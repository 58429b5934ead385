//! Reinforcement learning, one step a page: sample, reward, score, advantages, update.

use super::Trainer;
use crate::Result;
use crate::config::OldLogProbs;
use crate::metrics::{Phase, RolloutReport, StepReport};
use crate::rollout::{Rollout, share_cut_for_nothing};

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
            self.something_left(&rollout)?;
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
        // whatever the objective says, what an environment wrote is not learnt
        rollouts.iter_mut().for_each(Rollout::mask_inserted);
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
                 of them was rewarded; raise rollout.response_length, or ask for shorter answers",
                self.phase_step,
                100.0 * share,
                self.config.rollout.response_length
            );
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
