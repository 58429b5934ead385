//! Source and format of a policy: description of its checkpoint, tokenizer and end tokens.

use crate::config::{ModelConfig, RunConfig};
use crate::hub::{ModelFiles, model_folder};
use crate::task::Task;
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::Precision;
use firebrick_backends::host::create_folder;
use firebrick_models::arch::HeadKind;
use firebrick_models::checkpoint::{ExportOptions, WholeModel, export, load_adapter, save_adapter};
use firebrick_models::decoder::RankShard;
use firebrick_models::tokenizer::EndTokens;
use firebrick_models::{Arch, BaseFormat, Checkpoint, Decoder, Tokenizer};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

/// Folder of the policy in a step's folder.
const MODEL: &str = "model";
/// Folder of the merged model beside it.
const MERGED: &str = "merged";

/// Description of a model folder, its tokenizer, and the end tokens of completions.
pub struct PolicySource {
    /// Configs and element types of the checkpoint.
    pub checkpoint: Checkpoint,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// End tokens of completions in sampling, training and saved models.
    pub ends: EndTokens,
}

impl PolicySource {
    /// Reads the configured checkpoint folder, or describes a model with random weights.
    ///
    /// # Errors
    /// `Error::Model` and `Error::Hub` if the folder cannot be read or fetched; those of [`tokenizer_of`] and
    /// [`check_arch`].
    pub fn open(config: &ModelConfig, task: &dyn Task) -> Result<Self> {
        Self::with(config, task, ModelFiles::All)
    }

