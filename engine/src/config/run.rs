//! The whole configuration of a run.

use super::critic::CriticConfig;
use super::model::ModelConfig;
use super::rollout::RolloutConfig;
use super::sft::{SftConfig, WarmupConfig};
use super::trainer::TrainerConfig;
use super::update::UpdateConfig;
use crate::objective::ObjectiveConfig;
use crate::optim::OptimConfig;
use crate::plan::{AppliedPreset, DeviceAbilities, MemoryConfig, PRECISION, SHARE};
use crate::task::TaskConfig;
use crate::{Error, Result};
use firebrick_backends::{DeviceSpec, Precision};
use firebrick_models::{BaseFormat, Prepack};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::PathBuf;

/// Pattern of a device, for the schema.
const DEVICE: &str = r"^(auto|(cpu|cuda|wgpu|vulkan|metal)(:[0-9]+)?)$";

/// Kernels of matmuls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Matmul {
    /// Kernels of this program.
    #[default]
    Firebrick,
    /// NVIDIA's library for large matrices; needs a driver for CUDA 12.5. A run repeats to the bit only with the same
    /// version of it. Copies wait for its matmuls. Sampling and forward passes of `rollout.exact` keep `firebrick`.
    Cublaslt,
}

/// A training run. `config.yaml` in the run folder is the resolved configuration with every default.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(extend("required" = ["model", "output"]))]
pub struct RunConfig {
    /// The policy model.
    pub model: ModelConfig,
    /// Prompts and rewards. Optional with `sft.train`.
    pub task: Option<TaskConfig>,
    /// Run folder, relative to the working directory.
    pub output: PathBuf,
    /// RL algorithm: a name, or a section that overrides the named algorithm's settings.
    pub objective: ObjectiveConfig,
    /// Sampling of completions.
    pub rollout: RolloutConfig,
    /// Division of rollouts into optimizer steps.
    pub update: UpdateConfig,
    /// `AdamW` optimizer. Steps with NaN or infinite values are skipped; `trainer.max_consecutive_skips` end the run.
    pub optim: OptimConfig,
    /// Critic, only for PPO. All weights of a separate critic are trained, also with `model.lora`.
    pub critic: Option<CriticConfig>,
    /// Length, validation, checkpoints, ranks and logging.
    pub trainer: TrainerConfig,
    /// Training before the first RL step.
    pub warmup: WarmupConfig,
    /// Supervised training with `firebrick sft`. `null`: `warmup.sft`.
    pub sft: Option<SftConfig>,
    /// Recomputation, offload, sharding and micro-batch sizes. Loss, gradients and update do not depend on them (up to
    /// rounding), except for `moments`, a `preset` that sets `precision`, and micro-batch sizes with
    /// `model.router_aux_loss_coef` above 0.
    pub memory: MemoryConfig,
    /// `cpu`, `cuda[:n]`, `wgpu[:n]`, `vulkan[:n]`, `metal[:n]`, or `auto`: the best hardware GPU, else the CPU.
    #[schemars(with = "String", regex(pattern = DEVICE))]
    pub device: DeviceSpec,
    /// Float type of parameters and activations of all models. Master weights, moments, accumulated gradients, norms,
    /// softmax, log-probs and losses stay in f32. The device must compute in it.
    pub precision: Precision,
    /// Let NVIDIA GPUs round f32 matmul operands to TF32 (10 bits of mantissa), which is faster.
    pub allow_tf32: bool,
    /// Matmuls of training and scoring in half precision on NVIDIA GPUs.
    pub matmul: Matmul,
    /// Bitwise reproducible runs on the same kind of GPU (on the CPU always). `false`: the embedding's gradient uses
    /// atomics.
    #[default(true)]
    pub deterministic: bool,
    /// Which values `memory.preset` set, for a device that cannot do them. No part of the file: what is written there
    /// is written.
    #[serde(skip)]
    pub applied_preset: AppliedPreset,
}

impl RunConfig {
    /// Settings of a critic that shares the policy's trunk.
    pub fn shared_critic(&self) -> Option<&CriticConfig> {
        self.critic.as_ref().filter(|critic| critic.shared_trunk)
    }

    /// Settings of a separate critic.
    pub fn own_critic(&self) -> Option<&CriticConfig> {
        self.critic.as_ref().filter(|critic| !critic.shared_trunk)
    }

    /// Ulysses degree of a separate critic, if it is set.
    pub fn critic_sequences(&self) -> Option<usize> {
        self.own_critic()?.ulysses_sequence_parallel_size
    }

    /// Format of the policy's quantized base, if it has one.
    pub fn base(&self) -> Option<BaseFormat> {
        self.model.lora.as_ref().and_then(|lora| lora.base)
    }

    /// Copies of the matrices for sampling. Unquantized ones, for matmuls with few rows, are made by default if all weights
    /// are trained, so that gradients later need as much memory, and there is no budget; none are made on a GPU where
    /// sampling multiplies as training does.
    pub fn prepack(&self) -> Prepack {
        let one_by_one = self.rollout.exact == Some(true) && self.precision.is_half();
        let rule = || self.model.lora.is_none() && self.memory.budget.is_none() && !one_by_one;
        Prepack { panels: self.rollout.pack_weights.unwrap_or_else(rule), quantization: self.rollout.quantization }
    }

    /// Drops values of `memory.preset` that the device does not support. Each one is reported with the reason, and
    /// added to [`AppliedPreset::left_out`].
    pub fn restrict_to(&mut self, device: &DeviceAbilities) {
        let planned = self.memory.budget.is_some() || self.memory.plan.is_some();
        for (key, because) in self.applied_preset.beyond(device, planned) {
            self.leave_out(key, &because);
        }
    }

    /// Drops a value of `memory.preset`; nothing if the configuration sets it.
    pub(crate) fn leave_out(&mut self, key: &str, because: &str) {
        if !self.applied_preset.sets(key) {
            return;
        }
        match key {
            PRECISION => self.precision = Precision::default(),
            SHARE => self.rollout.gpu_memory_utilization = None,
            _ => return,
        }
        self.applied_preset.leave_out(key, because);
        if let (Some(name), Some(left)) = (self.applied_preset.name, self.applied_preset.left_out.last()) {
            tracing::warn!("memory.preset: {name} is applied without {}: {because}", left.setting());
        }
    }

    /// Returns true if the loss of a trained model is scaled.
    pub fn scales_loss(&self) -> bool {
        let critic = self.own_critic().map(|critic| &critic.optim);
        let mut optims = std::iter::once(&self.optim).chain(critic);
        optims.any(|optim| optim.scaler(self.precision).is_some())
    }

    /// The configuration as YAML, with all defaults.
    ///
    /// # Errors
    /// `Error::Config` if a value cannot be serialized.
    pub fn to_yaml(&self) -> Result<String> {
        serde_saphyr::to_string(self)
            .map_err(|e| Error::Config(format!("cannot write the resolved configuration: {e}")))
    }
}
