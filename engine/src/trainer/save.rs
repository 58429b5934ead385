//! Checkpoints of a run: the policy, what its optimizer keeps, the critic, where the run stands.

use super::{CRITIC, Trainer};
use crate::Result;
use crate::checkpoint::{RunDir, trainer_state};
use crate::metrics::{Event, Phase};
use firebrick_models::checkpoint::{ExportOptions, StoredDtype, WholeModel};
use std::path::{Path, PathBuf};

impl Trainer {
    /// Writes a checkpoint of the run as it stands after its last step, and removes the oldest beyond
    /// `trainer.max_ckpt_to_keep`.
    pub(super) fn save(&mut self) -> Result<()> {
        if self.saved == Some(self.state.step) {
            return Ok(());
        }
        let phase = Phase::SaveCheckpoint;
        let written = self.recovering(phase, Self::write_checkpoint);
        let written = written.map_err(|error| self.failed(phase, self.state.step, error));
        let keep = self.config.trainer.max_ckpt_to_keep;
        let pruned = written.and_then(|path| self.recorder.run().prune(keep).map(|()| path));
        // rank 0 writes; the others continue once it is there
        let path = self.world.together(pruned)?;
        self.saved = Some(self.state.step);
        self.recorder.event(Event::Saved { path });
        Ok(())
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
