//! The configuration of a run: what a user writes, read strictly and resolved once.

mod critic;
mod load;
mod rollout;
mod sft;

pub use critic::{CriticConfig, CriticModel};
pub use load::{load, parse};
pub use rollout::DynamicSampling;
pub use sft::SftConfig;

use crate::lora::LoraSettings;
pub use crate::objective::ObjectiveConfig;
use crate::objective::advantage::AdvEstimator;
use crate::optim::OptimConfig;
use crate::plan::MemoryConfig;
use crate::plan::size::Bytes;
use crate::task::TaskConfig;
use crate::{Error, Result};
use firebrick_backends::{DeviceSpec, Precision};
use firebrick_models::generate::{MAX_NUM_BATCHED_TOKENS, Sampling};
use firebrick_models::{Packing, Quantization};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Everything a run is made of. Written back complete as `config.yaml` in the run folder.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The policy.
    pub model: ModelConfig,
    /// Prompts and rewards. Absent only where a program brings a task of its own.
    #[serde(default)]
    pub task: Option<TaskConfig>,
    /// The run folder.
    pub output: PathBuf,
    /// The algorithm.
    #[serde(default)]
    pub objective: ObjectiveConfig,
    /// Sampling during training and validation.
    #[serde(default)]
    pub rollout: RolloutConfig,
    /// How rollouts become optimizer steps.
    #[serde(default)]
    pub update: UpdateConfig,
    /// The optimizer of the RL steps.
    #[serde(default)]
    pub optim: OptimConfig,
    /// The critic, where the objective has one.
    #[serde(default)]
    pub critic: Option<CriticConfig>,
    /// Length and rhythm of the run.
    #[serde(default)]
    pub trainer: TrainerConfig,
    /// What runs before the first RL step.
    #[serde(default)]
    pub warmup: WarmupConfig,
    /// Settings of `firebrick sft`.
    #[serde(default)]
    pub sft: Option<SftConfig>,
    /// What is kept between forward and backward, and the token budgets.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// What computes.
    #[serde(default)]
    pub device: DeviceSpec,
    /// The float type of parameters and activations, for every model of the run. Masters, moments, accumulated gradients, norms,
    /// softmax, log-probs and losses stay in f32.
    #[serde(default)]
    pub precision: Precision,
    /// Whether f32 matrix products may be rounded to TF32 (10 bits) where the device has it. Off: f32 means f32.
    #[serde(default)]
    pub allow_tf32: bool,
    /// Whether a run on a GPU is repeatable to the bit, as one on the CPU always is: no float is added with atomics.
    #[serde(default = "yes")]
    pub deterministic: bool,
}

fn yes() -> bool {
    true
}

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

/// Sampling, under verl's and vLLM's names.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// Completions a prompt: the group size.
    pub n: usize,
    /// Logits are divided by this, in training too. Must be above 0.
    pub temperature: f64,
    /// Only the `k` likeliest tokens; −1 is all.
    pub top_k: i64,
    /// Only the likeliest tokens that together hold this probability.
    pub top_p: f64,
    /// Only tokens at least this share as likely as the likeliest.
    pub min_p: f64,
    /// Most tokens of a prompt; longer ones are left out and counted.
    pub prompt_length: usize,
    /// Most tokens of a completion.
    pub response_length: usize,
    /// Texts that end a completion.
    pub stop: Vec<String>,
    /// Most sequences sampled at a time: the engine's slots.
    pub max_num_seqs: usize,
    /// Most tokens of one forward of prompts: longer ones are run in chunks, between which decoding goes on.
    pub max_num_batched_tokens: usize,
    /// Most tokens of a sequence, prompt and completion; prompt and response length together where absent.
    pub max_model_len: Option<usize>,
    /// The float type that completions are sampled in, where that is another than the run's `precision`: a rounded copy of the
    /// weights is made for each round of sampling.
    pub precision: Option<Precision>,
    /// How the layers' matrices are kept while completions are sampled, where that is in fewer bits than they are trained in.
    pub quantization: Option<Quantization>,
    /// Every forward runs operation by operation, with no captured graph. The engine knows no other way: `false` is refused.
    pub enforce_eager: bool,
    /// Whether a token is run before the host has seen the one before it: where absent, on devices that work
    /// beside the program. No token changes.
    pub async_scheduling: Option<bool>,
    /// Most bytes of keys and values. Where they run short, the youngest sequences wait and are computed again.
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Instead: the share of the device's total memory that weights, keys, values and temporaries may have while sampling.
    pub gpu_memory_utilization: Option<f64>,
    /// Whether matrices are copied into a layout for products with few rows while completions are sampled; by a rule where
    /// absent.
    pub pack_weights: Option<bool>,
    /// Whether the pages of the cache are given back to the device before training.
    pub free_cache: bool,
    /// Groups whose rewards are all equal are replaced by fresh prompts.
    pub dynamic_sampling: DynamicSampling,
}

