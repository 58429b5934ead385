//! Converts configurations of other engines: verl's YAML and launch scripts, TRL's arguments, `NeMo RL`'s YAML.
//!
//! [`import`] takes the texts of files and returns a configuration with a table of the outcome of every key: its
//! Firebrick settings, or the reason why it is not needed or not possible, with the alternative. It writes nothing, and
//! reads nothing else but the prompts and defaults that `NeMo RL`'s files name.
//!
//! Tables convert the keys, one text per engine (`rules/*.txt`; `rules` documents their language). Functions convert
//! the rest: `verl`, `trl`, `nemo`, `grpo_guide`, `common`.

#![forbid(unsafe_code)]

mod account;
mod assembly;
mod branches;
mod common;
mod engine;
mod entry;
mod error;
mod facts;
mod grpo_guide;
mod key_mapping;
mod literal;
mod nemo;
mod objective;
mod open;
mod page;
mod pipeline;
mod python;
mod rules;
mod shell;
mod source;
mod source_file;
mod trl;
mod verl;

mod yaml;

pub use account::{Imported, ImportedKey, KeyOutcome, Setting};
pub use assembly::Missing;
pub use engine::Engine;
pub use entry::SourceLocation;
pub use error::ImportError;
pub use pipeline::{Options, import};
pub use source_file::SourceFile;

#[cfg(test)]
mod tests;
