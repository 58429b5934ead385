//! Adapters of a run: the `model.lora` section, and how a policy with adapters starts and continues.

use crate::hub::{ModelFiles, model_folder};
use crate::{Error, Result};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::checkpoint::{adapter_shape, load_adapter};
use firebrick_models::unit::TargetModule;
use firebrick_models::{Arch, BaseFormat, Decoder};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// PEFT's name for all projections.
const ALL_LINEAR: &str = "all-linear";

/// The `model.lora` section, under the names of verl's `model.lora`. PEFT's and verl's flat names (`r`, `lora_alpha`,
/// …) are also accepted.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSettings {
    /// Adapter rank. `null`: 16.
    #[serde(alias = "r", alias = "lora_rank")]
    #[schemars(range(min = 1), extend("x-alias" = ["r", "lora_rank"]))]
    pub rank: Option<usize>,
    /// Numerator of the adapter scale, `alpha / rank`. `null`: 32.
    #[serde(alias = "lora_alpha")]
    #[schemars(extend("exclusiveMinimum" = 0, "x-alias" = ["lora_alpha"]))]
    pub alpha: Option<f64>,
    /// Scale by `alpha / √rank`. `null`: false.
    pub use_rslora: Option<bool>,
    /// Dropout probability of adapter inputs in training; slow, since masks are drawn on the host. `null`: 0.
    #[serde(alias = "lora_dropout")]
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1, "x-alias" = ["lora_dropout"]))]
    pub dropout: Option<f64>,
    /// `all-linear`, or a list of `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`; in Qwen
    /// 3 with experts also each expert's. `null`: `all-linear`.
    pub target_modules: Option<TargetModules>,
    /// Adapters per expert in Qwen 3.5 and gpt-oss: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`.
    pub target_parameters: Option<Vec<String>>,
    /// PEFT adapter folder to continue from. Its settings apply to keys that are `null`; only `dropout` may differ.
    pub path: Option<PathBuf>,
    /// Also write a merged model into checkpoints, as `merged/`.
    pub merge: bool,
    /// Quantize the frozen attention, MLP and expert weights (`QLoRA`), which matmuls dequantize. `null`: not
    /// quantized.
    pub base: Option<BaseFormat>,
}

/// Modules with adapters.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(untagged, expecting = "must be all-linear or a list of module names")]
pub enum TargetModules {
    /// `all-linear`: all modules.
    Word(String),
    /// A list of modules.
    Names(Vec<String>),
}

impl TargetModules {
    fn parse(&self) -> Result<Vec<TargetModule>> {
        let targets = match self {
            Self::Word(word) if word == ALL_LINEAR => Ok(TargetModule::all()),
            Self::Word(word) => TargetModule::parse(&[word]),
            Self::Names(names) => TargetModule::parse(names),
        };
        targets.map_err(|e| Error::Config(format!("model.lora.target_modules: {e}")))
    }
}

