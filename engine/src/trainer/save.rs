//! Checkpoints of a run: policy, optimizer state, critic, trainer state.
//!
//! A thread writes a checkpoint while the next step samples and scores, if the plan allows it: weights and optimizer
//! state change only in the updates, before which the run waits for it.
//!
//! An update can ruin the weights, which only the next one shows by NaN or infinite numbers. So no checkpoint is written
//! while updates are skipped, and the one before the newest stays until an update after the newest was applied.

mod snapshot;

use super::Trainer;
use super::models::CRITIC;
use super::recovery::{Checkpoints, Recovery};
use super::scorer::Scorer;
use super::session::Session;
use super::session::resume::modules;
use crate::Result;
use crate::checkpoint::{Inputs, RunDir, TrainerState, checksums, trainer_state};
use crate::config::Mode;
use crate::executor::ResidentModel;
use crate::metrics::{Event, Phase};
use crate::optim::AdamW;
use firebrick_models::checkpoint::{ExportOptions, StoredDtype};
use snapshot::{PendingSave, Snapshot};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Checkpoints under way, and times of those that are complete.
#[derive(Default)]
pub(super) struct Saves {
    /// True if the run takes all steps itself: a caller that takes them finds the checkpoint after each.
    pub beside_steps: bool,
    pending: Option<PendingSave>,
    /// Start and end of the last one.
    last: Option<[Instant; 2]>,
    /// Time that the run has waited for checkpoints since a step reported it.
    pub waited: Option<Duration>,
}

impl Saves {
    fn add_wait(&mut self, since: Instant) {
        *self.waited.get_or_insert_default() += since.elapsed();
    }
}

/// A checkpoint that was written.
struct Written {
    path: PathBuf,
    ended: Instant,
}

impl Trainer {
    /// Writes a checkpoint of the finished step and removes the oldest beyond `trainer.max_ckpt_to_keep`. While updates
    /// are skipped it does neither.
    pub(super) fn save(&mut self) -> Result<()> {
        self.finish_save()?;
        if self.has_saved() {
            return Ok(());
        }
        let (run, scorer, began) = (&mut self.recovery, &self.scorer, Instant::now());
        let written = run.recovering(Phase::SaveCheckpoint, |run| {
            keep_inputs(run, scorer)?;
            let path = Files::of(run).write()?;
            Ok(Written { path, ended: Instant::now() })
        });
        run.saves.add_wait(began);
        run.complete_save(began, written)?;
        self.add_save_time();
        Ok(())
    }

    /// Starts a checkpoint that the next step's updates wait for, or writes it if the plan has no room for that.
    pub(super) fn save_beside(&mut self) -> Result<()> {
        let run = &self.recovery;
        let is_before_step = run.saves.beside_steps && run.state.step < self.session.steps;
        let samples = self.session.mode == Mode::Rl && self.session.world.is_solo();
        if !(is_before_step && samples && run.planned.estimate().saves_beside) {
            return self.save();
        }
        self.finish_save()?;
        if self.has_saved() {
            return Ok(());
        }
        let Some(snapshot) = Snapshot::of(&self.recovery) else { return self.save() };
        let (run, began) = (&mut self.recovery, Instant::now());
        keep_inputs(run, &self.scorer)?;
        match PendingSave::start(snapshot, began) {
            Ok(pending) => run.saves.pending = Some(pending),
            Err(error) => {
                tracing::warn!("cannot start a thread for the checkpoint ({error}); the run waits for it");
                return self.save();
            }
        }
        run.saves.add_wait(began);
        Ok(())
    }

    /// Waits for the checkpoint under way.
    pub(super) fn finish_save(&mut self) -> Result<()> {
        self.recovery.finish_save()?;
        self.add_save_time();
        Ok(())
    }

    /// Adds the times of the last checkpoint to the session's.
    pub(super) fn add_save_time(&mut self) {
        if let Some([began, ended]) = self.recovery.saves.last.take() {
            self.times.add_save(began, ended);
        }
    }

    /// Returns true if the finished step has a checkpoint or gets none, because updates are skipped.
    fn has_saved(&self) -> bool {
        let (run, step) = (&self.recovery, self.recovery.state.step);
        let is_newest = run.checkpoints.newest == Some(step);
        let is_skipped = !is_newest && self.updater.skips_updates();
        if is_skipped {
            tracing::warn!(
                "step {step}: no checkpoint is written, because updates are skipped and the weights may be ruined; \
                 {}",
                run.resume_advice()
            );
        }
        is_newest || is_skipped
    }
}

impl Recovery {
    /// Waits for the checkpoint under way, if there is one: before weights change, or move.
    pub fn finish_save(&mut self) -> Result<()> {
        let Some(pending) = self.saves.pending.take() else { return Ok(()) };
        let (began, waits) = (pending.began, Instant::now());
        let written = pending.wait();
        self.saves.add_wait(waits);
        self.complete_save(began, written)
    }

