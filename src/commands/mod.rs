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
pub mod report;
pub mod train;
pub mod watch;

use firebrick::engine::checkpoint::check_arch;
use firebrick::engine::hub::{ModelFiles, model_folder};
use firebrick::models::checkpoint::load_adapter;
use firebrick::models::{BaseFormat, Checkpoint, Decoder, Tokenizer};
use std::path::Path;

/// Invalid user input.
#[derive(Debug)]
pub struct UserError(pub String);

impl std::fmt::Display for UserError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UserError {}

/// A checkpoint with its tokenizer and weights on a device.
pub struct Loaded {
    pub checkpoint: Checkpoint,
    pub tokenizer: Tokenizer,
    pub decoder: Decoder,
}

/// Loads a checkpoint folder, or a model of the Hub, onto a device, its layers' matrices in few bits where a format is
/// given, and with an adapter beside it where one is.
pub fn load(
    dir: &Path,
    adapter: Option<&Path>,
    base: Option<BaseFormat>,
    device: firebrick::backends::DeviceSpec,
) -> anyhow::Result<Loaded> {
    let dir = model_folder(dir, ModelFiles::All)?;
    let checkpoint = Checkpoint::open(&dir)?.with_base(base);
    let tokenizer = Tokenizer::from_dir(&dir)?.for_embedding(checkpoint.arch().vocab_size);
    check_arch(checkpoint.arch())?;
    let (device, _) = firebrick::backends::device::open(device)?;
    let decoder = checkpoint.load(&device)?;
    let decoder = match adapter {
        Some(adapter) => load_adapter(&decoder, &model_folder(adapter, ModelFiles::All)?)?,
        None => decoder,
    };
    Ok(Loaded { checkpoint, tokenizer, decoder })
}