    /// As [`Self::open`], with `files` of a model of the Hub: without weights it can be planned, not loaded.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with(config: &ModelConfig, task: &dyn Task, files: ModelFiles) -> Result<Self> {
        let checkpoint = config.path.as_ref();
        let checkpoint = checkpoint.map(|path| checkpoint_of(path, files)).transpose()?;
        let mut tokenizer = tokenizer_of(config, task)?;
        let family = tokenizer.turns_family().filter(|_| task.environments().is_some());
        if let Some(family) = family {
            tokenizer = tokenizer.for_turns();
            tracing::info!(
                "rollouts of several turns use the chat template of {family} for training, which writes every turn as it \
                 was sampled; saved models keep the checkpoint's. Set model.chat_template to a file for another"
            );
        }
        let checkpoint = match (checkpoint, &config.arch) {
            (Some(checkpoint), _) => checkpoint,
            (None, Some(arch)) => Self::create(arch, &tokenizer)?,
            (None, None) => unreachable!("the configuration was checked"),
        };
        check_arch(checkpoint.arch())?;
        let tokenizer = tokenizer.for_embedding(checkpoint.arch().vocab_size);
        let ends = EndTokens::new(&checkpoint.eos_ids(), &tokenizer);
        check_ends(&ends.ids, checkpoint.arch())?;
        let checkpoint = if ends.added.is_empty() { checkpoint } else { checkpoint.with_eos_ids(&ends.ids) };
        Ok(Self { checkpoint, tokenizer: Arc::new(tokenizer), ends })
    }

    fn create(arch: &Map<String, Value>, tokenizer: &Tokenizer) -> Result<Checkpoint> {
        let mut config = arch.clone();
        config.entry("vocab_size").or_insert(json!(tokenizer.vocab_size()));
        Ok(Checkpoint::create(config, tokenizer.eos_id(), tokenizer.pad_id())?)
    }

    /// The model in a precision, with a quantized base or not.
    #[must_use]
    pub fn in_format(mut self, precision: Precision, base: Option<BaseFormat>) -> Self {
        self.checkpoint = self.checkpoint.in_precision(precision).with_base(base);
        self
    }

    /// A rank's `part` of the policy at the start of a run: the checkpoint's weights, or random ones by seed, with
    /// adapters.
    ///
    /// # Errors
    /// `Error::Model` if weights cannot be loaded; those of the adapters' settings.
    pub fn decoder(&self, config: &RunConfig, part: RankShard<'_>, device: &Device) -> Result<Decoder> {
        let seed = config.trainer.seed;
        let base = match &config.model.path {
            Some(_) => self.checkpoint.load_shard(part, device)?,
            None => Decoder::random_shard(self.checkpoint.arch().clone(), seed, part, device)?,
        };
        let Some(lora) = &config.model.lora else {
            return Ok(base);
        };
        let mut adapted = lora.start(&base, seed)?;
        adapted.keep_values_of_adapters(part)?;
        Ok(adapted)
    }

    /// A rank's `part` of the policy in a step's folder: a model, or adapters of the configured one.
    ///
    /// # Errors
    /// `Error::Model` if the folder cannot be loaded.
    pub fn saved(&self, config: &RunConfig, step: &Path, part: RankShard<'_>, device: &Device) -> Result<Decoder> {
        let dir = step.join(MODEL);
        Ok(match &config.model.lora {
            Some(lora) => {
                let mut saved = load_adapter(&self.checkpoint.load_shard(part, device)?, &dir)?;
                saved.keep_values_of_adapters(part)?;
                // PEFT requires zero dropout in folders of adapters of experts
                match lora.dropout {
                    Some(rate) => saved.with_adapter_dropout(rate),
                    None => saved,
                }
            }
            None => Checkpoint::open(&dir)?.in_precision(config.precision).load_shard(part, device)?,
        })
    }

    /// Writes a policy into a step's folder: the model, or its adapters and, if configured, the merged model.
    ///
    /// # Errors
    /// `Error::Io` if a folder cannot be created, `Error::Model` if weights cannot be written or read from the device.
    pub fn save(&self, policy: &dyn WholeModel, config: &RunConfig, step: &Path) -> Result<()> {
        let folder = |name: &str| {
            let dir = step.join(name);
            create_folder(&dir).map_err(Error::io("create", &dir))?;
            Ok::<_, Error>(dir)
        };
        let whole = |dir: &Path| {
            let options = ExportOptions { max_shard_bytes: config.trainer.max_shard_bytes };
            export(policy, &self.checkpoint, Some(&self.tokenizer), dir, options)
        };
        let Some(lora) = &config.model.lora else {
            return Ok(whole(&folder(MODEL)?)?);
        };
        // a model of the Hub by its name, which is equal on all machines
        let named = config.model.path.as_deref().filter(|path| !path.exists());
        let base = named.unwrap_or(self.checkpoint.dir()).to_string_lossy();
        save_adapter(policy, &base, &folder(MODEL)?)?;
        if lora.merge {
            whole(&folder(MERGED)?)?;
        }
        Ok(())
    }

    /// Warns if chat template, tokenizer and checkpoint disagree about the end of a turn. `stop` are the configured
    /// stop strings.
    pub fn log_ends(&self, stop: &[String]) {
        let shown = |ids: &[u32]| EndTokens::shown(ids, &self.tokenizer);
        let ends = &self.ends;
        if !ends.added.is_empty() {
            let named = ends.ids.len() - ends.added.len();
            tracing::warn!(
                "completions end with {} too, which the chat template or the tokenizer names: the checkpoint's eos_token_id \
                 is {}. Saved models have all of these in generation_config.json",
                shown(&ends.added),
                if named == 0 { "not set".to_owned() } else { shown(&ends.ids[..named]) },
            );
        }
        let endless = ends.endless.as_deref().map(str::trim);
        if let Some(behind) =
            endless.filter(|behind| !behind.is_empty() && !stop.iter().any(|s| behind.contains(s.trim())))
        {
            tracing::warn!(
                "the chat template ends a turn of the assistant with {behind:?}, which has no token that ends completions ({}); \
                 add it to rollout.stop, or set model.chat_template to a file that ends turns with one of these",
                shown(&ends.ids)
            );
        }
    }

    /// Positions within which a token's scores depend only on the tokens before it.
    pub fn trained_context(&self) -> usize {
        let arch = self.checkpoint.arch();
        arch.stretches_beyond().unwrap_or(arch.max_positions)
    }

    /// Rejects lengths that the model does not support.
    ///
    /// # Errors
    /// `Error::Config` for lengths beyond the model's context, and `Error::Budget` for a token budget below them.
    pub fn check_lengths(&self, config: &RunConfig) -> Result<()> {
        let arch = self.checkpoint.arch();
        let (prompt, response) = (config.rollout.prompt_length, config.rollout.response_length);
        let length = prompt + response;
        if length > arch.max_positions {
            return Err(Error::Config(format!(
                "rollout.prompt_length ({prompt}) + rollout.response_length ({response}) is {length}, but the model's \
                 context is {} (max_position_embeddings); lower one of them",
                arch.max_positions
            )));
        }
        if let Some(original) = arch.stretches_beyond()
            && length > original
        {
            return Err(Error::Config(format!(
                "with dynamic rotary scaling, log-probs beyond {original} positions depend on the rest of the batch; keep \
                 rollout.prompt_length + rollout.response_length at or below {original}, or set rope_type to linear"
            )));
        }
        let critic = config.memory.critic_settings()?;
        for (key, budget) in [
            ("memory.train_tokens", config.memory.train_tokens),
            ("memory.score_tokens", config.memory.score_tokens),
            ("memory.critic.train_tokens", critic.train_tokens),
            ("memory.critic.score_tokens", critic.score_tokens),
        ] {
            if budget < length {
                return Err(Error::Budget { tokens: length, budget, key });
            }
        }
        Ok(())
    }
}