impl RunConfig {
    /// The copies that sampling makes of the matrices. The rule for those in a layout for products with few rows: where all weights
    /// are trained, so that gradients will take as much when the copies are gone, and no budget is to be met.
    #[must_use]
    pub fn packing(&self) -> Packing {
        let rule = || self.model.lora.is_none() && self.memory.budget.is_none();
        let half = self.rollout.precision(self.precision).is_half();
        Packing {
            panels: !half && self.rollout.pack_weights.unwrap_or_else(rule),
            quantization: self.rollout.quantization,
        }
    }

    /// Whether the loss of a model that is trained is scaled.
    #[must_use]
    pub fn scales_loss(&self) -> bool {
        let critic = self.own_critic().map(|critic| &critic.optim);
        let mut optims = std::iter::once(&self.optim).chain(critic);
        optims.any(|optim| optim.scaler(self.precision).is_some())
    }
}

impl Default for RolloutConfig {
    fn default() -> Self {
        Self {
            n: 8,
            temperature: 1.0,
            top_k: -1,
            top_p: 1.0,
            min_p: 0.0,
            prompt_length: 512,
            response_length: 256,
            stop: Vec::new(),
            max_num_seqs: 256,
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
            max_model_len: None,
            precision: None,
            quantization: None,
            enforce_eager: true,
            async_scheduling: None,
            kv_cache_memory_bytes: None,
            gpu_memory_utilization: None,
            pack_weights: None,
            free_cache: true,
            dynamic_sampling: DynamicSampling::default(),
        }
    }
}

impl RolloutConfig {
    /// Sampling settings of training.
    #[must_use]
    pub fn sampling(&self, stop_ids: Vec<u32>) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: usize::try_from(self.top_k).ok(),
            top_p: self.top_p,
            min_p: self.min_p,
            max_new_tokens: self.response_length,
            stop_ids,
            stop_strings: self.stop.clone(),
        }
    }

    /// Greedy sampling with the same limits, for validation.
    #[must_use]
    pub fn greedy(&self, stop_ids: Vec<u32>) -> Sampling {
        let free = Self {
            temperature: 0.0,
            top_k: -1,
            top_p: 1.0,
            min_p: 0.0,
            ..self.clone()
        };
        free.sampling(stop_ids)
    }
}

/// Where `old` log-probs come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OldLogProbs {
    /// Recomputed by the trainer's forward (DESIGN's default): exact for the policy being trained.
    Trainer,
    /// The sampler's own full-distribution ones: one forward saved.
    Sampler,
}

/// How rollouts become optimizer steps.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateConfig {
    /// Passes over a step's rollouts.
    pub ppo_epochs: usize,
    /// Prompts (groups) an optimizer step; all of the step's where absent.
    pub ppo_mini_batch_size: Option<usize>,
    /// Source of the old log-probs.
    pub old_log_probs: OldLogProbs,
}

impl Default for UpdateConfig {
    fn default() -> Self {
        Self {
            ppo_epochs: 1,
            ppo_mini_batch_size: None,
            old_log_probs: OldLogProbs::Trainer,
        }
    }
}

/// Length and rhythm of a run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerConfig {
    /// RL steps, the warm-up apart.
    pub steps: u64,
    /// Prompts a step.
    pub train_batch_size: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Steps between validations; 0: before the first and after the last only.
    pub test_freq: u64,
    /// Validation prompts used; all where absent.
    pub val_max_samples: Option<usize>,
    /// Steps between checkpoints; 0: after the last only; −1: never.
    pub save_freq: i64,
    /// Checkpoints kept; the oldest are removed.
    pub max_ckpt_to_keep: usize,
    /// Largest weight file of a checkpoint, in bytes.
    pub max_shard_bytes: u64,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            train_batch_size: 32,
            seed: 0,
            test_freq: 0,
            val_max_samples: None,
            save_freq: 0,
            max_ckpt_to_keep: 3,
            max_shard_bytes: 5_000_000_000,
        }
    }
}

/// What runs before the first RL step.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct WarmupConfig {
    /// Supervised training, on rows of a file or on the task's solutions.
    pub sft: Option<SftConfig>,
}

