//! Adapters of a run: the `model.lora` section, and how a policy with adapters starts and continues.

use crate::hub::{ModelFiles, model_folder};
use crate::{Error, Result};
use firebrick_models::adapter::LoraConfig;
use firebrick_models::checkpoint::{adapter_shape, load_adapter};
use firebrick_models::unit::TargetModule;
use firebrick_models::{Arch, BaseFormat, Decoder};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// PEFT's word for every projection.
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
    /// The settings of an adapter folder and nothing else.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self { path: Some(path), ..Self::default() }
    }

    /// Refuses settings that cannot work.
    ///
    /// # Errors
    /// `Error::Config` without a base model, and for a rank, alpha, dropout or module that cannot be.
    pub fn check(&self, has_base: bool) -> Result<()> {
        if !has_base {
            return Err(Error::Config(
                "model.lora requires model.path: adapters need a trained base model, and model.arch is initialized randomly"
                    .into(),
            ));
        }
        self.over(&LoraConfig::default(), None).map(|_| ())
    }

    /// Spells out every default, where they are not those of an adapter folder.
    pub fn spell_out(&mut self) {
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

    /// Settings over those of something else.
    fn over(&self, base: &LoraConfig, arch: Option<&Arch>) -> Result<LoraConfig> {
        let lora = LoraConfig {
            rank: self.rank.unwrap_or(base.rank),
            alpha: self.alpha.unwrap_or(base.alpha),
            use_rslora: self.use_rslora.unwrap_or(base.use_rslora),
            dropout: self.dropout.unwrap_or(base.dropout),
            target_modules: self.targets(&base.target_modules, arch)?,
        };
        match lora.check() {
            Ok(()) => Ok(lora),
            Err(e) => Err(Error::Config(format!("model.lora: {e}"))),
        }
    }

    /// Modules and parameters of experts: those that are named here, of those of something else what is not.
    fn targets(&self, base: &[TargetModule], arch: Option<&Arch>) -> Result<Vec<TargetModule>> {
        let stacked = arch.is_some_and(Arch::stacks_experts);
        let kept = |parameters: bool| {
            let own = base.iter().copied();
            own.filter(move |target| (stacked && target.is_expert()) == parameters)
        };
        let modules = self.target_modules.as_ref().map(TargetModules::parse);
        let mut targets = match modules.transpose()? {
            Some(named) => named,
            None => kept(false).collect(),
        };
        match self.parameters()? {
            Some(named) => targets.extend(named),
            None => targets.extend(kept(true)),
        }
        targets.sort_unstable();
        targets.dedup();
        Ok(targets)
    }

    fn parameters(&self) -> Result<Option<Vec<TargetModule>>> {
        let named = self.target_parameters.as_deref();
        let named = named.map(TargetModule::parse_parameters);
        let parse = named.transpose();
        parse.map_err(|e| Error::Config(format!("model.lora.target_parameters: {e}")))
    }

    /// What the adapters will look like, without reading any weights.
    ///
    /// # Errors
    /// `Error::Config` for settings out of range, or modules that the model lacks; `Error::Model` and `Error::Hub`
    /// where the folder at `path` cannot be read.
    pub fn shape(&self, arch: &Arch) -> Result<LoraConfig> {
        let base = match &self.path {
            Some(path) => adapter_shape(arch, &model_folder(path, ModelFiles::Config)?)?,
            None => LoraConfig::default(),
        };
        let shape = self.over(&base, Some(arch))?;
        self.in_arch(shape, arch)
    }

    /// The settings with the modules that a model has; those that are named must be among them.
    fn in_arch(&self, lora: LoraConfig, arch: &Arch) -> Result<LoraConfig> {
        let named = |key: &str, check: std::result::Result<(), String>| {
            check.map_err(|e| Error::Config(format!("model.lora.{key}: {e}")))
        };
        if let Some(TargetModules::Names(names)) = &self.target_modules {
            let targets = TargetModules::Names(names.clone()).parse()?;
            named("target_modules", LoraConfig::check_names(&targets, arch))?;
        }
        if let Some(targets) = self.parameters()? {
            let check = LoraConfig::check_parameters(&targets, arch);
            named("target_parameters", check)?;
        }
        Ok(lora.in_arch(arch))
    }

    /// The policy at the start of a run: the base model with fresh adapters by seed, or with those of the folder at
    /// `path`.
    ///
    /// # Errors
    /// As [`Self::shape`]; `Error::Config` too where the settings differ from those of the folder, `Error::Model` where
    /// its weights do not fit.
    pub fn start(&self, base: &Decoder, seed: u64) -> Result<Decoder> {
        let Some(path) = &self.path else {
            let lora = self.over(&LoraConfig::default(), Some(base.whole_arch()))?;
            let lora = self.in_arch(lora, base.whole_arch())?;
            return Ok(base.with_fresh_adapters(lora, seed)?);
        };
        let decoder = load_adapter(base, &model_folder(path, ModelFiles::All)?)?;
        let Some(own) = decoder.lora().cloned() else {
            unreachable!("loaded with adapters");
        };
        let wanted = self.over(&own, Some(base.whole_arch()))?;
        let wanted = self.in_arch(wanted, base.whole_arch())?;
        agree(&wanted, &own, base.whole_arch(), path)?;
        Ok(decoder.with_adapter_dropout(wanted.dropout))
    }
}

/// What decides the adapter's shape and scale is the folder's; only dropout, which training alone uses, may be another.
fn agree(wanted: &LoraConfig, own: &LoraConfig, arch: &Arch, path: &Path) -> Result<()> {
    let modules = |lora: &LoraConfig| lora.modules(arch).join(", ");
    let parameters = |lora: &LoraConfig| lora.parameters(arch).join(", ");
    let rows = [
        ("rank", wanted.rank.to_string(), own.rank.to_string()),
        ("alpha", wanted.alpha.to_string(), own.alpha.to_string()),
        ("use_rslora", wanted.use_rslora.to_string(), own.use_rslora.to_string()),
        ("target_modules", modules(wanted), modules(own)),
        ("target_parameters", parameters(wanted), parameters(own)),
    ];
    match rows.into_iter().find(|(_, wanted, own)| wanted != own) {
        Some((key, wanted, own)) => Err(Error::Config(format!(
            "model.lora.{key} is {wanted}, but the adapter in {} has {own}; remove the key to use the adapter's",
            path.display()
        ))),
        None => Ok(()),
    }
}
