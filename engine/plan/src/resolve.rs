//! Checks of the memory settings, and the plans that they describe.

use crate::{
    Error, MemoryConfig, ModelPlan, ParamOffload, Plan, Result, Role, RoleMemory, RolloutPlan, TECHNIQUES, Zero,
};
use firebrick_arch::Arch;
use firebrick_settings::{schema_of, violations};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The schema of the section.
static SCHEMA: LazyLock<Value> = LazyLock::new(schema_of::<MemoryConfig>);

impl MemoryConfig {
    /// Rejects settings out of their range, and those that cannot work with any model.
    ///
    /// # Errors
    /// `Error::Config` with the first setting that cannot work, by its key.
    pub fn check(&self) -> Result<()> {
        self.check_ranges()?;
        self.checks().collect()
    }

    fn check_ranges(&self) -> Result<()> {
        let settings = serde_json::to_value(self).unwrap_or_default();
        let violation = violations(&SCHEMA, &settings).into_iter().next();
        violation.map_or(Ok(()), |violation| Err(Error::Config(format!("memory.{}", violation.message))))
    }

    /// The first mistake of each technique and of the critic's overrides, in settings within their range.
    pub fn checks(&self) -> impl Iterator<Item = Result<()>> {
        let mut checks: Vec<Result<()>> = TECHNIQUES.iter().map(|technique| technique.check(self)).collect();
        // the critic's settings stand over these, and would repeat their mistakes
        if checks.iter().all(Result::is_ok) && !self.critic.is_empty() {
            checks.push(self.critic_settings().map(|_| ()));
        }
        checks.into_iter()
    }

    /// The policy's plan that these settings describe.
    ///
    /// # Errors
    /// `Error::Config` for settings that cannot work, or name layers that the model lacks; `Error::Plan` for a plan
    /// that it cannot run.
    pub fn plan(&self, arch: &Arch) -> Result<ModelPlan> {
        self.check_ranges()?;
        self.plan_in_range(arch)
    }

    /// [`Self::plan`] of settings within their range.
    fn plan_in_range(&self, arch: &Arch) -> Result<ModelPlan> {
        self.checks().collect::<Result<()>>()?;
        let mut plan = ModelPlan::plain(arch);
        for technique in TECHNIQUES {
            technique.check_model(self, arch)?;
            technique.apply(self, arch, &mut plan);
        }
        plan.check(arch)?;
        Ok(plan)
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
        self.check_ranges()?;
        self.plans_in_range(arch, reference, critic, max_num_seqs)
    }

    /// [`Self::plans`] of settings within their range.
    pub(crate) fn plans_in_range(
        &self,
        arch: &Arch,
        reference: bool,
        critic: Option<&Arch>,
        max_num_seqs: usize,
    ) -> Result<Plan> {
        let mut models = BTreeMap::from([(Role::Policy, self.plan_in_range(arch)?)]);
        if reference {
            let RoleMemory { param_offload, score_tokens } = self.reference;
            let reference = self.scorer(score_tokens, param_offload, true);
            models.insert(Role::Reference, reference.plan_in_range(arch)?);
        }
        if let Some(arch) = critic {
            models.insert(Role::Critic, self.critic_settings()?.plan_in_range(arch)?);
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
            settings.checks().collect::<Result<()>>().map_err(|e| match e {
                Error::Config(detail) => refuse(detail),
                other => other,
            })?;
        }
        Ok(settings)
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
