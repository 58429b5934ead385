//! The run folder and its checkpoints: sources of policy and critic, trainer state, inputs.

pub(crate) mod checksums;
mod critic_source;
mod inputs;
mod policy_source;
mod run_dir;
mod run_lock;
mod saved_tensors;
mod sharded;
pub mod trainer_state;

pub use checksums::check_model;
pub use critic_source::{CriticSource, critic_architecture};
pub use inputs::Inputs;
pub use policy_source::{PolicySource, architecture, check_arch, check_ends, tokenizer_of};
pub use run_dir::RunDir;
pub use trainer_state::TrainerState;

use crate::{Error, Result};
use firebrick_spec::file;
use serde::Serialize;
use std::io::{self, ErrorKind};
use std::path::Path;

/// The bytes of a file in a folder, if it exists.
fn read_if_there(folder: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    match file::inside(folder, name).and_then(|path| file::read(&path, file::MAX_TEXT_BYTES)) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("read", folder.join(name))(e)),
    }
}

/// A value as JSON text.
fn json(value: &impl Serialize) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)?)
}

/// The result of an operation on a file or folder that may not exist.
fn if_there(changed: io::Result<()>) -> io::Result<()> {
    changed.or_else(|e| if e.kind() == ErrorKind::NotFound { Ok(()) } else { Err(e) })
}
