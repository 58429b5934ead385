//! Configurations of other engines, read into Firebrick's: verl's YAML and launch scripts, TRL's arguments, `NeMo RL`'s
//! YAML.
//!
//! [`import`] takes the texts of files and gives a configuration with a table that accounts for every key of theirs:
//! what it became here, why the same results need nothing, or why it cannot be done and what to do instead. Nothing is
//! written, and nothing else read but the prompts and the defaults that `NeMo RL`'s files name.
//!
//! What each key becomes stands in tables, one text an engine (`rules/*.txt`, whose language `rules` explains). What a
//! table cannot say is a function: `verl`, `trl`, `nemo`, `grpo_guide`, `common`.

mod account;
mod assembly;
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
mod ways;
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