    /// Takes a checkpoint that was written for the newest one, and removes the oldest.
    fn complete_save(&mut self, began: Instant, written: Result<Written>) -> Result<()> {
        let (step, newest) = (self.state.step, self.checkpoints.newest);
        let written = written.map_err(|error| self.failed(Phase::SaveCheckpoint, step, error));
        let good = if self.newest_works() { newest } else { self.checkpoints.good };
        let pruned = written.and_then(|written| {
            if self.state.best.as_ref().is_some_and(|best| best.step == step) {
                self.telemetry.recorder.best(self.state.best.as_ref())?;
            }
            self.prune(good).map(|()| written)
        });
        // rank 0 writes; the others continue once it is there
        let Written { path, ended } = self.session.world.agree(pruned)?;
        let updates = [self.state.optimizer_steps, self.state.critic_steps];
        self.checkpoints = Checkpoints { newest: Some(step), updates, good, spares: good.is_some() };
        self.saves.last = Some([began, ended]);
        self.telemetry.recorder.event(Event::Saved { path });
        Ok(())
    }
}

/// Model and optimizer of a learner.
type Trained<'a> = (&'a ResidentModel, &'a AdamW);

/// Sources of a checkpoint's files.
struct Files<'a> {
    session: &'a Session,
    folder: &'a RunDir,
    state: &'a TrainerState,
    policy: Trained<'a>,
    critic: Option<Trained<'a>>,
}

impl<'a> Files<'a> {
    /// A run's models and state.
    fn of(run: &'a Recovery) -> Self {
        let models = &run.models;
        Self {
            session: &run.session,
            folder: &run.telemetry.recorder.run,
            state: &run.state,
            policy: (&models.policy.model, &models.policy.optimizer),
            critic: models.critic.as_ref().map(|critic| (&critic.model, &critic.optimizer)),
        }
    }

    /// Writes all files of a checkpoint. The next attempt removes the files of a failed one.
    fn write(&self) -> Result<PathBuf> {
        let (Session { source, world, .. }, (policy, optimizer)) = (self.session, self.policy);
        let decoder = &policy.decoder;
        // an f32 folder of an f32 model is its own master copy, and so is an adapter
        let masters = decoder.specs().any(|spec| {
            let stored = |name: &str| source.checkpoint.stored_dtype(name);
            let rounds = || spec.tensors().iter().any(|t| stored(&t.name) != StoredDtype::F32);
            spec.trainable && (decoder.arch().precision.is_half() || rounds())
        });
        let name = RunDir::checkpoint_name(self.state.step);
        let dir = world.agree(self.folder.stage(&name))?;
        let trainer = dir.join("trainer");
        // rank 0 writes models, of which the others give it their parts; then all write their shards into its folders
        world.agree(self.write_models(&dir, &trainer))?;
        trainer_state::save_optimizer(&trainer, optimizer, decoder, masters, world)?;
        if let Some((critic, optimizer)) = self.critic {
            let (dir, decoder) = (trainer.join(CRITIC), &critic.decoder);
            let half = decoder.arch().precision.is_half();
            trainer_state::save_optimizer(&dir, optimizer, decoder, half, world)?;
        }
        checksums::write(&dir, world)?;
        self.folder.complete(&name)
    }

    /// Writes models and trainer state, on rank 0, tensor by tensor.
    fn write_models(&self, dir: &Path, trainer: &Path) -> Result<()> {
        let Session { config, source, critic_source, .. } = self.session;
        self.policy.0.write_whole(|policy| {
            source.save(policy, config, dir)?;
            trainer_state::save(trainer, self.state, policy)
        })?;
        let (Some((critic, _)), Some(source)) = (self.critic, critic_source) else {
            return Ok(());
        };
        let options = ExportOptions { max_shard_bytes: config.trainer.max_shard_bytes };
        critic.write_whole(|critic| source.save(critic, &trainer.join(CRITIC), options))
    }
}

/// Adds the modules that programs have imported since the start to the inputs of the run.
fn keep_inputs(run: &Recovery, scorer: &Scorer) -> Result<()> {
    let (session, folder) = (&run.session, &run.telemetry.recorder.run);
    let keep = || {
        let kept = if session.world.writes() { Inputs::kept(folder)? } else { None };
        let Some(mut inputs) = kept else { return Ok(()) };
        let programs = scorer.programs(&run.state);
        if inputs.add_modules(modules(&session.config, session.data.prompts.task(), &programs))? {
            inputs.keep(folder)?;
        }
        Ok(())
    };
    session.world.agree(keep())
}
