//! One module per command.

pub mod bench;
pub mod completions;
pub mod config;
pub mod data;
pub mod devices;
pub mod doctor;
mod dry_run;
pub mod eval;
pub mod generate;
pub mod import;
pub mod logprobs;
pub mod memory;
pub mod new;
pub mod plan;
pub mod replay;
pub mod report;
pub mod train;
pub mod watch;

use crate::arguments::CheckpointArgs;
use firebrick::backends::DeviceSpec;
use firebrick::engine::checkpoint::{check_arch, check_model};
use firebrick::engine::config::RunConfig;
use firebrick::engine::hub::{ModelFiles, model_folder};
use firebrick::models::checkpoint::load_adapter;
use firebrick::models::{Checkpoint, Decoder, Tokenizer};
use std::path::Path;

/// Invalid user input.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UserError(pub String);

/// Loads a configuration with its overrides, and an option's device instead of the file's.
fn load_config(file: &Path, overrides: &[String], device: Option<DeviceSpec>) -> anyhow::Result<RunConfig> {
    let mut config = firebrick::engine::config::load(file, overrides)?;
    config.device = device.unwrap_or(config.device);
    Ok(config)
}

/// A checkpoint with its tokenizer and weights on a device.
pub struct Loaded {
    pub checkpoint: Checkpoint,
    pub tokenizer: Tokenizer,
    pub decoder: Decoder,
}

/// Loads a checkpoint folder, or a model of the Hub, onto a device, quantized and with an adapter if
/// given.
pub fn load(args: &CheckpointArgs, device: DeviceSpec) -> anyhow::Result<Loaded> {
    let dir = model_folder(&args.model, ModelFiles::All)?;
    check_model(&dir)?;
    let checkpoint = Checkpoint::open(&dir)?.with_base(args.base);
    let tokenizer = Tokenizer::from_dir(&dir)?.for_embedding(checkpoint.arch().vocab_size);
    check_arch(checkpoint.arch())?;
    let (device, _) = firebrick::backends::device::open(device)?;
    let decoder = checkpoint.load(&device)?;
    let decoder = match &args.adapter {
        Some(adapter) => {
            let adapter = model_folder(adapter, ModelFiles::All)?;
            check_model(&adapter)?;
            load_adapter(&decoder, &adapter)?
        }
        None => decoder,
    };
    Ok(Loaded { checkpoint, tokenizer, decoder })
}