impl RunConfig {
    /// Refuses settings that cannot work, before anything is loaded.
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(what.to_owned()));
        match (&self.model.path, &self.model.arch) {
            (Some(_), Some(_)) => return bad("model: give either `path` or `arch`, not both"),
            (None, None) => {
                return bad("model: give `path` (a checkpoint folder) or `arch` (a random start)");
            }
            (Some(_), None) if self.model.tokenizer.is_some() => {
                return bad(
                    "model.tokenizer goes with model.arch; a checkpoint at model.path brings its own",
                );
            }
            _ => {}
        }
        if let Some(lora) = &self.model.lora {
            lora.check(self.model.path.is_some())?;
        }
        let sizes = [
            ("rollout.n", self.rollout.n),
            ("rollout.prompt_length", self.rollout.prompt_length),
            ("rollout.response_length", self.rollout.response_length),
            ("rollout.max_num_seqs", self.rollout.max_num_seqs),
            ("trainer.train_batch_size", self.trainer.train_batch_size),
            ("trainer.max_ckpt_to_keep", self.trainer.max_ckpt_to_keep),
            ("update.ppo_epochs", self.update.ppo_epochs),
            (
                "update.ppo_mini_batch_size",
                self.update.ppo_mini_batch_size.unwrap_or(1),
            ),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(Error::Config(format!("{key} should be at least 1")));
        }
        if self.trainer.steps == 0 {
            return bad(
                "trainer.steps should be at least 1; for supervised training alone there is `firebrick sft`",
            );
        }
        if self.trainer.save_freq < -1 {
            return bad(
                "trainer.save_freq should be a number of steps, 0 (after the last step only) or -1 (never)",
            );
        }
        self.rollout.check(self.precision).map_err(Error::Config)?;
        if self.rollout.top_k == 0 || self.rollout.top_k < -1 {
            return bad("rollout.top_k should be at least 1, or -1 for all tokens");
        }
        if self.rollout.temperature.is_nan() || self.rollout.temperature <= 0.0 {
            return bad(
                "rollout.temperature should be above 0: a greedy policy has nothing to compare in a group",
            );
        }
        self.rollout
            .sampling(Vec::new())
            .check()
            .map_err(|e| Error::Config(format!("rollout: {e}")))?;
        self.check_groups()?;
        self.objective.check().map_err(Error::Config)?;
        self.check_objective()?;
        self.check_critic()?;
        self.memory.check()?;
        self.optim.check("optim")?;
        for (section, sft) in [("warmup.sft", &self.warmup.sft), ("sft", &self.sft)] {
            if let Some(sft) = sft {
                sft.check(section, section == "warmup.sft")?;
            }
        }
        Ok(())
    }

    /// Refuses an objective that the rest of the run cannot serve.
    fn check_objective(&self) -> Result<()> {
        let objective = &self.objective;
        let bad = |what: &str| Err(Error::Config(format!("objective: {what}")));
        if objective.adv_estimator == AdvEstimator::PassAtK && self.rollout.n < 2 {
            return bad(
                "adv_estimator: pass_at_k compares the two best completions of a prompt; set rollout.n to at least 2",
            );
        }
        let corrects = objective.rollout_is.is_some() || objective.rollout_rs.is_some();
        if corrects && self.update.old_log_probs == OldLogProbs::Sampler {
            return bad(
                "rollout_is and rollout_rs compare the trainer's old log-probs with the sampler's; set update.old_log_probs: \
                 trainer",
            );
        }
        Ok(())
    }

    /// A critic where the objective has one, and nowhere else.
    fn check_critic(&self) -> Result<()> {
        let values = self.objective.needed().values;
        match &self.critic {
            Some(critic) if values && critic.shared_trunk && !self.memory.critic.is_empty() => {
                Err(Error::Config(
                    "memory.critic is a plan of its own, and with critic.shared_trunk: true the critic is part of the policy: one \
                     forward and backward, one token budget; remove it, or give the critic a model of its own"
                        .into(),
                ))
            }
            Some(critic) if values => critic.check(self.trainer.steps),
            None if values => Err(Error::Config(
                "objective.adv_estimator: gae needs a critic; write `critic: {}` for one with default settings".into(),
            )),
            None if self.memory.critic.is_empty() => Ok(()),
            _ => {
                let key = if self.critic.is_some() { "critic" } else { "memory.critic" };
                Err(Error::Config(format!(
                    "{key} goes with objective: ppo (objective.adv_estimator: gae); no other objective has a critic"
                )))
            }
        }
    }

    /// The critic's settings, where it shares the policy's trunk.
    #[must_use]
    pub fn shared_critic(&self) -> Option<&CriticConfig> {
        self.critic.as_ref().filter(|critic| critic.shared_trunk)
    }

    /// Those of a critic that is a model of its own.
    #[must_use]
    pub fn own_critic(&self) -> Option<&CriticConfig> {
        self.critic.as_ref().filter(|critic| !critic.shared_trunk)
    }

    fn check_groups(&self) -> Result<()> {
        let (prompts, mini) = (
            self.trainer.train_batch_size,
            self.update.ppo_mini_batch_size,
        );
        match mini {
            Some(mini) if mini > prompts || prompts % mini != 0 => Err(Error::Config(format!(
                "update.ppo_mini_batch_size ({mini} prompts) should divide trainer.train_batch_size ({prompts})"
            ))),
            _ => Ok(()),
        }
    }

    /// The same run as YAML, complete: every default spelled out.
    pub fn to_yaml(&self) -> Result<String> {
        serde_saphyr::to_string(self).map_err(|e| {
            Error::Config(format!("the resolved configuration cannot be written: {e}"))
        })
    }
}