impl LoraSettings {
    /// The settings of an adapter folder.
    pub fn from_folder(path: PathBuf) -> Self {
        Self { path: Some(path), ..Self::default() }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// `Error::Config` without a base model, and for an invalid rank, alpha, dropout or module.
    pub fn check(&self, has_base: bool) -> Result<()> {
        if !has_base {
            return Err(Error::Config(
                "model.lora requires model.path: adapters need a trained base model, and model.arch is initialized randomly"
                    .into(),
            ));
        }
        self.over(&LoraConfig::default(), None).map(|_| ())
    }

    /// Sets absent values to their defaults, unless an adapter folder has them.
    pub fn resolve(&mut self) {
        if self.path.is_some() {
            return;
        }
        let default = LoraConfig::default();
        self.rank.get_or_insert(default.rank);
        self.alpha.get_or_insert(default.alpha);
        self.use_rslora.get_or_insert(default.use_rslora);
        self.dropout.get_or_insert(default.dropout);
        self.target_modules.get_or_insert_with(|| TargetModules::Word(ALL_LINEAR.into()));
    }

    /// Settings on top of base settings.
    fn over(&self, base: &LoraConfig, arch: Option<&Arch>) -> Result<LoraConfig> {
        let lora = LoraConfig {
            rank: self.rank.unwrap_or(base.rank),
            alpha: self.alpha.unwrap_or(base.alpha),
            use_rslora: self.use_rslora.unwrap_or(base.use_rslora),
            dropout: self.dropout.unwrap_or(base.dropout),
            target_modules: self.targets(&base.target_modules, arch)?,
        };
        lora.check().map_err(|e| Error::Config(format!("model.lora: {e}")))?;
        Ok(lora)
    }

    /// Modules and parameters of experts: the named ones, else those of the base settings.
    fn targets(&self, base: &[TargetModule], arch: Option<&Arch>) -> Result<Vec<TargetModule>> {
        let stacked = arch.is_some_and(Arch::stacks_experts);
        let inherited =
            |parameters: bool| base.iter().copied().filter(move |target| (stacked && target.is_expert()) == parameters);
        let modules = self.target_modules.as_ref().map(TargetModules::parse);
        let mut targets = match modules.transpose()? {
            Some(named) => named,
            None => inherited(false).collect(),
        };
        match self.parameters()? {
            Some(named) => targets.extend(named),
            None => targets.extend(inherited(true)),
        }
        targets.sort_unstable();
        targets.dedup();
        Ok(targets)
    }

    fn parameters(&self) -> Result<Option<Vec<TargetModule>>> {
        let parsed = self.target_parameters.as_deref().map(TargetModule::parse_parameters).transpose();
        parsed.map_err(|e| Error::Config(format!("model.lora.target_parameters: {e}")))
    }

    /// Shape of the adapters, without reading weights.
    ///
    /// # Errors
    /// `Error::Config` for settings out of range, or modules that the model lacks; `Error::Model` and `Error::Hub` if
    /// the folder at `path` cannot be read.
    pub fn shape(&self, arch: &Arch) -> Result<LoraConfig> {
        let base = match &self.path {
            Some(path) => adapter_shape(arch, &model_folder(path, ModelFiles::Config)?)?,
            None => LoraConfig::default(),
        };
        let shape = self.over(&base, Some(arch))?;
        self.in_arch(shape, arch)
    }

    /// The settings with the modules that a model has, which must include the named ones.
    fn in_arch(&self, lora: LoraConfig, arch: &Arch) -> Result<LoraConfig> {
        let with_key = |key: &'static str| move |e: String| Error::Config(format!("model.lora.{key}: {e}"));
        if let Some(names @ TargetModules::Names(_)) = &self.target_modules {
            LoraConfig::check_names(&names.parse()?, arch).map_err(with_key("target_modules"))?;
        }
        if let Some(targets) = self.parameters()? {
            LoraConfig::check_parameters(&targets, arch).map_err(with_key("target_parameters"))?;
        }
        Ok(lora.in_arch(arch))
    }

    /// The policy at the start of a run: the base model with fresh adapters by seed, or those of the folder at `path`.
    ///
    /// # Errors
    /// As [`Self::shape`]; `Error::Config` also if the settings differ from those of the folder, `Error::Model` if its
    /// weights do not fit.
    pub fn start(&self, base: &Decoder, seed: u64) -> Result<Decoder> {
        let Some(path) = &self.path else {
            let lora = self.over(&LoraConfig::default(), Some(base.whole_arch()))?;
            let lora = self.in_arch(lora, base.whole_arch())?;
            return Ok(base.with_fresh_adapters(lora, seed)?);
        };
        let decoder = load_adapter(base, &model_folder(path, ModelFiles::All)?)?;
        let Some(saved) = decoder.lora().cloned() else {
            unreachable!("loaded with adapters");
        };
        let configured = self.over(&saved, Some(base.whole_arch()))?;
        let configured = self.in_arch(configured, base.whole_arch())?;
        check_equal(&configured, &saved, base.whole_arch(), path)?;
        Ok(decoder.with_adapter_dropout(configured.dropout))
    }
}

/// Rejects settings of shape and scale that differ from those of an adapter folder. Dropout, which only training uses,
/// may differ.
fn check_equal(configured: &LoraConfig, saved: &LoraConfig, arch: &Arch, path: &Path) -> Result<()> {
    let modules = |lora: &LoraConfig| lora.modules(arch).join(", ");
    let parameters = |lora: &LoraConfig| lora.parameters(arch).join(", ");
    let rows = [
        ("rank", configured.rank.to_string(), saved.rank.to_string()),
        ("alpha", configured.alpha.to_string(), saved.alpha.to_string()),
        ("use_rslora", configured.use_rslora.to_string(), saved.use_rslora.to_string()),
        ("target_modules", modules(configured), modules(saved)),
        ("target_parameters", parameters(configured), parameters(saved)),
    ];
    match rows.into_iter().find(|(_, configured, saved)| configured != saved) {
        Some((key, configured, saved)) => Err(Error::Config(format!(
            "model.lora.{key} is {configured}, but the adapter in {} has {saved}; remove the key to use the adapter's",
            path.display()
        ))),
        None => Ok(()),
    }
}
