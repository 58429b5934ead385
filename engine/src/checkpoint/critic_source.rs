//! Where a critic's weights come from, and the folder that keeps them.

use crate::checkpoint::PolicySource;
use crate::checkpoint::policy_source::checkpoint_of;
use crate::config::{CriticConfig, RunConfig};
use crate::hub::{ModelFiles, model_folder};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_models::checkpoint::{ExportOptions, WholeModel, export};
use firebrick_models::decoder::RankPart;
use firebrick_models::{Arch, Checkpoint, Decoder};
use std::path::Path;

/// Folder of the critic's weights, under the trainer's part of a checkpoint.
const MODEL: &str = "model";

/// What a critic starts from and is written as.
#[derive(Clone, Debug)]
pub struct CriticSource {
    checkpoint: Checkpoint,
    /// Whether the checkpoint is the policy's.
    is_policys: bool,
}

impl CriticSource {
    /// Reads what the configuration says of the critic, and refuses one that cannot score the policy's completions.
    /// `files` are those of a model of the Hub that are wanted: without its weights it can be planned, not loaded.
    ///
    /// # Errors
    /// `Error::Config` for a vocabulary or a context that is too small; `Error::Model` and `Error::Hub` where the
    /// folder cannot be read or fetched.
    pub fn open(config: &RunConfig, critic: &CriticConfig, policy: &PolicySource, files: ModelFiles) -> Result<Self> {
        let Some(path) = &critic.model.path else {
            return Ok(Self { checkpoint: policy.checkpoint.clone(), is_policys: true });
        };
        let checkpoint = checkpoint_of(path, files)?.in_precision(config.precision);
        let arch = checkpoint.arch();
        let vocabulary = policy.tokenizer.vocab_size();
        if arch.vocab_size < vocabulary {
            return Err(Error::Config(format!(
                "critic.model.path: its embedding has {} rows (vocab_size), but the policy's tokenizer has {vocabulary} \
                 tokens; policy and critic must use the same tokenizer",
                arch.vocab_size
            )));
        }
        let length = config.rollout.prompt_length + config.rollout.response_length;
        if arch.context().is_some_and(|context| length > context) {
            return Err(Error::Config(format!(
                "critic.model.path: its context is {} (max_position_embeddings), but rollout.prompt_length + \
                 rollout.response_length is {length}",
                arch.max_positions
            )));
        }
        Ok(Self { checkpoint, is_policys: false })
    }

    /// This rank's `part` of the critic of a run that begins with this policy: all of its weights are trained, so one
    /// that starts from a policy with a base in few bits has what that is widened to, in the run's precision. Where it
    /// starts from the policy, all ranks of the run call it together.
    ///
    /// # Errors
    /// `Error::Model` where weights cannot be loaded; those of `policy`'s rows.
    pub fn start(&self, policy: &dyn WholeModel, part: RankPart<'_>, seed: u64) -> Result<Decoder> {
        let decoder = policy.decoder();
        Ok(if self.is_policys {
            decoder.part_with_value_head(part, seed, |index, rows| policy.rows(index, rows))?
        } else {
            let (own, device) = (&self.checkpoint, decoder.device());
            own.load_with_value_head(part, seed, device)?
        })
    }

    /// Whether it starts from the policy, as that is before the first RL step.
    #[must_use]
    pub fn follows_policy(&self) -> bool {
        self.is_policys
    }

    /// The critic's architecture.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.checkpoint.arch().clone().with_value_head()
    }

    /// Writes a critic into a folder, in full precision.
    ///
    /// # Errors
    /// `Error::Io` where the folder cannot be made, `Error::Model` where weights cannot be written or read from the
    /// device.
    pub fn save(&self, critic: &dyn WholeModel, dir: &Path, options: ExportOptions) -> Result<()> {
        let dir = dir.join(MODEL);
        std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
        let as_critic = self.checkpoint.clone().with_value_head();
        Ok(export(critic, &as_critic, None, &dir, options)?)
    }

    /// The critic of a folder that [`save`](Self::save) wrote, or a rank's part of it.
    ///
    /// # Errors
    /// `Error::Model` where the folder cannot be loaded.
    pub fn saved(&self, dir: &Path, part: RankPart<'_>, device: &Device) -> Result<Decoder> {
        // a critic has no base in few bits
        let precision = self.checkpoint.arch().precision;
        let saved = Checkpoint::open(&dir.join(MODEL))?.in_precision(precision);
        Ok(saved.load_part(part, device)?)
    }
}

/// The architecture of a run's critic, given the policy's: from its `config.json` alone.
///
/// # Errors
/// `Error::Model` and `Error::Hub` where the folder or its `config.json` cannot be read.
pub fn critic_architecture(critic: &CriticConfig, policy: &Arch) -> Result<Arch> {
    let own = match &critic.model.path {
        Some(path) => Checkpoint::architecture(&model_folder(path, ModelFiles::Config)?)?,
        None => policy.clone(),
    };
    Ok(own.with_value_head().in_precision(policy.precision))
}
