//! The `memory` section of a configuration, under the words of the field, and the plan that it spells out.

use super::cut::spread;
use super::{Layout, ModelPlan, MomentKind, OptimizerPlan, Order, Plan, Preset, Role, RolloutPlan};
use crate::{Error, Result};
use firebrick_spec::Arch;
use firebrick_spec::Home;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Which layers keep their input instead of their graph; exactly one of the ways of saying so.
#[derive(Clone, Debug, PartialEq)]
enum Checkpointing {
    /// None.
    Off,
    /// All layers, this many a segment.
    Every(usize),
    /// These layers.
    Layers(Vec<usize>),
    /// Every attention and MLP half by itself.
    Halves,
}

/// What is run again as one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Whole layers.
    #[default]
    Block,
    /// Attention and MLP halves: half the live graph, twice the kept inputs.
    Half,
}

/// Where weights live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamOffload {
    /// On the device, always.
    #[default]
    None,
    /// On the host in phases that do not use the model (verl's `param_offload`).
    Idle,
    /// On the host, visiting the device segment by segment.
    Streamed,
}

/// Where the optimizer's state lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerOffload {
    /// On the device, always.
    #[default]
    None,
    /// On the host outside the update (verl's `optimizer_offload`).
    Idle,
    /// On the host, always; the update is computed there (Megatron's `optimizer_cpu_offload`).
    Cpu,
}

/// How the sequences of a micro-batch lie in its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Whichever was measured to be faster.
    #[default]
    Auto,
    /// One behind the other, without padding (verl's `use_remove_padding`).
    Packed,
    /// Each padded to the longest of its micro-batch.
    Padded,
}

impl Packing {
    /// The layout it comes to.
    #[must_use]
    pub fn layout(self) -> Layout {
        match self {
            Self::Auto | Self::Packed => Layout::Packed,
            Self::Padded => Layout::Padded,
        }
    }
}

/// Settings of a model that is not trained.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RoleMemory {
    /// Where its weights live.
    pub param_offload: ParamOffload,
    /// Most tokens of a micro-batch; the policy's `score_tokens` where absent.
    pub score_tokens: Option<usize>,
}

/// The `memory` section of a configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "switches that a user sets one by one"
)]
pub struct MemoryConfig {
    /// Starting values of the keys below, under a name people know.
    pub preset: Option<Preset>,
    /// A plan that `firebrick plan --output` wrote, to be run as it is (also `train --plan FILE`).
    pub plan: Option<std::path::PathBuf>,
    /// Device bytes that the planner may use: `8GiB`, plain bytes, or `auto`: available memory on the CPU, a GPU's capacity. Without it the
    /// settings below are taken as they are.
    pub budget: Option<super::size::Budget>,
    /// Host bytes that the planner may use.
    pub host_budget: Option<super::size::Bytes>,
    /// Share of the budget that the planner leaves free for what no prediction knows.
    pub margin: f64,
    /// Device bytes above which a run counts as out of memory: what a smaller device would do.
    pub limit: Option<super::size::Bytes>,
    /// Whether sampling, scoring, or the forward and backward passes of an update that run out of memory are run again under the
    /// next cheaper plan.
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
    /// Copies in flight between host and device; 0 copies in place.
    pub prefetch: usize,
    /// Rows that the head projects at a time.
    pub head_rows: usize,
    /// Queries that attention scores at a time in sequences longer than that; 0 scores all at once.
    pub attention_rows: usize,
    /// How sequences lie in the rows of a micro-batch.
    pub packing: Packing,
    /// Most tokens of a training micro-batch; hard (verl's `ppo_max_token_len_per_gpu`). Padding counts where there is any.
    pub train_tokens: usize,
    /// Most tokens of a forward-only micro-batch (verl's `log_prob_max_token_len_per_gpu`).
    pub score_tokens: usize,
    /// Most sequences of a micro-batch, where a fixed size is wanted (verl's `ppo_micro_batch_size_per_gpu`).
    pub micro_batch_size: Option<usize>,
    /// In every step whose number this divides, each phase begins by giving the pools' free pages back (`PyTorch`'s
    /// `empty_cache`); 1: always, 0: never.
    pub cleanup_every: u64,
    /// The reference policy's own settings.
    pub reference: RoleMemory,
    /// The critic's own settings: any of the keys above that belong to a model. What it leaves out is the policy's.
    pub critic: Map<String, Value>,
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
            prefetch: 1,
            head_rows: 1024,
            attention_rows: 512,
            packing: Packing::Auto,
            train_tokens: 16_384,
            score_tokens: 32_768,
            micro_batch_size: None,
            cleanup_every: 0,
            reference: RoleMemory::default(),
            critic: Map::new(),
        }
    }
}

