//! The `rollout` section, its checks, and dynamic sampling.

use crate::plan::size::Bytes;
use crate::task::{ToolParser, ToolRole};
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_backends::Precision;
use firebrick_backends::device::Backend;
use firebrick_models::{KvCacheDtype, Quantization};
use firebrick_sampler::{MAX_NUM_BATCHED_TOKENS, SamplingParams};
use firebrick_spec::CudaGraphs;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The `rollout` section, under verl's and vLLM's names.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RolloutConfig {
    /// Completions per prompt (group size).
    #[default(8)]
    #[schemars(range(min = 1))]
    pub n: usize,
    /// Divisor of the logits in sampling and training.
    #[default(1.0)]
    #[schemars(extend("exclusiveMinimum" = 0, "x-because" = "greedy completions of a group are all equal"))]
    pub temperature: f64,
    /// Sample from the k likeliest tokens; −1 disables it.
    #[default(-1)]
    #[schemars(range(min = -1), extend("not" = {"const": 0}, "x-because" = "-1 samples from all tokens"))]
    pub top_k: i64,
    /// Sample from the likeliest tokens whose probabilities add up to this.
    #[default(1.0)]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub top_p: f64,
    /// Sample from tokens at least this fraction as likely as the likeliest.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub min_p: f64,
    /// Maximum prompt tokens. Longer prompts are skipped and counted.
    #[default(512)]
    #[schemars(range(min = 1))]
    pub prompt_length: usize,
    /// Maximum completion tokens, over all turns and tool responses.
    #[default(1024)]
    #[schemars(range(min = 1))]
    pub response_length: usize,
    /// Strings that end a completion, besides the end tokens. Special tokens are allowed. Rewards read the text before
    /// them.
    pub stop: Vec<String>,
    /// Maximum sequences sampled at a time.
    #[default(256)]
    #[schemars(range(min = 1))]
    pub max_num_seqs: usize,
    /// Tensor-parallel degree of sampling: consecutive ranks. Must divide the ranks and the heads.
    #[default(1)]
    #[schemars(range(min = 1))]
    pub tensor_model_parallel_size: usize,
    /// Maximum prompt tokens per forward pass, at least `max_num_seqs`. Longer prompts are prefilled in chunks.
    #[default(MAX_NUM_BATCHED_TOKENS)]
    #[schemars(range(min = 1))]
    pub max_num_batched_tokens: usize,
    /// Maximum tokens of prompt and completion, above `prompt_length`. `null`: `prompt_length` + `response_length`.
    #[schemars(range(min = 2))]
    pub max_model_len: Option<usize>,
    /// Sample with log-probs that equal the trainer's to the bit, so that updates can take them as the old ones and ratios
    /// on-policy are 1. Needs f32 on the CPU, or a GPU, which then decodes without the kernels for few rows; rejects
    /// settings and models that round otherwise in sampling than in training. `null`: on the CPU in f32, at no
    /// cost, unless such a setting or model, linear attention, `rollout_is` or `rollout_rs` prevents it.
    pub exact: Option<bool>,
    /// Float type of sampling, `bf16` or `f16`; log-probs then differ from the trainer's. `null`: the run's.
    pub precision: Option<Precision>,
    /// Quantize weights for sampling; log-probs then differ from the trainer's. On the CPU only in f32; not with
    /// `model.lora.base` or experts. `null`: none.
    pub quantization: Option<Quantization>,
    /// Disable graph capture of decoding steps, which does not change tokens. `null`: capture on CUDA, and on other
    /// GPUs with `cudagraph_capture_sizes`. `false`: capture on any GPU, rejected on the CPU.
    pub enforce_eager: Option<bool>,
    /// Batch sizes captured as graphs, 1 to `max_num_seqs`; smaller batches are padded. `null`: multiples of 8 to 64, of
    /// 32 above, and `max_num_seqs`.
    pub cudagraph_capture_sizes: Option<Vec<usize>>,
    /// Launch a decoding step before the host has read the last tokens, which does not change tokens. `null`: on
    /// hardware GPUs.
    pub async_scheduling: Option<bool>,
    /// Maximum KV cache. When it is full, the youngest sequences are preempted. `null`: as `max_num_seqs` needs.
    pub kv_cache_memory_bytes: Option<Bytes>,
    /// Format of keys and values.
    #[default(KvCacheDtype::Auto)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Instead of `kv_cache_memory_bytes`: fraction of device memory for weights, KV cache and temporaries in sampling.
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub gpu_memory_utilization: Option<f64>,
    /// Copy weights for faster decoding: repacked on a CPU (f32), fused on a GPU. `null`: if all weights are trained
    /// and `memory.budget` is unset.
    pub pack_weights: Option<bool>,
    /// Return KV cache memory to the device before training.
    #[default(true)]
    pub free_cache: bool,
    /// Score and train tokens with the experts that sampled them. Models without experts reject it.
    pub router_replay: bool,
    /// Replacement of groups with equal rewards (DAPO).
    pub dynamic_sampling: DynamicSampling,
    /// Sampling in validation and `firebrick eval`.
    pub val_kwargs: ValidationSampling,
    /// Multi-turn rollouts; the task needs an environment.
    pub multi_turn: MultiTurn,
}

