//! Checkpoints of a run: the policy, what its optimizer keeps, the critic, where the run stands.
//!
//! An update can ruin the weights, and only the next one shows it, by gradients that are not finite. So while updates
//! are skipped no checkpoint is written, and the one before the newest stays until an update after the newest has been
//! applied.

use super::recovery::Recovery;
use super::scorer::Scorer;
use super::session::{Session, modules};
use super::{CRITIC, Trainer};
use crate::Result;
use crate::checkpoint::{Inputs, RunDir, TrainerState, trainer_state};
use crate::metrics::{Event, Phase};
use crate::world::World;
use firebrick_models::checkpoint::{ExportOptions, StoredDtype, WholeModel};
use std::path::{Path, PathBuf};

/// The newest checkpoints of a run, and which of them are known to work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checkpoints {
    /// The step of the newest.
    newest: Option<u64>,
    /// Applied optimizer steps in it, of the policy and of the critic.
    updates: [u64; 2],
    /// The step of the newest one before it that was continued from, so that its weights are known to work.
    good: Option<u64>,
    /// Whether that one may be beyond the number of those to keep.
    spares: bool,
}

impl Checkpoints {
    /// The checkpoints that a session finds which continues from a state, as rank 0 sees them.
    pub fn at_start(run: &RunDir, world: &World, resumed: Option<&TrainerState>) -> Result<Self> {
        let Some(state) = resumed else {
            return Ok(Self::default());
        };
        let found = run.checkpoints()?;
        let earlier = found.iter().rev().map(|(step, _)| *step).find(|step| *step < state.step);
        let good = world.of_main(earlier)?;
        let updates = [state.optimizer_steps, state.critic_steps];
        Ok(Self { newest: Some(state.step), updates, good, spares: false })
    }
}

impl Recovery {
    /// Removes the oldest checkpoints, not the one of a step.
    fn prune(&self, spared: Option<u64>) -> Result<()> {
        self.telemetry.recorder.run().prune(self.session.config.trainer.max_ckpt_to_keep, spared)
    }

    /// Removes the checkpoint that was kept until the newest was known to work, once it is.
    pub fn release_spared(&mut self, state: &TrainerState) -> Result<()> {
        if self.checkpoints.spares && self.newest_works(state) {
            self.checkpoints.spares = false;
            self.session.world.together(self.prune(None))?;
        }
        Ok(())
    }

    /// Whether updates have been applied after the newest checkpoint, so that its weights gave finite gradients.
    fn newest_works(&self, state: &TrainerState) -> bool {
        let Checkpoints { newest, updates, .. } = self.checkpoints;
        let [policy, critic] = [state.optimizer_steps > updates[0], state.critic_steps > updates[1]];
        let has_critic = self.models.critic.is_some();
        // while the critic trains by itself the policy is what it was
        let waits = has_critic && !self.session.trains_policy(state.step);
        newest.is_some() && (policy || waits) && (critic || !has_critic)
    }

    /// Which checkpoint a run can continue from whose weights may be ruined.
    pub fn way_back(&self, state: &TrainerState) -> String {
        let run = self.telemetry.recorder.run().path();
        let path = |step: u64| run.join(RunDir::checkpoint_name(step)).display().to_string();
        match (self.checkpoints.newest, self.checkpoints.good) {
            (Some(newest), _) if self.newest_works(state) => {
                format!("continue with --resume from the last good checkpoint, {}", path(newest))
            }
            (Some(newest), Some(good)) => format!(
                "the last good checkpoint is {}: delete {}, which may have the same weights, and continue with --resume",
                path(good),
                path(newest)
            ),
            (Some(newest), None) => format!(
                "start again if --resume fails too: the only checkpoint, {}, may have the same weights",
                path(newest)
            ),
            (None, _) => "start again: no checkpoint was written before".to_owned(),
        }
    }
}

