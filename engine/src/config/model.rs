//! The `model` section.

use super::lora::LoraSettings;
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_spec::file::{MAX_CONFIG_BYTES, read_text};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The `model` section: a checkpoint, or a model with random weights.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Hugging Face checkpoint folder, or Hub model: `owner/name`, `owner/name@revision`.
    pub path: Option<PathBuf>,
    /// Instead of `path`: transformers' configuration of a model with random weights (`model_type`, `hidden_size`, …).
    /// `vocab_size` follows the tokenizer.
    pub arch: Option<Map<String, Value>>,
    /// With `arch`: tokenizer folder. `null`: one token per character, if the task defines its characters.
    pub tokenizer: Option<PathBuf>,
    /// Chat template in place of the tokenizer's: a Jinja file, or the template itself.
    pub chat_template: Option<PathBuf>,
    /// Chat template variables, such as `enable_thinking: false`.
    pub chat_template_kwargs: Map<String, Value>,
    /// Coefficient of the load-balancing loss of experts. A checkpoint's coefficient is ignored. Models without experts
    /// need 0.
    #[schemars(range(min = 0))]
    pub router_aux_loss_coef: f64,
    /// Train adapters (`LoRA`) instead of the weights of the model at `path`, which is then also the reference policy.
    pub lora: Option<LoraSettings>,
}

/// Returns true if a text is a template, not the name of its file.
pub(crate) fn is_template(text: &str) -> bool {
    text.contains("{{") || text.contains("{%")
}

impl ModelConfig {
    /// The configured chat template, if there is one.
    ///
    /// # Errors
    /// `Error::Io` if its file cannot be read.
    pub fn template(&self) -> Result<Option<String>> {
        let read = |file: &PathBuf| match file.to_str().filter(|text| is_template(text)) {
            Some(text) => Ok(text.to_owned()),
            None => read_text(file, MAX_CONFIG_BYTES).map_err(Error::io("read", file)),
        };
        self.chat_template.as_ref().map(read).transpose()
    }

    /// Rejects settings that an architecture does not support.
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
