//! Work before the first step of a run: a warm-up, the models that start from the policy, the first validation.

use super::Trainer;
use super::models::{Models, REFERENCE, fresh_critic};
use super::recovery::Recovery;
use crate::Result;
use crate::checkpoint::checksums;
use crate::config::Mode;
use crate::metrics::{Event, Phase};
use crate::world::World;
use firebrick_models::checkpoint::{ExportOptions, export};
use std::path::Path;
use std::sync::Arc;

impl Trainer {
    /// Does this work once. A resumed run did it in its first session.
    pub(super) fn begin(&mut self) -> Result<()> {
        if self.started {
            return Ok(());
        }
        self.announce();
        if !self.resumed {
            if self.session.mode == Mode::Rl {
                if let Some(sft) = self.session.config.warmup.sft.clone() {
                    self.warm_up(&sft)?;
                }
                keep_reference(&mut self.recovery)?;
                begin_critic(&mut self.recovery)?;
            }
            if self.session.config.trainer.val_before_train {
                self.validate()?;
                self.new_best()?;
            }
            self.recovery.telemetry.recorder.end_line(0)?;
        }
        self.started = true;
        Ok(())
    }

    /// Sends [`Event::Ready`] to the observer.
    fn announce(&mut self) {
        let Self { session, updater, recovery: run, .. } = self;
        let (prompts, recorder) = (&session.data.prompts, &mut run.telemetry.recorder);
        let [params, trainable] = run.models.policy.decoder().whole_params();
        let ready = Event::Ready {
            predicted_peak_bytes: run.planned.estimate().peak_bytes,
            budget_bytes: run.planned.request.budget,
            device: format!("{} ({})", session.info.device, session.info.name),
            params,
            trainable,
            output: recorder.run.path().to_owned(),
            resumed_from: run.state.step,
            filtered: prompts.filtered + updater.demonstrations.as_ref().map_or(0, |d| d.filtered),
            validation: prompts.validation.len(),
        };
        recorder.event(ready);
    }
}

/// Writes the reference policy into the run folder in full precision, so that a resumed run has the same one.
fn keep_reference(run: &mut Recovery) -> Result<()> {
    if run.models.reference.is_none() {
        return Ok(());
    }
    run.recovering(Phase::SaveCheckpoint, write_reference)
}

fn write_reference(run: &mut Recovery) -> Result<()> {
    let Models { policy, reference, .. } = &mut run.models;
    let Some(reference) = reference else {
        return Ok(());
    };
    if !reference.is_shared_out() {
        policy.model.make_whole()?;
    }
    reference.replace(policy.decoder().clone());
    let tokenizer = &run.session.source.tokenizer;
    let source = run.session.source.checkpoint.clone().stored_as_f32();
    let folder = &run.telemetry.recorder.run;
    let written = policy.model.write_whole(|policy| {
        let write = |dir: &Path| {
            export(policy, &source, Some(tokenizer), dir, ExportOptions::default())?;
            checksums::write(dir, &World::default())
        };
        folder.publish(REFERENCE, write).map(drop)
    });
    run.session.world.agree(written)
}

/// Starts a critic without a checkpoint from the current policy.
fn begin_critic(run: &mut Recovery) -> Result<()> {
    let session = Arc::clone(&run.session);
    let Some(source) = session.critic_source.as_ref().filter(|source| source.follows_policy) else {
        return Ok(());
    };
    run.recovering(Phase::Values, |run| {
        if let (Some(critic), Some(plan)) = (&mut run.models.critic, run.planned.plan.critic()) {
            let decoder = fresh_critic(source, plan, &run.models.policy.model, session.config.trainer.seed)?;
            decoder.check_computed()?;
            critic.model.replace(decoder);
        }
        Ok(())
    })
}
