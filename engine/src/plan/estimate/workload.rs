//! What a run asks for, as far as its memory depends on it.

use super::ModelPlan;
use crate::Result;
use crate::checkpoint::critic_architecture;
use crate::config::{OldLogProbs, RunConfig, SftConfig};
use crate::data::DatasetStats;
use crate::objective::Objective;
use crate::reward as reward_model;
use crate::task::{RewardModelConfig, Rewards, TaskConfig};
use firebrick_backends::Precision;
use firebrick_models::adapter::LoraConfig;
use firebrick_models::{Arch, Prepack};

/// What a run asks for, memory decisions apart.
#[derive(Clone, Debug, PartialEq)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a part of a step that there is or is not"
)]
pub struct Workload {
    /// The policy.
    pub arch: Arch,
    /// Most tokens of a prompt.
    pub prompt_length: u64,
    /// Most tokens of a completion.
    pub response_length: u64,
    /// Prompts a step.
    pub prompts: u64,
    /// Completions a prompt.
    pub group: u64,
    /// Every prompt has a greedy completion besides, which is judged and not trained on (`ReMax`).
    pub greedy: bool,
    /// Prompts an optimizer step.
    pub mini_batch: u64,
    /// Passes over a step's rollouts.
    pub epochs: u64,
    /// Most tokens of a forward of prompts.
    pub max_num_batched_tokens: u64,
    /// Most bytes of keys and values, where there is a limit.
    pub kv_cache_bytes: Option<u64>,
    /// The copies that sampling makes of the matrices, where a kernel reads them.
    pub prepack: Prepack,
    /// Validation prompts; more than can be sampled at a time where their number is not known.
    pub validation: u64,
    /// Adapters, where they alone are trained.
    pub lora: Option<LoraConfig>,
    /// A second model, the frozen reference policy, scores the rollouts.
    pub reference: bool,
    /// The policy scores the rollouts with its adapters off: the reference of a run that trains them.
    pub adapters_off: bool,
    /// The policy scores its own rollouts before the update.
    pub old_log_probs: bool,
    /// The loss looks at entropy.
    pub entropy: bool,
    /// The policy scores every optimizer step once more before its first backward: something is chosen out of the whole step.
    pub scores: bool,
    /// Gradients are clipped by their global norm, so that no segment can be updated before all are complete.
    pub clips: bool,
    /// Losses are scaled, so that all gradients are seen before any is applied.
    pub scales_loss: bool,
    /// What completions are sampled in.
    pub rollout_precision: Precision,
    /// A critic, where one is trained beside the policy.
    pub critic: Option<CriticWork>,
    /// Reward models that score the rollouts on the run's device. Their plans are those of their own settings.
    pub rewards: Vec<RewardWork>,
    /// Supervised training: what a step learns from instead of rollouts. Each example counts as a prompt of its own.
    pub examples: Option<Examples>,
}

/// What supervised training learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Examples {
    /// Most tokens of one.
    pub length: u64,
    /// Those whose loss is validated.
    pub validation: u64,
}

/// What a run asks for a reward model.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardWork {
    /// Its architecture, with a scalar head.
    pub arch: Arch,
    /// Its plan.
    pub plan: ModelPlan,
}

impl RewardWork {
    /// Those of a list of rewards that compute on the run's device.
    pub fn of(rewards: &Rewards, config: &RunConfig) -> Result<Vec<Self>> {
        let here = |own: &RewardModelConfig| own.device.is_none_or(|own| own == config.device);
        rewards
            .models()
            .filter(|(_, own)| here(own))
            .map(|(name, own)| {
                let arch = reward_model::architecture(name, own)?.in_precision(config.precision);
                let memory = &config.memory;
                let plan = memory.scorer_plan(&arch, own.score_tokens, own.param_offload)?;
                Ok(Self { arch, plan })
            })
            .collect()
    }
}

/// What a run asks for a critic.
#[derive(Clone, Debug, PartialEq)]
pub struct CriticWork {
    /// Its architecture, with a scalar head.
    pub arch: Arch,
    /// Its gradients are clipped by their global norm.
    pub clips: bool,
}

impl Workload {
    /// The least that a step of GRPO asks for: `prompts` groups of `group` completions, one optimizer step over all of them,
    /// clipped by the global norm; the policy scores them itself, and there is no other model.
    #[must_use]
    pub fn grpo(
        arch: Arch,
        [prompt_length, response_length]: [u64; 2],
        prompts: u64,
        group: u64,
    ) -> Self {
        Self {
            rollout_precision: arch.precision,
            arch,
            prompt_length,
            response_length,
            prompts,
            group,
            greedy: false,
            mini_batch: prompts,
            epochs: 1,
            max_num_batched_tokens: 2048,
            kv_cache_bytes: None,
            prepack: Prepack::default(),
            validation: 0,
            lora: None,
            reference: false,
            adapters_off: false,
            old_log_probs: true,
            entropy: false,
            scores: false,
            clips: true,
            scales_loss: false,
            critic: None,
            rewards: Vec::new(),
            examples: None,
        }
    }

