//! The `model` section.

use super::lora::LoraSettings;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The policy: a checkpoint, or a random start.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A Hugging Face checkpoint folder.
    pub path: Option<PathBuf>,
    /// Instead of `path`: the config of a model that starts from random weights, under transformers' names
    /// (`model_type`, `hidden_size`, …). `vocab_size` follows the tokenizer.
    pub arch: Option<Map<String, Value>>,
    /// With `arch`: a folder with tokenizer files. Without it, one token a character of the task's alphabet.
    pub tokenizer: Option<PathBuf>,
    /// Train low-rank adapters beside the model at `path`, and leave its own weights as they are.
    pub lora: Option<LoraSettings>,
}
