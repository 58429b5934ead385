//! Reinforcement learning, one step a page: sample, reward, score, advantages, update.

use super::Trainer;
use super::non_finite::first_non_finite;
use super::sampler::ensure_nonempty;
use super::scorer::score_values;
use crate::Result;
use crate::metrics::{Phase, RolloutReport, StepReport};
use crate::rollout::Rollout;

impl Trainer {
    /// One RL step.
    pub(super) fn rl_step(&mut self) -> Result<StepReport> {
        let Self { session, sampler, scorer, updater, recovery: run, .. } = self;
        let mut rollout = sampler.roll_out(run, scorer)?;
        let needs = session.objective.needs();
        if needs.greedy {
            let RolloutReport { prompts, rollouts, .. } = &mut rollout;
            let greedy = run.recovering_phase(Phase::GenerateBaseline, |run| sampler.greedy_baselines(run, prompts))?;
            run.phase(Phase::RewardBaseline, |run| scorer.reward_baselines(run, prompts, &greedy, rollouts))?;
            rollout.exclude_lost();
            ensure_nonempty(&rollout, run.step)?;
        }
        let RolloutReport { rollouts, advantages, .. } = &mut rollout;
        if scorer.needs_old_log_probs() {
            run.recovering_phase(Phase::OldLogProbs, |run| scorer.score_old(&run.models, rollouts))?;
        }
        if needs.reference {
            run.recovering_phase(Phase::ReferenceLogProbs, |run| scorer.score_reference(&run.models, rollouts))?;
        }
        if run.models.critic.is_some() {
            run.recovering_phase(Phase::Values, |run| score_values(&run.models, rollouts))?;
        }
        *advantages = run.phase(Phase::Advantages, |run| {
            Ok(session.objective.compute_advantages(rollouts, &mut run.state.coefficients))
        })?;
        // no objective trains on tokens of an environment, or on completions without a reward
        rollouts.iter_mut().for_each(Rollout::mask_inserted);
        rollouts.iter_mut().filter(|r| r.reward.is_none()).for_each(Rollout::leave_out);
        updater.non_finite = first_non_finite(rollouts);
        // no update before all values are written
        run.finish_save()?;
        let mut report = StepReport::default();
        if let Some(lr) = updater.critic_lr(run.state.step) {
            report.critic = Some(run.phase(Phase::UpdateCritic, |run| updater.update_critic(run, rollouts, lr))?);
        }
        if let Some(lr) = updater.actor_lr(run.state.step) {
            report.actor = Some(run.phase(Phase::UpdateActor, |run| updater.update_policy(run, rollouts, lr))?);
        }
        let state = &mut run.state;
        rollout.entropy_coeff = state.coefficients.entropy.as_ref().map(|c| c.coeff);
        state.draws += rollout.prompts.len() as u64;
        state.tokens += rollout.total_tokens() as u64;
        report.rollout = Some(rollout);
        Ok(report)
    }
}