impl Trainer {
    /// Writes a checkpoint of the run as it stands after its last step, and removes the oldest beyond
    /// `trainer.max_ckpt_to_keep`. While updates are skipped it does neither.
    pub(super) fn save(&mut self) -> Result<()> {
        let Self { session, scorer, updater, recovery: run, state, .. } = self;
        let (step, newest) = (state.step, run.checkpoints.newest);
        if newest == Some(step) {
            return Ok(());
        }
        if updater.skips_updates() {
            tracing::warn!(
                "step {step}: no checkpoint is written, because updates are skipped and the weights may be ruined; \
                 {}",
                run.way_back(state)
            );
            return Ok(());
        }
        let phase = Phase::SaveCheckpoint;
        let written = run.recovering(phase, |run| write_checkpoint(run, scorer, state));
        let written = written.map_err(|error| run.failed(phase, step, error));
        let good = if run.newest_works(state) { newest } else { run.checkpoints.good };
        let pruned = written.and_then(|path| run.prune(good).map(|()| path));
        // rank 0 writes; the others continue once it is there
        let path = session.world.together(pruned)?;
        let updates = [state.optimizer_steps, state.critic_steps];
        run.checkpoints = Checkpoints { newest: Some(step), updates, good, spares: good.is_some() };
        run.telemetry.recorder.event(Event::Saved { path });
        Ok(())
    }
}

/// Writes all files of a checkpoint. What a failed attempt has written is removed by the next.
fn write_checkpoint(run: &Recovery, scorer: &Scorer, state: &TrainerState) -> Result<PathBuf> {
    let (policy, Session { source, world, .. }) = (&run.models.policy, run.session.as_ref());
    let decoder = policy.decoder();
    // an f32 folder of an f32 model is its own master copy, and so is an adapter
    let masters = decoder.specs().any(|spec| {
        let stored = |name: &str| source.checkpoint.stored_dtype(name);
        let rounds = || spec.tensors().iter().any(|t| stored(&t.name) != StoredDtype::F32);
        spec.trainable && (decoder.arch().precision.is_half() || rounds())
    });
    let name = RunDir::checkpoint_name(state.step);
    let folder = run.telemetry.recorder.run();
    world.together(keep_modules(run, scorer, state))?;
    let dir = world.together(folder.stage(&name))?;
    let trainer = dir.join("trainer");
    // rank 0 writes models, of which the others give it their parts; then all write their shards into its folders
    world.together(write_models(run, state, &dir, &trainer))?;
    trainer_state::save_optimizer(&trainer, &policy.optimizer, decoder, masters, world)?;
    if let Some(critic) = &run.models.critic {
        let (dir, decoder) = (trainer.join(CRITIC), critic.decoder());
        let half = decoder.arch().precision.is_half();
        trainer_state::save_optimizer(&dir, &critic.optimizer, decoder, half, world)?;
    }
    folder.complete(&name)
}

/// Adds to what the run reads the modules that programs have imported since it began.
fn keep_modules(run: &Recovery, scorer: &Scorer, state: &TrainerState) -> Result<()> {
    let (session, folder) = (&run.session, run.telemetry.recorder.run());
    let kept = if session.world.writes() { Inputs::kept(folder)? } else { None };
    let Some(mut inputs) = kept else { return Ok(()) };
    let programs = scorer.programs(state);
    if inputs.add_modules(modules(&session.config, session.data.prompts.task(), &programs))? {
        inputs.keep(folder)?;
    }
    Ok(())
}

/// Writes the models, and where the run stands: on rank 0, tensor by tensor.
fn write_models(run: &Recovery, state: &TrainerState, dir: &Path, trainer: &Path) -> Result<()> {
    let Session { config, source, critic_source, .. } = run.session.as_ref();
    run.models.policy.model.write_whole(|policy| {
        source.save(policy, config, dir)?;
        trainer_state::save(trainer, state, policy)
    })?;
    let (Some(critic), Some(source)) = (&run.models.critic, critic_source) else {
        return Ok(());
    };
    let options = ExportOptions { max_shard_bytes: config.trainer.max_shard_bytes };
    let folder = trainer.join(CRITIC);
    let write = |critic: &dyn WholeModel| source.save(critic, &folder, options);
    critic.model.write_whole(write)
}
