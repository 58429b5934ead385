//! Source of a critic's weights, and their folder in a checkpoint.

use crate::checkpoint::PolicySource;
use crate::checkpoint::policy_source::checkpoint_of;
use crate::config::{CriticConfig, RunConfig};
use crate::hub::{ModelFiles, model_folder};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::host::create_folder;
use firebrick_models::checkpoint::{ExportOptions, WholeModel, export};
use firebrick_models::decoder::RankShard;
use firebrick_models::{Arch, Checkpoint, Decoder};
use std::path::Path;

/// Folder of the critic's weights, under the trainer's part of a checkpoint.
const MODEL: &str = "model";

/// Source and format of a critic's weights.
#[derive(Clone, Debug)]
pub struct CriticSource {
    checkpoint: Checkpoint,
    /// True if the critic starts from the policy before the first RL step.
    pub follows_policy: bool,
}

impl CriticSource {
    /// Opens the configured critic, and rejects one that cannot score the policy's completions. `files` are the files
    /// to fetch of a model of the Hub: without weights it can be planned, not loaded.
    ///
    /// # Errors
    /// `Error::Config` for a too small vocabulary or context; `Error::Model` and `Error::Hub` if the folder cannot be
    /// read or fetched.
    pub fn open(config: &RunConfig, critic: &CriticConfig, policy: &PolicySource, files: ModelFiles) -> Result<Self> {
        let Some(path) = &critic.model.path else {
            return Ok(Self { checkpoint: policy.checkpoint.clone(), follows_policy: true });
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
        Ok(Self { checkpoint, follows_policy: false })
    }

    /// This rank's `part` of the initial critic, given the initial policy. All of its weights are trained, so a critic
    /// that starts from a policy with a quantized base has dequantized weights, in the run's precision. All ranks call
    /// it together if it starts from the policy.
    ///
    /// # Errors
    /// `Error::Model` if weights cannot be loaded; those of `policy`'s rows.
    pub fn start(&self, policy: &dyn WholeModel, part: RankShard<'_>, seed: u64) -> Result<Decoder> {
        let decoder = policy.decoder();
        Ok(if self.follows_policy {
            decoder.shard_with_value_head(part, seed, |index, rows| policy.rows(index, rows))?
        } else {
            self.checkpoint.load_with_value_head(part, seed, decoder.device())?
        })
    }

    /// The critic's architecture.
    pub fn arch(&self) -> Arch {
        self.checkpoint.arch().clone().with_value_head()
    }

    /// Writes a critic into a folder, in full precision.
    ///
    /// # Errors
    /// `Error::Io` if the folder cannot be created, `Error::Model` if weights cannot be written or read from the
    /// device.
    pub fn save(&self, critic: &dyn WholeModel, dir: &Path, options: ExportOptions) -> Result<()> {
        let model = dir.join(MODEL);
        for dir in [dir, &model] {
            create_folder(dir).map_err(Error::io("create", dir))?;
        }
        let as_critic = self.checkpoint.clone().with_value_head();
        Ok(export(critic, &as_critic, None, &model, options)?)
    }

    /// The critic, or a rank's part of it, from a folder written by [`save`](Self::save).
    ///
    /// # Errors
    /// `Error::Model` if the folder cannot be loaded.
    pub fn saved(&self, dir: &Path, part: RankShard<'_>, device: &Device) -> Result<Decoder> {
        // a critic has no quantized base
        let precision = self.checkpoint.arch().precision;
        let saved = Checkpoint::open(&dir.join(MODEL))?.in_precision(precision);
        Ok(saved.load_shard(part, device)?)
    }
}

/// Architecture of a run's critic, given the policy's, from its `config.json`.
///
/// # Errors
/// `Error::Model` and `Error::Hub` if the folder or its `config.json` cannot be read.
pub fn critic_architecture(critic: &CriticConfig, policy: &Arch) -> Result<Arch> {
    let arch = match &critic.model.path {
        Some(path) => Checkpoint::architecture(&model_folder(path, ModelFiles::Config)?)?,
        None => policy.clone(),
    };
    Ok(arch.with_value_head().in_precision(policy.precision))
}
