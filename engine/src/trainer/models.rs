//! The models beside the policy: the reference policy and the critic of a run that begins, or of the one that is resumed.

use super::{CRITIC, Trainer};
use crate::Result;
use crate::checkpoint::trainer_state::{self, TrainerState};
use crate::checkpoint::{CriticSource, RunDir};
use crate::config::{Mode, RunConfig};
use crate::executor::ResidentModel;
use crate::learner::Learner;
use crate::plan::{Plan, Role};
use firebrick_models::{Checkpoint, Decoder};
use std::path::Path;
use std::sync::Arc;

/// Folder of the reference policy in the run folder.
const REFERENCE: &str = "reference";

/// The policy with a value head, where the critic shares its trunk, and how fast that head learns beside it.
pub(super) fn with_shared_critic(
    policy: Decoder,
    config: &RunConfig,
    mode: Mode,
) -> (Decoder, f64) {
    match config.shared_critic().filter(|_| mode == Mode::Rl) {
        Some(critic) => (
            policy.with_joint_value_head(config.trainer.seed),
            critic.value_rate(&config.optim),
        ),
        None => (policy, 1.0),
    }
}

/// The reference policy: the policy as it is, or the one that a resumed run keeps in its folder.
pub(super) fn reference(
    plan: &Plan,
    learner: &Learner,
    run: &RunDir,
    resumed: bool,
) -> Result<Option<ResidentModel>> {
    let Some(own) = plan.reference() else {
        return Ok(None);
    };
    let runtime = &learner.runtime;
    let decoder = if resumed {
        Checkpoint::open(&run.path().join(REFERENCE))?
            .in_precision(learner.decoder().arch().precision)
            .load(runtime.device())?
    } else {
        learner.decoder().clone()
    };
    let (own, accounts) = (own.clone(), &runtime.accounts);
    Ok(Some(ResidentModel::new(
        decoder,
        own,
        Role::Reference,
        accounts,
    )))
}

/// The critic of a run that begins, or the one of the checkpoint that it goes on from.
pub(super) fn critic(
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
    /// Keeps the reference policy with the run, in full precision, so that a resumed run compares with the same one.
    pub(super) fn keep_reference(&mut self) -> Result<()> {
        let Some(reference) = &mut self.reference else {
            return Ok(());
        };
        reference.replace(self.learner.decoder().clone());
        let (decoder, tokenizer) = (self.learner.decoder(), &self.source.tokenizer);
        let source = self.source.checkpoint.clone().stored_as_f32();
        self.run.publish(REFERENCE, |dir| {
            let options = firebrick_models::checkpoint::ExportOptions::default();
            Ok(firebrick_models::checkpoint::export(
                decoder,
                &source,
                Some(tokenizer),
                dir,
                options,
            )?)
        })?;
        Ok(())
    }

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
}