impl MemoryConfig {
    /// Refuses settings that cannot work, whatever the model.
    pub fn check(&self) -> Result<()> {
        self.check_sizes()?;
        self.check_switches()?;
        self.of_critic().map(|_| ())
    }

    /// The policy's plan that these settings spell out.
    pub fn plan(&self, arch: &Arch) -> Result<ModelPlan> {
        self.check()?;
        let mut plan = match self.checkpointing(arch)? {
            Checkpointing::Off => ModelPlan::plain(arch, self),
            Checkpointing::Every(blocks) => ModelPlan::checkpoint_every(arch, self, blocks),
            Checkpointing::Layers(layers) => ModelPlan::checkpoint_layers(arch, self, &layers),
            Checkpointing::Halves => ModelPlan::checkpoint_halves(arch, self),
        };
        if self.activation_offload {
            plan = plan.offload_inputs();
        }
        match self.param_offload {
            ParamOffload::None => {}
            ParamOffload::Idle => plan.idle = Home::Host,
            ParamOffload::Streamed => plan = plan.stream_weights(arch),
        }
        if self.grad_offload {
            plan.grads = Home::Host;
        }
        plan.check(arch)?;
        Ok(plan)
    }

    /// The plan of the reference policy.
    pub fn reference_plan(&self, arch: &Arch) -> Result<ModelPlan> {
        let RoleMemory {
            param_offload,
            score_tokens,
        } = self.reference;
        self.scorer_plan(arch, score_tokens, param_offload)
    }

    /// The plan of a model that only scores, with a budget of its own where it has one.
    pub fn scorer_plan(
        &self,
        arch: &Arch,
        score_tokens: Option<usize>,
        param_offload: ParamOffload,
    ) -> Result<ModelPlan> {
        let own = Self {
            score_tokens: score_tokens.unwrap_or(self.score_tokens),
            micro_batch_size: self.micro_batch_size,
            packing: self.packing,
            head_rows: self.head_rows,
            attention_rows: self.attention_rows,
            prefetch: self.prefetch,
            gradient_checkpointing: true,
            param_offload,
            ..Self::default()
        };
        own.plan(arch)
    }

    /// The plans of all models.
    pub fn plans(
        &self,
        arch: &Arch,
        reference: bool,
        critic: Option<&Arch>,
        max_num_seqs: usize,
    ) -> Result<Plan> {
        let mut models = std::collections::BTreeMap::from([(Role::Policy, self.plan(arch)?)]);
        if reference {
            models.insert(Role::Reference, self.reference_plan(arch)?);
        }
        if let Some(arch) = critic {
            models.insert(Role::Critic, self.critic_plan(arch)?);
        }
        Ok(Plan {
            models,
            rollout: RolloutPlan { max_num_seqs },
        })
    }

    pub(super) fn optimizer_plan(&self) -> OptimizerPlan {
        OptimizerPlan {
            home: match self.optimizer_offload {
                OptimizerOffload::Cpu => Home::Host,
                _ => Home::Device,
            },
            offload_fraction: self.offload_fraction,
            idle: match self.optimizer_offload {
                OptimizerOffload::Idle => Home::Host,
                _ => Home::Device,
            },
            moments: self.moments,
            in_backward: self.step_in_backward,
        }
    }

    fn checkpointing(&self, arch: &Arch) -> Result<Checkpointing> {
        if !self.gradient_checkpointing {
            return Ok(Checkpointing::Off);
        }
        if self.recompute_granularity == Granularity::Half {
            return Ok(Checkpointing::Halves);
        }
        match (&self.checkpoint_layers, self.checkpoint_ratio) {
            (None, None) => Ok(Checkpointing::Every(self.checkpoint_every)),
            (None, Some(ratio)) => Ok(Checkpointing::Layers(spread(arch.num_layers, ratio))),
            (Some(layers), _) => match layers.iter().find(|l| **l >= arch.num_layers) {
                Some(l) => Err(Error::Config(format!(
                    "memory.checkpoint_layers names layer {l}; the model has layers 0 to {}",
                    arch.num_layers - 1
                ))),
                None => Ok(Checkpointing::Layers(layers.clone())),
            },
        }
    }

