//! The `memory` section of a configuration.

use crate::size::{Budget, Bytes};
use crate::{CriticMemory, Granularity, MomentKind, OptimizerOffload, Order, Packing, ParamOffload, Preset};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Memory settings of a model that is not trained.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct RoleMemory {
    /// Location of the reference policy's weights.
    pub param_offload: ParamOffload,
    /// Maximum tokens per micro-batch of the reference policy. `null`: `memory.score_tokens`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub score_tokens: Option<usize>,
}

/// The `memory` section of a configuration. In code, [`MemoryConfig::from`] sets a preset's values in this section, and
/// the builder of a run's configuration its other values; the field `preset` by itself sets nothing.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "switches that a user sets one by one")]
pub struct MemoryConfig {
    /// Starting values, also of `precision`, `rollout.gpu_memory_utilization` and `rollout.max_num_seqs` if the device
    /// supports them.
    pub preset: Option<Preset>,
    /// File from `firebrick plan --output`, run as it is regardless of other keys.
    pub plan: Option<std::path::PathBuf>,
    /// Device memory for a plan: a size, or `auto` (CPU: available, CUDA: free, other GPUs: total memory). The planner
    /// chooses what to recompute and offload; sizes are upper limits. `null`: the keys apply as they are.
    pub budget: Option<Budget>,
    /// Host memory for a plan. `null`: no limit.
    pub host_budget: Option<Bytes>,
    /// Fraction of the budget to leave free.
    #[cfg_attr(feature = "schema", schemars(range(min = 0), extend("exclusiveMaximum" = 0.9)))]
    pub margin: f64,
    /// Device memory above which the run counts as out of memory.
    pub limit: Option<Bytes>,
    /// Repeat a phase that runs out of memory under a cheaper plan.
    pub recover: bool,
    /// Keep only the inputs of segments and recompute activations in the backward pass: less memory, about a third more
    /// time.
    pub gradient_checkpointing: bool,
    /// Layers per segment. Needs `gradient_checkpointing`. Set at most one of this key, `checkpoint_layers`,
    /// `checkpoint_ratio` and `recompute_granularity: half`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub checkpoint_every: usize,
    /// Indices of recomputed layers: `[0, 4, 8]`. `null`: all.
    pub checkpoint_layers: Option<Vec<usize>>,
    /// Fraction of recomputed layers, evenly spaced. `null`: all.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub checkpoint_ratio: Option<f64>,
    /// Unit of recomputation.
    pub recompute_granularity: Granularity,
    /// Store checkpointed activations on the host. Needs `gradient_checkpointing`.
    pub activation_offload: bool,
    /// Activations per copy. Needs `activation_offload`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub activation_offload_group: usize,
    /// Location of the policy's weights outside rollout. `streamed` needs `gradient_checkpointing` of all layers.
    pub param_offload: ParamOffload,
    /// Outer loop with streamed weights or `zero_stage: 3`.
    pub order: Order,
    /// Accumulate gradients on the host.
    pub grad_offload: bool,
    /// Location of the optimizer's state.
    pub optimizer_offload: OptimizerOffload,
    /// Fraction of parameters updated on the host with `optimizer_offload: cpu`.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1)))]
    pub offload_fraction: f64,
    /// Format of optimizer moments; arithmetic is f32.
    pub moments: MomentKind,
    /// Update each segment in the last backward pass and free its gradient. Needs `optim.clip_grad: null`, no loss
    /// scale and one rank; not with `optimizer_offload: idle`.
    pub step_in_backward: bool,
    /// What data-parallel ranks shard: 1 optimizer state, 2 also gradients, 3 also weights (FSDP). With `budget`, the
    /// lowest stage.
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 3)))]
    pub zero_stage: u8,
    /// With `zero_stage: 3`, free gathered weights after the forward pass. Needs `gradient_checkpointing` of all
    /// layers; `false` gathers half as often.
    pub reshard_after_forward: bool,
    /// Ulysses degree: consecutive ranks that split the tokens of each micro-batch. Must divide the ranks and query
    /// heads.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub ulysses_sequence_parallel_size: usize,
    /// Tensor-parallel degree of training: consecutive ranks that shard each layer. Must divide the ranks, heads and
    /// MLP width.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub tensor_model_parallel_size: usize,
    /// Pipeline stages of training (1F1B). Must divide the ranks and be at most the layers; `zero_stage` at most 1.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub pipeline_model_parallel_size: usize,
    /// Host copies in flight, and segments gathered ahead with `zero_stage: 3`. 0: synchronous.
    pub prefetch: usize,
    /// Rows (tokens) per chunk of logits; full logits are never stored.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub head_rows: usize,
    /// Queries per chunk of attention scores; 0: all.
    pub attention_rows: usize,
    /// Layout of sequences in a micro-batch.
    pub packing: Packing,
    /// Maximum tokens per training micro-batch, at least `rollout.prompt_length` + `rollout.response_length`. Padding
    /// counts.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub train_tokens: usize,
    /// Maximum tokens per forward-only micro-batch (old and reference log-probs); lower limit as `train_tokens`.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub score_tokens: usize,
    /// Maximum sequences per micro-batch. `null`: no limit.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub micro_batch_size: Option<usize>,
    /// Every this many steps, return free pages to the device before each phase (`torch.cuda.empty_cache`). 0: never.
    pub cleanup_every: u64,
    /// First steps, after a start or resumption, recorded in `memory_timeline.json`. 0: only if the run ends out of
    /// memory.
    pub snapshot: u64,
    /// Latest allocations and releases to include in the timeline.
    #[cfg_attr(feature = "schema", schemars(range(max = 1_000_000)))]
    pub trace: usize,
    /// Memory settings of the reference policy.
    pub reference: RoleMemory,
    /// Memory settings of the critic, by default the policy's. With `budget`, sizes are upper limits.
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
