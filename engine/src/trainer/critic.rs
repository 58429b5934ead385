//! The critic's part of a step: values before credit, its own update after it.

use super::rl::{bare, sequence, spread};
use super::update::{UPDATE_CRITIC, UpdateSums};
use super::{CRITIC, Metrics, Trainer};
use crate::Result;
use crate::batch::Sequence;
use crate::config::{CriticConfig, RunConfig};
use crate::critic::CriticSource;
use crate::learner::Learner;
use crate::objective::gae::explained_variance;
use crate::objective::value::ValueLoss;
use crate::plan::{Plan, Role};
use crate::rollout::Rollout;
use crate::trainer_state::{self, TrainerState};
use std::path::Path;
use std::sync::Arc;

/// The critic of a run that begins, or the one of the checkpoint that it goes on from.
pub(super) fn begin(
    config: &RunConfig,
    source: Option<&CriticSource>,
    plan: &Plan,
    policy: &Learner,
    resumed: Option<(&Path, &TrainerState)>,
) -> Result<Option<Learner>> {
    let (Some(own), Some(source), Some(plan)) = (config.own_critic(), source, plan.critic()) else {
        return Ok(None);
    };
    let learner = |decoder| {
        let runtime = Arc::clone(&policy.runtime);
        let (plan, optim) = (plan.clone(), own.optim.clone());
        Learner::for_role(Role::Critic, decoder, plan, optim, runtime)
    };
    let Some((step, state)) = resumed else {
        let fresh = source.start(policy.decoder(), config.trainer.seed)?;
        return Ok(Some(learner(fresh)));
    };
    let dir = step.join("trainer").join(CRITIC);
    let mut critic = learner(source.saved(&dir, policy.decoder().device())?);
    let Learner {
        model, optimizer, ..
    } = &mut critic;
    trainer_state::load_masters(&dir, &mut model.decoder, optimizer)?;
    optimizer.set_scaler(state.critic_loss_scale);
    trainer_state::load_optimizer(&dir, state.critic_steps, &model.decoder, optimizer)?;
    Ok(Some(critic))
}

impl Trainer {
    /// The critic starts from the policy as it is now, where it has no checkpoint of its own. Nothing of it has been trained yet.
    pub(super) fn begin_critic(&mut self) -> Result<()> {
        let seed = self.config.trainer.seed;
        if let (Some(critic), Some(source)) = (&mut self.critic, &self.critic_source)
            && source.follows_policy()
        {
            let decoder = source.start(self.learner.decoder(), seed)?;
            critic.model.replace(decoder);
        }
        Ok(())
    }

    /// The critic and its settings, in a phase that only a run with a critic has.
    fn critic(&mut self) -> (&mut Learner, &CriticConfig) {
        match (&mut self.critic, &self.config.critic) {
            (Some(critic), Some(config)) => (critic, config),
            _ => unreachable!("a phase of the critic"),
        }
    }

    /// Values of the states that completion tokens were drawn in.
    pub(super) fn score_values(&mut self, rollouts: &mut [Rollout]) -> Result<()> {
        let (critic, _) = self.critic();
        let values = critic.values(&bare(rollouts))?;
        for (rollout, values) in rollouts.iter_mut().zip(values) {
            rollout.values = values;
        }
        Ok(())
    }

    /// Epochs and mini-batches over a step's rollouts: one optimizer step of the critic each.
    pub(super) fn update_critic(&mut self, rollouts: &[Rollout], lr: f64) -> Result<UpdateSums> {
        let mut sums = UpdateSums::of_critic();
        let longest = self.config.rollout.response_length;
        let loss = self.critic().1.loss();
        for epoch in 0..self.config.update.ppo_epochs {
            for mini in self.minibatches(rollouts, epoch) {
                let mut sequences: Vec<Sequence> = mini.iter().map(|r| sequence(r)).collect();
                let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
                let weights = self.critic().1.weights(&lengths, longest);
                for (sequence, weights) in sequences.iter_mut().zip(weights) {
                    sequence.weights = weights;
                }
                self.critic_step(&sequences, loss, lr, &mut sums)?;
            }
        }
        Ok(sums)
    }

    /// One optimizer step of the critic: applied, or skipped with a word.
    fn critic_step(
        &mut self,
        sequences: &[Sequence],
        loss: ValueLoss,
        lr: f64,
        into: &mut UpdateSums,
    ) -> Result<()> {
        let gradients = self.recovering(UPDATE_CRITIC, |t| {
            t.critic().0.accumulate(sequences, 1.0, loss, lr)
        })?;
        let updated = self.critic().0.apply(gradients, lr)?;
        self.check_after(UPDATE_CRITIC)?;
        self.concluded(UPDATE_CRITIC, updated, into)?;
        let (critic, _) = self.critic();
        let optimizer = &critic.optimizer;
        (self.state.critic_steps, self.state.critic_loss_scale) =
            (optimizer.steps(), optimizer.scaler());
        Ok(())
    }

    /// The critic's rate in the step at hand, where there is one.
    pub(super) fn critic_lr(&self) -> Result<Option<f64>> {
        let Some(critic) = self
            .config
            .critic
            .as_ref()
            .filter(|_| self.critic.is_some())
        else {
            return Ok(None);
        };
        let (optim, steps) = (&critic.optim, self.config.trainer.steps);
        let schedule = optim.lr_scheduler.build(optim.lr, steps)?;
        Ok(Some(schedule.lr(self.state.step)))
    }

    /// Whether the policy is updated in the step at hand, or the critic alone.
    pub(super) fn updates_policy(&self) -> bool {
        let warmup = self.config.critic.as_ref().map_or(0, |c| c.warmup);
        self.state.step >= warmup
    }
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
