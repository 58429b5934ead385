//! The `memory` section of a configuration.

use crate::size::{Budget, Bytes};
use crate::{CriticMemory, Granularity, MomentKind, OptimizerOffload, Order, Packing, ParamOffload, Preset};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Settings of a model that is not trained.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct RoleMemory {
    /// Where its weights live.
    pub param_offload: ParamOffload,
    /// Most tokens of a micro-batch; the policy's `score_tokens` where absent.
    pub score_tokens: Option<usize>,
}

/// The `memory` section of a configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "switches that a user sets one by one")]
pub struct MemoryConfig {
    /// Starting values of the keys below and of some beside this section, under a name people know. In code,
    /// [`MemoryConfig::from`] sets the former and the builder of a run's configuration the latter; this field alone
    /// sets nothing.
    pub preset: Option<Preset>,
    /// A plan that `firebrick plan --output` wrote, to be run as it is (also `train --plan FILE`).
    pub plan: Option<std::path::PathBuf>,
    /// Device bytes that the planner may use: `8GiB`, plain bytes, or `auto`: available memory on the CPU, what CUDA's
    /// driver has free, another GPU's capacity. Without it the settings below are taken as they are.
    pub budget: Option<Budget>,
    /// Host bytes that the planner may use.
    pub host_budget: Option<Bytes>,
    /// Share of the budget that the planner leaves free for what no prediction knows.
    pub margin: f64,
    /// Device bytes above which a run counts as out of memory: what a smaller device would do.
    pub limit: Option<Bytes>,
    /// Whether work that runs out of memory (loading, sampling, scoring, an update, moving or saving weights) is done
    /// again under the next cheaper plan.
    pub recover: bool,
    /// Keep segment inputs and recompute on the way back, instead of keeping the whole graph
    /// (verl's `enable_gradient_checkpointing`).
    pub gradient_checkpointing: bool,
    /// Layers a segment (`NeMo` RL's `checkpoint_every`, Megatron's `recompute_num_layers`).
    pub checkpoint_every: usize,
    /// Only these layers (`NeMo` RL's `checkpoint_layers`).
    pub checkpoint_layers: Option<Vec<usize>>,
    /// Only this share of the layers, spread evenly.
    pub checkpoint_ratio: Option<f64>,
    /// What is recomputed as one piece (Megatron's `recompute_granularity`).
    pub recompute_granularity: Granularity,
    /// Kept inputs go to the host (verl's `enable_activation_offload`).
    pub activation_offload: bool,
    /// Kept inputs copied together.
    pub activation_offload_group: usize,
    /// Where the policy's weights live.
    pub param_offload: ParamOffload,
    /// With streamed weights: which of micro-batches and segments is the outer loop.
    pub order: Order,
    /// Gradients leave the device as soon as they are complete (Megatron's `grad_offload`).
    pub grad_offload: bool,
    /// Where the optimizer's state lives.
    pub optimizer_offload: OptimizerOffload,
    /// Share of the state on the host with `optimizer_offload: cpu` (Megatron's `optimizer_offload_fraction`).
    pub offload_fraction: f64,
    /// How moments are stored; `block8` is 8-bit `AdamW`.
    pub moments: MomentKind,
    /// Update each segment in the backward pass of the last micro-batch.
    pub step_in_backward: bool,
    /// What the ranks of a data parallel run share out of policy and critic (`DeepSpeed`'s `zero_optimization.stage`):
    /// 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too. One rank has it all, whatever the stage.
    pub zero_stage: u8,
    /// With `zero_stage: 3`: free a segment's gathered weights after its forward pass, and gather them again for its
    /// backward (FSDP's `reshard_after_forward`).
    pub reshard_after_forward: bool,
    /// Consecutive ranks that share the rows of every micro-batch (verl's key of this name, Ulysses, arXiv:2309.14509):
    /// each works on a part of the tokens, and on some of the heads where attention wants all tokens. 1: none do. It
    /// divides the ranks and the model's query heads; policy, reference and critic have the same.
    pub ulysses_sequence_parallel_size: usize,
    /// Consecutive ranks that share every matrix in training (Megatron's key of this name, arXiv:1909.08053): each has
    /// some heads, some of the MLP and some of the vocabulary. 1: none do. It divides the ranks and the model's heads;
    /// policy, reference and critic have the same. Sampling has a degree of its own,
    /// `rollout.tensor_model_parallel_size`.
    pub tensor_model_parallel_size: usize,
    /// Stages that the layers of models are divided into in training, each on ranks of its own (Megatron's key of this
    /// name, 1F1B, arXiv:1806.03377). 1: each rank has all layers. It divides the ranks, and is at most the number of
    /// layers; policy, reference and critic have the same.
    pub pipeline_model_parallel_size: usize,
    /// Copies in flight between host and device; 0 copies in place.
    pub prefetch: usize,
    /// Rows that the head projects at a time.
    pub head_rows: usize,
    /// Queries that attention scores at a time in sequences longer than that; 0 scores all at once.
    pub attention_rows: usize,
    /// How sequences lie in the rows of a micro-batch.
    pub packing: Packing,
    /// Most tokens of a training micro-batch; hard (verl's `ppo_max_token_len_per_gpu`). Padding counts where there is
    /// any.
    pub train_tokens: usize,
    /// Most tokens of a forward-only micro-batch (verl's `log_prob_max_token_len_per_gpu`).
    pub score_tokens: usize,
    /// Most sequences of a micro-batch, where a fixed size is wanted (verl's `ppo_micro_batch_size_per_gpu`).
    pub micro_batch_size: Option<usize>,
    /// In every step whose number this divides, each phase begins by giving the pools' free pages back (`PyTorch`'s
    /// `empty_cache`); 1: always, 0: never.
    pub cleanup_every: u64,
    /// The run's first so many steps leave a memory timeline (`PyTorch`'s memory snapshot); 0: none. The first steps
    /// after the start or the resumption.
    pub snapshot: u64,
    /// Allocations and releases that the timeline has, the last ones (verl's `trace_alloc_max_entries`); 0: none.
    pub trace: usize,
    /// The reference policy's own settings.
    pub reference: RoleMemory,
    /// The critic's own settings: any of the keys above that belong to a model. What it leaves out is the policy's.
    pub critic: CriticMemory,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            preset: None,
            plan: None,
            budget: None,
            host_budget: None,
            margin: 0.1,
            limit: None,
            recover: true,
            gradient_checkpointing: false,
            checkpoint_every: 1,
            checkpoint_layers: None,
            checkpoint_ratio: None,
            recompute_granularity: Granularity::Block,
            activation_offload: false,
            activation_offload_group: 1,
            param_offload: ParamOffload::None,
            order: Order::MicroMajor,
            grad_offload: false,
            optimizer_offload: OptimizerOffload::None,
            offload_fraction: 1.0,
            moments: MomentKind::F32,
            step_in_backward: false,
            zero_stage: 0,
            reshard_after_forward: true,
            ulysses_sequence_parallel_size: 1,
            tensor_model_parallel_size: 1,
            pipeline_model_parallel_size: 1,
            prefetch: 1,
            head_rows: 1024,
            attention_rows: 512,
            packing: Packing::Auto,
            train_tokens: 16_384,
            score_tokens: 32_768,
            micro_batch_size: None,
            cleanup_every: 0,
            snapshot: 0,
            trace: 0,
            reference: RoleMemory::default(),
            critic: CriticMemory::default(),
        }
    }
}

impl From<Preset> for MemoryConfig {
    /// The preset's settings, and the defaults of the others.
    fn from(preset: Preset) -> Self {
        let settings = serde_json::from_value(Value::Object(preset.settings()));
        let settings: Self = settings.expect("a preset's keys are settings of this section");
        Self { preset: Some(preset), ..settings }
    }
}
