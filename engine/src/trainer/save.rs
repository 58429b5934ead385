//! Checkpoints of a run: the policy, what its optimizer keeps, the critic, where the run stands.
//!
//! An update can ruin the weights, and only the next one shows it, by gradients that are not finite. So while updates
//! are skipped no checkpoint is written, and the one before the newest stays until an update after the newest has been
//! applied.

use super::resume::modules;
use super::saved::Saved;
use super::{CRITIC, Trainer};
use crate::Result;
use crate::checkpoint::{Inputs, RunDir, trainer_state};
use crate::metrics::{Event, Phase};
use firebrick_models::checkpoint::{ExportOptions, StoredDtype, WholeModel};
use std::path::{Path, PathBuf};

impl Trainer {
    /// Writes a checkpoint of the run as it stands after its last step, and removes the oldest beyond
    /// `trainer.max_ckpt_to_keep`. While updates are skipped it does neither.
    pub(super) fn save(&mut self) -> Result<()> {
        let step = self.state.step;
        if self.saved.newest == Some(step) {
            return Ok(());
        }
        if self.skips_updates() {
            tracing::warn!(
                "step {step}: no checkpoint is written, because updates are skipped and the weights may be ruined; \
                 {}",
                self.way_back()
            );
            return Ok(());
        }
        let phase = Phase::SaveCheckpoint;
        let written = self.recovering(phase, Self::write_checkpoint);
        let written = written.map_err(|error| self.failed(phase, step, error));
        let good = if self.newest_works() { self.saved.newest } else { self.saved.good };
        let pruned = written.and_then(|path| self.prune(good).map(|()| path));
        // rank 0 writes; the others continue once it is there
        let path = self.world.together(pruned)?;
        let updates = [self.state.optimizer_steps, self.state.critic_steps];
        self.saved = Saved { newest: Some(step), updates, good, spares: good.is_some() };
        self.recorder.event(Event::Saved { path });
        Ok(())
    }

    /// Removes the oldest checkpoints, not the one of a step.
    fn prune(&self, spared: Option<u64>) -> Result<()> {
        self.recorder.run().prune(self.config.trainer.max_ckpt_to_keep, spared)
    }

    /// Removes the checkpoint that was kept until the newest was known to work, once it is.
    pub(super) fn release_spared(&mut self) -> Result<()> {
        if self.saved.spares && self.newest_works() {
            self.saved.spares = false;
            let pruned = self.prune(None);
            self.world.together(pruned)?;
        }
        Ok(())
    }

    /// Whether updates have been applied after the newest checkpoint, so that its weights gave finite gradients.
    fn newest_works(&self) -> bool {
        let applied = [self.state.optimizer_steps, self.state.critic_steps];
        let [policy, critic] = [0, 1].map(|own| applied[own] > self.saved.updates[own]);
        // while the critic trains by itself the policy is what it was
        let waits = self.critic.is_some() && self.actor_lr().is_none();
        self.saved.newest.is_some() && (policy || waits) && (critic || self.critic.is_none())
    }

    /// Whether the last update of a model was skipped for gradients that were not finite. One that only overflowed
    /// under its loss scale is, where the next, at half the scale, did too.
    fn skips_updates(&self) -> bool {
        !self.skipped_in_a_row.is_empty() || self.overflows_in_a_row.values().any(|&count| count > 1)
    }

    /// Which checkpoint a run can continue from whose weights may be ruined.
    pub(super) fn way_back(&self) -> String {
        let path = |step: u64| self.recorder.run().path().join(RunDir::checkpoint_name(step)).display().to_string();
        match (self.saved.newest, self.saved.good) {
            (Some(newest), _) if self.newest_works() => {
                format!("continue with --resume from the last good checkpoint, {}", path(newest))
            }
            (Some(newest), Some(good)) => format!(
                "the last good checkpoint is {}: delete {}, which may have the same weights, and continue with --resume",
                path(good),
                path(newest)
            ),
            (Some(newest), None) => {
                format!(
                    "start again if --resume fails too: the only checkpoint, {}, may have the same weights",
                    path(newest)
                )
            }
            (None, _) => "start again: no checkpoint was written before".to_owned(),
        }
    }

    /// Writes all files of a checkpoint. What a failed attempt has written is removed by the next.
    fn write_checkpoint(&mut self) -> Result<PathBuf> {
        let (decoder, source, world) = (self.learner.decoder(), &self.source, &self.world);
        // an f32 folder of an f32 model is its own master copy, and so is an adapter
        let masters = decoder.specs().any(|spec| {
            let stored = |name: &str| source.checkpoint.stored_dtype(name);
            let rounds = || spec.tensors().iter().any(|t| stored(&t.name) != StoredDtype::F32);
            spec.trainable && (decoder.arch().precision.is_half() || rounds())
        });
        let name = RunDir::checkpoint_name(self.state.step);
        let run = self.recorder.run();
        world.together(self.keep_modules())?;
        let dir = world.together(run.stage(&name))?;
        let trainer = dir.join("trainer");
        // rank 0 writes models, of which the others give it their parts; then all write their shards into its folders
        world.together(self.write_models(&dir, &trainer))?;
        let optimizer = &self.learner.optimizer;
        trainer_state::save_optimizer(&trainer, optimizer, decoder, masters, world)?;
        if let Some(critic) = &self.critic {
            let (dir, decoder) = (trainer.join(CRITIC), critic.decoder());
            let half = decoder.arch().precision.is_half();
            trainer_state::save_optimizer(&dir, &critic.optimizer, decoder, half, world)?;
        }
        run.complete(&name)
    }

    /// Adds to what the run reads the modules that programs have imported since it began.
    fn keep_modules(&self) -> Result<()> {
        let run = self.recorder.run();
        let kept = if self.world.writes() { Inputs::kept(run)? } else { None };
        let Some(mut inputs) = kept else { return Ok(()) };
        let programs = self.reward_manager.programs(self.progress());
        if inputs.add_modules(modules(&self.config, self.data.task(), &programs))? {
            inputs.keep(run)?;
        }
        Ok(())
    }

    /// Writes the models, and where the run stands: on rank 0, tensor by tensor.
    fn write_models(&self, dir: &Path, trainer: &Path) -> Result<()> {
        self.learner.model.write_whole(|policy| {
            self.source.save(policy, &self.config, dir)?;
            trainer_state::save(trainer, &self.state, policy)
        })?;
        let (Some(critic), Some(source)) = (&self.critic, &self.critic_source) else {
            return Ok(());
        };
        let options = ExportOptions { max_shard_bytes: self.config.trainer.max_shard_bytes };
        let folder = trainer.join(CRITIC);
        let write = |critic: &dyn WholeModel| source.save(critic, &folder, options);
        critic.model.write_whole(write)
    }
}
