//! The `model` section.

use super::lora::LoraSettings;
use crate::{Error, Result};
use firebrick_spec::Arch;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The policy: a checkpoint, or a random start.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// A Hugging Face checkpoint folder, or a model of the Hub: `owner/name`, `owner/name@revision`.
    pub path: Option<PathBuf>,
    /// Instead of `path`: the config of a model that starts from random weights, under transformers' names
    /// (`model_type`, `hidden_size`, …). `vocab_size` follows the tokenizer.
    pub arch: Option<Map<String, Value>>,
    /// With `arch`: a folder with tokenizer files. Without it, one token a character of the task's alphabet.
    pub tokenizer: Option<PathBuf>,
    /// A Jinja file that takes the place of the tokenizer's own chat template. TRL: `chat_template_path`.
    pub chat_template: Option<PathBuf>,
    /// Variables that the chat template is given besides its own, such as Qwen3's `enable_thinking: false`. verl:
    /// `data.apply_chat_template_kwargs`, TRL: `chat_template_kwargs`.
    pub chat_template_kwargs: Map<String, Value>,
    /// In a model with experts: the coefficient of the auxiliary loss that balances their load. 0, the default, is
    /// none; a checkpoint's own coefficient is not read.
    pub router_aux_loss_coef: f64,
    /// Train low-rank adapters beside the model at `path`, and leave its own weights as they are.
    pub lora: Option<LoraSettings>,
}

impl ModelConfig {
    /// Refuses what cannot work with any model.
    pub(crate) fn check(&self) -> Result<()> {
        let coefficient = self.router_aux_loss_coef;
        if coefficient.is_finite() && coefficient >= 0.0 {
            return Ok(());
        }
        Err(Error::Config(format!("model.router_aux_loss_coef must be at least 0, found {coefficient}")))
    }

    /// Refuses what cannot work with a model of this architecture.
    pub(crate) fn check_for(&self, arch: &Arch) -> Result<()> {
        let coefficient = self.router_aux_loss_coef;
        if coefficient > 0.0 && arch.expert_layers().next().is_none() {
            return Err(Error::Config(format!(
                "model.router_aux_loss_coef is {coefficient}, but the model has no experts; remove the key"
            )));
        }
        Ok(())
    }
}
