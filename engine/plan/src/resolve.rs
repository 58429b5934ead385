//! Checks of the memory settings, and the plans that they describe.

use crate::technique::require;
use crate::{
    Error, MemoryConfig, ModelPlan, ParamOffload, Plan, Result, Role, RoleMemory, RolloutPlan, TECHNIQUES, Zero,
};
use firebrick_arch::Arch;

/// Most events that `memory.trace` keeps, and about what one of them takes.
const MAX_TRACED: usize = 1_000_000;
const TRACED_BYTES: usize = 450;

impl MemoryConfig {
    /// Rejects settings that cannot work with any model.
    ///
    /// # Errors
    /// `Error::Config` with the first setting that cannot work, by its key.
    pub fn check(&self) -> Result<()> {
        self.checks().collect()
    }

    /// The first mistake of each technique, of the section's other keys, and of the critic's overrides.
    pub fn checks(&self) -> impl Iterator<Item = Result<()>> {
        let checks = TECHNIQUES.iter().map(|technique| technique.check(self));
        let mut checks: Vec<Result<()>> = checks.chain([self.check_run()]).collect();
        // the critic's settings stand over these, and would repeat their mistakes
        if checks.iter().all(Result::is_ok) && !self.critic.is_empty() {
            checks.push(self.critic_settings().map(|_| ()));
        }
        checks.into_iter()
    }

    /// Checks the keys that are no technique's.
    fn check_run(&self) -> Result<()> {
        require(
            self.trace <= MAX_TRACED,
            format_args!(
                "trace is {}; at most {MAX_TRACED} allocations can be traced, which take about {} MB of host memory",
                self.trace,
                MAX_TRACED * TRACED_BYTES / 1_000_000
            ),
        )?;
        require(
            (0.0..0.9).contains(&self.margin),
            format_args!("margin is {}; a share of the budget between 0 and 0.9 was expected", self.margin),
        )
    }

    /// The policy's plan that these settings describe.
    ///
    /// # Errors
    /// `Error::Config` for settings that cannot work, or name layers that the model lacks; `Error::Plan` for a plan
    /// that it cannot run.
    pub fn plan(&self, arch: &Arch) -> Result<ModelPlan> {
        self.check()?;
        let mut plan = ModelPlan::plain(arch);
        for technique in TECHNIQUES {
            technique.check_model(self, arch)?;
            technique.apply(self, arch, &mut plan);
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
        self.scorer(score_tokens, param_offload, true).plan(arch)
    }

    /// The plan of a model that only scores, with its own token budget if it has one. With only data parallelism,
    /// `zero_stage: 3` shards its weights as the policy's.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn scorer_plan(
        &self,
        arch: &Arch,
        score_tokens: Option<usize>,
        param_offload: ParamOffload,
    ) -> Result<ModelPlan> {
        let degrees =
            [self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.ulysses_sequence_parallel_size];
        self.scorer(score_tokens, param_offload, degrees == [1; 3]).plan(arch)
    }

    /// The settings of a model that only scores, which shards its weights where the policy does and `shards` is set.
    fn scorer(&self, score_tokens: Option<usize>, param_offload: ParamOffload, shards: bool) -> Self {
        Self {
            score_tokens: score_tokens.unwrap_or(self.score_tokens),
            micro_batch_size: self.micro_batch_size,
            packing: self.packing,
            share_prefix: self.share_prefix,
            head_rows: self.head_rows,
            attention_rows: self.attention_rows,
            prefetch: self.prefetch,
            gradient_checkpointing: true,
            zero_stage: if shards && self.zero() == Zero::Stage3 { self.zero_stage } else { 0 },
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
        let refuse =
            |detail: String| Error::Config(format!("memory.critic, whose keys override the policy's: {detail}"));
        let settings = self.critic.over(self).map_err(|e| refuse(e.to_string()))?;
        if !self.critic.is_empty() {
            settings.check().map_err(|e| match e {
                Error::Config(detail) => refuse(detail),
                other => other,
            })?;
        }
        Ok(settings)
    }

    /// The critic's plan.
    ///
    /// # Errors
    /// As [`Self::critic_settings`] and [`Self::plan`].
    pub fn critic_plan(&self, arch: &Arch) -> Result<ModelPlan> {
        self.critic_settings()?.plan(arch)
    }
}

impl ModelPlan {
    /// Rejects a plan that does not cover the model, or that no schedule can execute.
    ///
    /// # Errors
    /// `Error::Plan` with the first mistake: segments that leave units out, streamed or resharded weights under a kept
    /// graph, a size of 0.
    pub fn check(&self, arch: &Arch) -> Result<()> {
        self.check_units(arch)?;
        TECHNIQUES.iter().try_for_each(|technique| technique.check_plan(self, arch))
    }
}