    /// The workload of a configuration.
    pub fn new(config: &RunConfig, arch: &Arch) -> Result<Self> {
        let needs = config.objective.build()?.needs();
        let lora = config.model.lora.as_ref();
        let lora = lora.map(|lora| lora.shape(arch)).transpose()?;
        let compares = needs.reference;
        let prompts = config.trainer.train_batch_size as u64;
        let shared = config.shared_critic().is_some();
        Ok(Self {
            arch: if shared {
                arch.clone().with_joint_value_head()
            } else {
                arch.clone()
            },
            prompt_length: config.rollout.prompt_length as u64,
            response_length: config.rollout.longest_response() as u64,
            prompts,
            group: config.rollout.n as u64,
            greedy: needs.greedy,
            mini_batch: config
                .update
                .ppo_mini_batch_size
                .map_or(prompts, |n| n as u64),
            epochs: config.update.ppo_epochs as u64,
            max_num_batched_tokens: config.rollout.max_num_batched_tokens as u64,
            kv_cache_bytes: config.rollout.kv_cache_memory_bytes.map(|bytes| bytes.0),
            prepack: config.prepack(),
            validation: config
                .trainer
                .val_max_samples
                .map_or(u64::MAX, |n| n as u64),
            reference: compares && lora.is_none(),
            adapters_off: compares && lora.is_some(),
            lora,
            // values of a shared trunk come out of the same pass
            old_log_probs: shared || config.update.old_log_probs == OldLogProbs::Trainer,
            entropy: needs.entropy,
            scores: needs.scores,
            clips: config.optim.clip_grad.is_some(),
            scales_loss: config.scales_loss(),
            rollout_precision: config.rollout.precision(config.precision),
            critic: config
                .own_critic()
                .map(|critic| {
                    Ok::<_, crate::Error>(CriticWork {
                        arch: critic_architecture(critic, arch)?,
                        clips: critic.optim.clip_grad.is_some(),
                    })
                })
                .transpose()?,
            rewards: match &config.task {
                Some(TaskConfig::Jsonl(rows)) => {
                    RewardWork::of(&Rewards::new(&rows.rewards)?, config)?
                }
                _ => Vec::new(),
            },
            examples: None,
        })
    }

    /// The workload of supervised training under a section of a configuration: steps over examples, and validation.
    pub fn supervised(config: &RunConfig, sft: &SftConfig, arch: &Arch) -> Result<Self> {
        let batch = sft.batch_size as u64;
        let context = arch.context().unwrap_or(arch.max_positions);
        let samples = config.task.is_some();
        let both = Self::new(config, arch)?;
        Ok(Self {
            prompts: batch,
            group: 1,
            greedy: false,
            arch: arch.clone(),
            mini_batch: batch,
            epochs: 1,
            validation: if samples { both.validation } else { 0 },
            reference: false,
            adapters_off: false,
            old_log_probs: false,
            entropy: false,
            scores: false,
            clips: sft.optim.clip_grad.is_some(),
            critic: None,
            examples: Some(Examples {
                length: sft.max_length.unwrap_or(context).min(context) as u64,
                validation: u64::from(samples || sft.validation.is_some()) * u64::MAX,
            }),
            ..both
        })
    }

    /// The critic's architecture.
    #[must_use]
    pub fn critic_arch(&self) -> Option<&Arch> {
        self.critic.as_ref().map(|critic| &critic.arch)
    }

    /// Whether every model that is trained can be updated segment by segment: no gradient is clipped by a global norm or comes of
    /// a scaled loss.
    #[must_use]
    pub fn steps_in_backward(&self) -> bool {
        !self.scales_loss && !self.clips && self.critic.as_ref().is_none_or(|critic| !critic.clips)
    }

    /// Takes over what the task's prompts and the demonstrations are like, where they were read.
    pub fn observe(&mut self, survey: DatasetStats) {
        self.prompt_length = self.prompt_length.min(survey.longest_prompt as u64);
        self.validation = survey.validation as u64;
        let Some(read) = survey.demonstrations else {
            return;
        };
        match &mut self.examples {
            Some(examples) => {
                *examples = Examples {
                    length: read.longest as u64,
                    validation: read.validation as u64,
                }
            }
            // a warm-up shares the plan of the rollouts
            None => {
                let prompt = (read.longest as u64).saturating_sub(self.response_length);
                self.prompt_length = self.prompt_length.max(prompt);
            }
        }
    }

    /// Whether the policy scores sequences apart from its training: rollouts, or examples whose loss is validated.
    #[must_use]
    pub fn policy_scores(&self) -> bool {
        let validates = self.examples.is_some_and(|e| e.validation > 0);
        self.old_log_probs || self.adapters_off || self.scores || validates
    }

    /// Whether anything is sampled: rollouts, or completions of validation prompts.
    #[must_use]
    pub fn samples(&self) -> bool {
        self.examples.is_none() || self.validation > 0
    }

    /// Most tokens of a sequence that is sampled.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.prompt_length + self.response_length
    }

    /// Most tokens of a sequence that is scored or trained on.
    #[must_use]
    pub fn scored_length(&self) -> u64 {
        self.examples.map_or_else(|| self.length(), |e| e.length)
    }

    /// Sequences that are scored together.
    #[must_use]
    pub fn scored_sequences(&self) -> u64 {
        self.examples
            .map_or_else(|| self.rollouts(), |e| e.validation.max(1))
    }

    /// Sequences a step.
    #[must_use]
    pub fn rollouts(&self) -> u64 {
        self.prompts * self.group
    }

    /// Sequences an optimizer step.
    #[must_use]
    pub fn mini_rollouts(&self) -> u64 {
        self.mini_batch.min(self.prompts).max(1) * self.group
    }
}