/// Limits of multi-turn rollouts, under verl's names (`rollout.multi_turn`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MultiTurn {
    /// Maximum model turns; tool calls of the last are not run. `null`: as many as fit in `response_length`.
    #[schemars(range(min = 1))]
    pub max_assistant_turns: Option<usize>,
    /// Maximum characters of a tool response; longer ones are truncated and end with `...`. `null`: no limit.
    #[schemars(range(min = 1))]
    pub max_tool_response_length: Option<usize>,
    /// Format of tool calls. `null`: the chat template's, or `hermes`.
    pub format: Option<ToolParser>,
    /// Role of tool responses.
    pub tool_role: ToolRole,
}

/// Sampling in validation, under verl's names (`rollout.val_kwargs`).
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ValidationSampling {
    /// Completions per prompt; above 1 needs a temperature.
    #[default(1)]
    #[schemars(range(min = 1))]
    pub n: usize,
    /// Divisor of the logits; 0 is greedy.
    #[schemars(range(min = 0))]
    pub temperature: f64,
    /// Sample from the k likeliest tokens; −1 disables it.
    #[default(-1)]
    #[schemars(range(min = -1), extend("not" = {"const": 0}, "x-because" = "-1 samples from all tokens"))]
    pub top_k: i64,
    /// Sample from the likeliest tokens whose probabilities add up to this.
    #[default(1.0)]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub top_p: f64,
}

impl ValidationSampling {
    fn check(&self) -> Result<(), String> {
        let Self { n, temperature, .. } = *self;
        if n > 1 && temperature == 0.0 {
            return Err(format!(
                "rollout.val_kwargs.n is {n}, but its temperature is 0: greedy completions of a prompt are all the same; set \
                 rollout.val_kwargs.temperature (verl's usual value is 1.0), or n to 1"
            ));
        }
        Ok(())
    }
}

/// Replacement of groups whose rewards are all equal, under the names of verl's `algorithm.filter_groups`.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DynamicSampling {
    /// Replace groups without differences by new prompts; needs `rollout.n` above 1.
    pub enable: bool,
    /// What must differ in a group: `score` (total reward) or one reward's name.
    #[default(Self::SCORE.to_owned())]
    pub metric: String,
    /// Maximum rounds of prompts per step. Afterwards, groups of equal rewards fill the batch.
    #[default(10)]
    #[schemars(range(min = 1), extend("x-because" = "a step of equal rewards would never end"))]
    pub max_num_gen_batches: usize,
    /// Prompts drawn per missing group.
    #[default(1.0)]
    #[schemars(range(min = 1))]
    pub oversampling: f64,
}