/// The checkpoint at a path; of a model of the Hub without weights, the description by its configs.
pub(super) fn checkpoint_of(path: &Path, files: ModelFiles) -> Result<Checkpoint> {
    let folder = model_folder(path, files)?;
    let has_weights = files == ModelFiles::All || folder == path;
    Ok(if has_weights { Checkpoint::open(&folder)? } else { Checkpoint::describe(&folder)? })
}

/// Tokenizer of a configured model, with the configured chat template and variables. Reads no weights.
///
/// # Errors
/// `Error::Model` and `Error::Hub` if the tokenizer or its folder cannot be read, or the template is invalid;
/// `Error::Io` for the file of a template; `Error::Config` for a task without an alphabet and a model without a folder.
pub fn tokenizer_of(config: &ModelConfig, task: &dyn Task) -> Result<Tokenizer> {
    let folder = config.path.as_ref().or(config.tokenizer.as_ref());
    let mut tokenizer = match (folder, task.alphabet()) {
        (Some(folder), _) => Tokenizer::from_dir(&model_folder(folder, ModelFiles::Tokenizer)?)?,
        (None, Some(alphabet)) => {
            let tokenizer = Tokenizer::characters_and_words(alphabet, task.tokens())?;
            match task.chat_template() {
                Some(template) => tokenizer.with_chat_template(template, Path::new("(of the task)"))?,
                None => tokenizer,
            }
        }
        (None, None) => {
            return Err(Error::Config(
                "model.arch needs model.tokenizer (a folder with tokenizer.json): this task does not define an alphabet"
                    .into(),
            ));
        }
    };
    // the folder may have no config if no weights are read
    let folder = config.path.as_ref().and_then(|path| model_folder(path, ModelFiles::Config).ok());
    if let Some(arch) = folder.and_then(|folder| Checkpoint::architecture(&folder).ok()) {
        tokenizer = tokenizer.for_embedding(arch.vocab_size);
    }
    if let Some(template) = config.template()? {
        let file = config.chat_template.as_deref().filter(|file| file.is_file());
        tokenizer = tokenizer.with_chat_template(&template, file.unwrap_or(Path::new("model.chat_template")))?;
    }
    Ok(tokenizer.with_chat_template_kwargs(&config.chat_template_kwargs)?)
}

/// Architecture of a configured model, from its `config.json` or `model.arch`, and from its tokenizer if they have no
/// vocabulary size. Reads no weights.
///
/// # Errors
/// `Error::Model` and `Error::Hub` if the folder cannot be read or the config describes no supported decoder; without a
/// vocabulary size those of [`tokenizer_of`].
pub fn architecture(config: &RunConfig) -> Result<Arch> {
    let arch = described(config)?.in_precision(config.precision);
    Ok(arch.with_base(config.base()))
}

fn described(config: &RunConfig) -> Result<Arch> {
    if let Some(dir) = &config.model.path {
        let folder = model_folder(dir, ModelFiles::Config)?;
        return Ok(Checkpoint::architecture(&folder)?);
    }
    let Some(arch) = &config.model.arch else { unreachable!("the configuration was checked") };
    if arch.contains_key("vocab_size") {
        return Ok(Checkpoint::create(arch.clone(), None, None)?.arch().clone());
    }
    let Some(task) = &config.task else {
        return Err(Error::Config(
            "model.arch.vocab_size is missing, and without `task` there is no tokenizer to take it from; set it".into(),
        ));
    };
    let task = task.build(Path::new("."))?;
    Ok(PolicySource::open(&config.model, task.as_ref())?.checkpoint.arch().clone())
}

/// Rejects checkpoints other than causal language models.
///
/// # Errors
/// `Error::Config` for a classification head.
pub fn check_arch(arch: &Arch) -> Result<()> {
    if arch.head != HeadKind::LanguageModel {
        return Err(Error::Config(
            "expected a causal language model, but this checkpoint has a classification head (as reward models and critics \
             do)".into(),
        ));
    }
    Ok(())
}

/// Rejects end tokens that the model can never sample.
///
/// # Errors
/// `Error::Config` with the first one.
pub fn check_ends(ids: &[u32], arch: &Arch) -> Result<()> {
    let rows = arch.vocab_size;
    match ids.iter().find(|&&id| id as usize >= rows) {
        None => Ok(()),
        Some(id) => Err(Error::Config(format!(
            "the end token {id} (eos_token_id of generation_config.json or config.json, or the tokenizer's eos_token) is \
             beyond the model's embedding of {rows} rows (vocab_size), so the model can never write it; name another one"
        ))),
    }
}
