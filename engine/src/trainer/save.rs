//! Checkpoints of a run: the policy, what its optimizer keeps, the critic, where the run stands.

use super::{CRITIC, Trainer};
use crate::Result;
use crate::checkpoint::{RunDir, trainer_state};
use crate::metrics::{Event, Phase};
use firebrick_models::checkpoint::{ExportOptions, StoredDtype};
use std::path::{Path, PathBuf};

impl Trainer {
    /// Writes a checkpoint of the run as it stands after its last step, and removes the oldest beyond
    /// `trainer.max_ckpt_to_keep`.
    pub(super) fn save(&mut self) -> Result<()> {
        if self.saved == Some(self.state.step) {
            return Ok(());
        }
        let path = self.recovering(Phase::SaveCheckpoint, |t| t.write_checkpoint())?;
        let keep = self.config.trainer.max_ckpt_to_keep;
        self.recorder.run().prune(keep)?;
        self.saved = Some(self.state.step);
        self.recorder.event(Event::Saved { path });
        Ok(())
    }

    /// Writes all files of a checkpoint. What a failed attempt has written is removed by the next.
    fn write_checkpoint(&self) -> Result<PathBuf> {
        let (decoder, source) = (self.learner.decoder(), &self.source);
        // an f32 folder of an f32 model is its own master copy, and so is an adapter
        let masters = decoder.specs().any(|spec| {
            let stored = source.checkpoint.stored_dtype(&spec.name);
            spec.trainable && (decoder.arch().precision.is_half() || stored != StoredDtype::F32)
        });
        let name = RunDir::checkpoint_name(self.state.step);
        self.recorder.run().publish(&name, |dir| {
            source.save(decoder, &self.config, dir)?;
            let trainer = dir.join("trainer");
            let optimizer = &self.learner.optimizer;
            trainer_state::save(&trainer, &self.state, optimizer, decoder, masters)?;
            self.save_critic(&trainer)
        })
    }

    /// Writes the critic and its moments beside the policy's.
    fn save_critic(&self, trainer: &Path) -> Result<()> {
        let (Some(critic), Some(source)) = (&self.critic, &self.critic_source) else {
            return Ok(());
        };
        let dir = trainer.join(CRITIC);
        let options = ExportOptions {
            max_shard_bytes: self.config.trainer.max_shard_bytes,
        };
        source.save(critic.decoder(), &dir, options)?;
        if critic.decoder().arch().precision.is_half() {
            trainer_state::save_masters(&dir, &critic.optimizer, critic.decoder())?;
        }
        trainer_state::save_optimizer(&dir, &critic.optimizer, critic.decoder())
    }
}
