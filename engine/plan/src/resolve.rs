//! The plans that memory settings describe.

use crate::segmentation::spread;
use crate::{
    CriticMemory, Error, Granularity, MemoryConfig, ModelPlan, ParamOffload, Plan, Result, Role, RoleMemory,
    RolloutPlan, Zero,
};
use firebrick_arch::Arch;
use firebrick_spec::Home;

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

impl MemoryConfig {
    /// Takes another stage. Stage 3 frees gathered weights, which a kept graph would hold on to: it recomputes where it
    /// reshards.
    pub fn set_zero(&mut self, stage: Zero) {
        self.zero_stage = stage.number();
        self.gradient_checkpointing |= stage == Zero::Stage3 && self.reshard_after_forward;
    }

    /// The stage of `ZeRO`; the last one for a number above it, which [`check`](Self::check) refuses.
    #[must_use]
    pub fn zero(&self) -> Zero {
        Zero::STAGES[usize::from(self.zero_stage).min(Zero::STAGES.len() - 1)]
    }

    /// The policy's plan that these settings describe.
    ///
    /// # Errors
    /// `Error::Config` for settings that cannot work, or name layers that the model lacks; `Error::Plan` for a plan
    /// that it cannot run.
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
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn reference_plan(&self, arch: &Arch) -> Result<ModelPlan> {
        let RoleMemory { param_offload, score_tokens } = self.reference;
        let own = self.scorer(score_tokens, param_offload);
        // its weights alone can be shared out
        let zero_stage = match self.zero() {
            Zero::Stage3 => self.zero_stage,
            Zero::Off | Zero::Stage1 | Zero::Stage2 => 0,
        };
        Self { zero_stage, ..own }.plan(arch)
    }

    /// The plan of a model that only scores, with a budget of its own where it has one. Devices that are data parallel
    /// and nothing else share its weights out with those of the policy (`zero_stage: 3`).
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn scorer_plan(
        &self,
        arch: &Arch,
        score_tokens: Option<usize>,
        param_offload: ParamOffload,
    ) -> Result<ModelPlan> {
        let own = self.scorer(score_tokens, param_offload);
        let shared =
            [self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.ulysses_sequence_parallel_size];
        let zero_stage = match self.zero() {
            Zero::Stage3 if shared == [1; 3] => self.zero_stage,
            Zero::Off | Zero::Stage1 | Zero::Stage2 | Zero::Stage3 => 0,
        };
        Self { zero_stage, ..own }.plan(arch)
    }

    /// The settings of a model that only scores.
    fn scorer(&self, score_tokens: Option<usize>, param_offload: ParamOffload) -> Self {
        Self {
            score_tokens: score_tokens.unwrap_or(self.score_tokens),
            micro_batch_size: self.micro_batch_size,
            packing: self.packing,
            head_rows: self.head_rows,
            attention_rows: self.attention_rows,
            prefetch: self.prefetch,
            gradient_checkpointing: true,
            param_offload,
            ..Self::default()
        }
    }

    /// The plans of all models.
    ///
    /// # Errors
    /// As [`Self::plan`], for each model.
    pub fn plans(&self, arch: &Arch, reference: bool, critic: Option<&Arch>, max_num_seqs: usize) -> Result<Plan> {
        let mut models = std::collections::BTreeMap::from([(Role::Policy, self.plan(arch)?)]);
        if reference {
            models.insert(Role::Reference, self.reference_plan(arch)?);
        }
        if let Some(arch) = critic {
            models.insert(Role::Critic, self.critic_plan(arch)?);
        }
        Ok(Plan { models, rollout: RolloutPlan { max_num_seqs } })
    }

    /// The settings that the critic's plan is made of.
    ///
    /// # Errors
    /// `Error::Config` where `memory.critic` and the policy's settings cannot work together.
    pub fn critic_settings(&self) -> Result<Self> {
        let own = critic_over_policy(self);
        if self.critic.is_empty() {
            return Ok(own);
        }
        own.check().map_err(|e| match e {
            Error::Config(detail) => {
                Error::Config(format!("memory.critic, whose keys override the policy's: {detail}"))
            }
            other => other,
        })?;
        Ok(own)
    }

    /// The critic's plan.
    ///
    /// # Errors
    /// As [`Self::critic_settings`] and [`Self::plan`].
    pub fn critic_plan(&self, arch: &Arch) -> Result<ModelPlan> {
        self.critic_settings()?.plan(arch)
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
}

/// The policy's settings with the critic's own over them.
fn critic_over_policy(policy: &MemoryConfig) -> MemoryConfig {
    let own = policy.critic.clone();
    MemoryConfig {
        gradient_checkpointing: own.gradient_checkpointing.unwrap_or(policy.gradient_checkpointing),
        checkpoint_every: own.checkpoint_every.unwrap_or(policy.checkpoint_every),
        checkpoint_layers: own.checkpoint_layers.unwrap_or_else(|| policy.checkpoint_layers.clone()),
        checkpoint_ratio: own.checkpoint_ratio.unwrap_or(policy.checkpoint_ratio),
        recompute_granularity: own.recompute_granularity.unwrap_or(policy.recompute_granularity),
        activation_offload: own.activation_offload.unwrap_or(policy.activation_offload),
        activation_offload_group: own.activation_offload_group.unwrap_or(policy.activation_offload_group),
        param_offload: own.param_offload.unwrap_or(policy.param_offload),
        order: own.order.unwrap_or(policy.order),
        grad_offload: own.grad_offload.unwrap_or(policy.grad_offload),
        optimizer_offload: own.optimizer_offload.unwrap_or(policy.optimizer_offload),
        offload_fraction: own.offload_fraction.unwrap_or(policy.offload_fraction),
        moments: own.moments.unwrap_or(policy.moments),
        step_in_backward: own.step_in_backward.unwrap_or(policy.step_in_backward),
        packing: own.packing.unwrap_or(policy.packing),
        micro_batch_size: own.micro_batch_size.unwrap_or(policy.micro_batch_size),
        prefetch: own.prefetch.unwrap_or(policy.prefetch),
        head_rows: own.head_rows.unwrap_or(policy.head_rows),
        attention_rows: own.attention_rows.unwrap_or(policy.attention_rows),
        score_tokens: own.score_tokens.unwrap_or(policy.score_tokens),
        train_tokens: own.train_tokens.unwrap_or(policy.train_tokens),
        critic: CriticMemory::default(),
        ..policy.clone()
    }
}