    /// Ways of choosing layers that contradict each other.
    fn check_checkpointing(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("memory.{what}")));
        let chosen = self.checkpoint_layers.is_some() || self.checkpoint_ratio.is_some();
        let halves = self.recompute_granularity == Granularity::Half;
        if !self.gradient_checkpointing && (chosen || self.checkpoint_every != 1) {
            return bad(
                "checkpoint_every, checkpoint_layers and checkpoint_ratio say which layers to checkpoint; turn on \
                 memory.gradient_checkpointing too",
            );
        }
        if !self.gradient_checkpointing && halves {
            return bad(
                "recompute_granularity: half goes with memory.gradient_checkpointing: true",
            );
        }
        if halves && (chosen || self.checkpoint_every != 1) {
            return bad(
                "recompute_granularity: half cuts every layer in two; it goes with neither checkpoint_every, \
                 checkpoint_layers nor checkpoint_ratio",
            );
        }
        if self.checkpoint_layers.is_some() && self.checkpoint_ratio.is_some() {
            return bad(
                "checkpoint_layers and checkpoint_ratio are two ways to choose layers; give one",
            );
        }
        if chosen && self.checkpoint_every != 1 {
            return bad(
                "checkpoint_every cuts all layers; it does not go with checkpoint_layers or checkpoint_ratio",
            );
        }
        match self.checkpoint_ratio {
            Some(ratio) if !(0.0..=1.0).contains(&ratio) => bad(&format!(
                "checkpoint_ratio is {ratio}; a share of the layers between 0 and 1 was expected"
            )),
            _ => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<()> {
        let sizes = [
            ("checkpoint_every", self.checkpoint_every),
            ("head_rows", self.head_rows),
            ("train_tokens", self.train_tokens),
            ("score_tokens", self.score_tokens),
            ("micro_batch_size", self.micro_batch_size.unwrap_or(1)),
            ("activation_offload_group", self.activation_offload_group),
            (
                "reference.score_tokens",
                self.reference.score_tokens.unwrap_or(1),
            ),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(Error::Config(format!("memory.{key} should be at least 1")));
        }
        if !(0.0..0.9).contains(&self.margin) {
            return Err(Error::Config(format!(
                "memory.margin is {}; a share of the budget between 0 and 0.9 was expected",
                self.margin
            )));
        }
        if !(0.0..=1.0).contains(&self.offload_fraction) {
            return Err(Error::Config(format!(
                "memory.offload_fraction is {}; a share between 0 and 1 was expected",
                self.offload_fraction
            )));
        }
        Ok(())
    }

    /// Combinations that would do nothing, or not what they say.
    fn check_switches(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("memory.{what}")));
        self.check_checkpointing()?;
        if self.activation_offload && !self.gradient_checkpointing {
            return bad(
                "activation_offload moves the inputs that gradient checkpointing keeps, and a whole graph cannot leave \
                 the device: turn on memory.gradient_checkpointing too",
            );
        }
        if self.activation_offload_group > 1 && !self.activation_offload {
            return bad("activation_offload_group goes with memory.activation_offload: true");
        }
        if self.param_offload == ParamOffload::Streamed && !self.gradient_checkpointing {
            return bad(
                "param_offload: streamed releases a segment's weights after it ran, and a kept graph would hold on to \
                 them: turn on memory.gradient_checkpointing too",
            );
        }
        if self.order == Order::SegmentMajor && self.param_offload != ParamOffload::Streamed {
            return bad(
                "order: segment_major shares the fetches of streamed weights among micro-batches and costs memory \
                 otherwise: it goes with memory.param_offload: streamed",
            );
        }
        if self.offload_fraction < 1.0 && self.optimizer_offload != OptimizerOffload::Cpu {
            return bad("offload_fraction goes with memory.optimizer_offload: cpu");
        }
        if self.step_in_backward && self.optimizer_offload == OptimizerOffload::Idle {
            return bad(
                "step_in_backward uses the optimizer's state during the backward pass, so optimizer_offload: idle would \
                 free nothing there; use optimizer_offload: cpu",
            );
        }
        Ok(())
    }
}