impl DynamicSampling {
    /// Value of `metric` for the total reward.
    pub const SCORE: &'static str = "score";

    /// Prompts to draw for `missing` groups.
    pub fn prompts(&self, missing: usize) -> usize {
        if self.enable { (missing as f64 * self.oversampling).ceil() as usize } else { missing }
    }

    fn check(&self, group: usize) -> Result<(), String> {
        if self.enable && group < 2 {
            return Err(
                "rollout.dynamic_sampling needs rollout.n of at least 2: the rewards of one completion cannot differ"
                    .into(),
            );
        }
        Ok(())
    }
}

impl RolloutConfig {
    /// Sampling parameters of training.
    pub fn sampling(&self, stop_ids: Vec<u32>) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature,
            top_k: usize::try_from(self.top_k).ok(),
            top_p: self.top_p,
            min_p: self.min_p,
            max_new_tokens: self.response_length,
            stop_ids,
            stop_strings: self.stop.clone(),
        }
    }

    /// Sampling of validation, with the limits of training.
    pub fn validation(&self, stop_ids: Vec<u32>) -> SamplingParams {
        let ValidationSampling { temperature, top_k, top_p, .. } = self.val_kwargs;
        Self { temperature, top_k, top_p, min_p: 0.0, ..self.clone() }.sampling(stop_ids)
    }

    /// Greedy sampling with the same limits, for baselines.
    pub fn greedy(&self, stop_ids: Vec<u32>) -> SamplingParams {
        Self { temperature: 0.0, top_k: -1, top_p: 1.0, min_p: 0.0, ..self.clone() }.sampling(stop_ids)
    }

    /// Maximum tokens of a completion of the longest prompt.
    pub fn longest_response(&self) -> usize {
        let room = self.max_model_len.map(|max| max.saturating_sub(self.prompt_length));
        self.response_length.min(room.unwrap_or(usize::MAX))
    }

    /// Graph capture of decoding steps.
    pub fn cuda_graphs(&self) -> CudaGraphs {
        CudaGraphs { enforce_eager: self.enforce_eager, capture_sizes: self.cudagraph_capture_sizes.clone() }
    }

    /// Precision of sampling, in a run of precision `run`.
    pub fn precision(&self, run: Precision) -> Precision {
        self.precision.unwrap_or(run)
    }

    /// Rejects settings that a backend does not support, in a run of precision `run`.
    ///
    /// # Errors
    /// `Error::Config` with the setting and a remedy.
    pub fn check_on(&self, backend: Backend, run: Precision) -> Result<()> {
        let sampled = self.precision(run);
        if let (Some(setting), Backend::Cpu) = (self.requires_graphs(), backend) {
            return Err(Error::Config(format!(
                "rollout.{setting} requires captured graphs, but the CPU launches no kernels that a graph could replay \
                 and always runs eagerly; remove it"
            )));
        }
        match (self.quantization, backend) {
            (Some(Quantization::Int8), Backend::Cpu) if sampled.is_half() => Err(Error::Config(format!(
                "rollout.quantization: int8 computes in f32 on the CPU, but completions would be sampled in {sampled}; \
                     remove one of the two settings"
            ))),
            _ => Ok(()),
        }
    }

    /// The setting that requires captured graphs, if one does.
    pub(crate) fn requires_graphs(&self) -> Option<&'static str> {
        match (self.enforce_eager, &self.cudagraph_capture_sizes) {
            (Some(false), _) => Some("enforce_eager: false"),
            (_, Some(_)) => Some("cudagraph_capture_sizes"),
            _ => None,
        }
    }

    /// Rejects graph capture for a model without decoding steps to capture.
    ///
    /// # Errors
    /// `Error::Config` with the setting.
    pub fn check_graphs(&self, arch: &Arch) -> Result<()> {
        match self.requires_graphs() {
            Some(setting) if !arch.decodes_in_kernels() => Err(Error::Config(format!(
                "rollout.{setting} requires captured graphs, but {} decodes layer by layer (experts, gated attention \
                 or linear attention): nothing can be captured; remove it",
                arch.family.model_type()
            ))),
            _ => Ok(()),
        }
    }

    fn check_capture_sizes(&self) -> Result<(), String> {
        let Some(sizes) = &self.cudagraph_capture_sizes else {
            return Ok(());
        };
        if sizes.is_empty() || self.enforce_eager == Some(true) {
            return Err(
                "rollout.cudagraph_capture_sizes names the steps that are captured as graphs; to capture none, remove it and set \
                 rollout.enforce_eager: true"
                    .into(),
            );
        }
        let max = self.max_num_seqs;
        match sizes.iter().find(|&&size| size == 0 || size > max) {
            Some(size) => Err(format!(
                "rollout.cudagraph_capture_sizes has {size}, and a decoding step has 1 to {max} sequences (rollout.max_num_seqs)"
            )),
            None => Ok(()),
        }
    }

    pub(super) fn check(&self, run: Precision) -> Result<(), String> {
        if self.precision(run).width() > run.width() {
            return Err(format!(
                "rollout.precision: f32 has no effect on {run} weights; remove it, or set precision: f32"
            ));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(format!(
                "rollout.max_num_batched_tokens ({}) must be at least rollout.max_num_seqs ({}): a decoding step runs one \
                 token of each sequence",
                self.max_num_batched_tokens, self.max_num_seqs
            ));
        }
        if let Some(max) = self.max_model_len.filter(|&max| max <= self.prompt_length) {
            return Err(format!(
                "rollout.max_model_len ({max}) must be above rollout.prompt_length ({}), or the longest prompts get no \
                 completion",
                self.prompt_length
            ));
        }
        self.check_capture_sizes()?;
        if self.kv_cache_memory_bytes.is_some() && self.gpu_memory_utilization.is_some() {
            return Err(
                "rollout.kv_cache_memory_bytes and rollout.gpu_memory_utilization both limit the KV cache; set only one"
                    .into(),
            );
        }
        self.val_kwargs.check()?;
        self.dynamic_sampling.check(self.n)
    }

    /// Rejects settings that an architecture does not support.
    pub(crate) fn check_for(&self, arch: &Arch) -> Result<()> {
        let experts = arch.expert_layers().next().is_some();
        let refuse = |message: &str| Err(Error::Config(message.to_owned()));
        match (self.router_replay, experts) {
            (true, false) => refuse("rollout.router_replay is true, but the model has no experts; remove the key"),
            (true, true) if arch.windows.iter().all(Option::is_some) => refuse(
                "rollout.router_replay is true, but every layer of the model has a sliding window, and sliding-window \
                 layers evict KV blocks together with their recorded expert routes; set rollout.router_replay: false",
            ),
            _ if experts && self.quantization.is_some() => {
                refuse("rollout.quantization is not built for experts; remove the key to sample in the run's precision")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    #[test]
    fn graphs_of_a_model_that_decodes_layer_by_layer_are_refused() {
        let arch = |family: &str| {
            let config = json!({"model_type": family, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                "num_attention_heads": 2, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4});
            Arch::from_config(config.as_object().unwrap(), Path::new("config.json")).unwrap()
        };
        let [dense, experts] = ["qwen3", "qwen3_moe"].map(arch);
        let eager = RolloutConfig { enforce_eager: Some(false), ..RolloutConfig::default() };
        eager.check_graphs(&dense).unwrap();
        let refused = eager.check_graphs(&experts).unwrap_err().to_string();
        assert!(refused.contains("rollout.enforce_eager: false") && refused.contains("qwen3_moe"), "{refused}");
        for unasked in [None, Some(true)] {
            let config = RolloutConfig { enforce_eager: unasked, ..RolloutConfig::default() };
            config.check_graphs(&experts).unwrap();
        }
    }
}
