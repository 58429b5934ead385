//! What a run asks for, as far as its memory depends on it.

use crate::ModelPlan;
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::{Arch, KvCacheDtype};
use firebrick_spec::Precision;
use firebrick_spec::{CudaGraphs, Prepack};

/// What a run asks for, memory decisions apart.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part of a step that there is or is not")]
pub struct Workload {
    /// The policy.
    pub arch: Arch,
    /// Most tokens of a prompt.
    pub prompt_length: u64,
    /// Most tokens of a completion.
    pub response_length: u64,
    /// Mean tokens of prompts and completions, where they are known: seconds are those of sequences of these lengths.
    /// Bytes are always those of the longest.
    pub mean_lengths: Option<[f64; 2]>,
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
    /// How keys and values are stored.
    pub kv_cache_dtype: KvCacheDtype,
    /// The copies that sampling makes of the matrices, where a kernel reads them.
    pub prepack: Prepack,
    /// Which decoding steps are captured as graphs.
    pub cuda_graphs: CudaGraphs,
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
    /// The policy scores every optimizer step once more before its first backward: something is chosen out of the whole
    /// step.
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
    /// Host bytes that the rows of the data are held in, all the time.
    pub rows_bytes: u64,
    /// Supervised steps before the first one, where there are any: phases of their own.
    pub warm_up: Option<WarmUp>,
}

/// What a run asks for a warm-up: supervised training of the policy before its first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmUp {
    /// Examples an optimizer step.
    pub batch: u64,
    /// Most tokens of one.
    pub length: u64,
    /// Its gradients are clipped by their global norm.
    pub clips: bool,
    /// Its loss is scaled.
    pub scales_loss: bool,
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

/// What a run asks for a critic.
#[derive(Clone, Debug, PartialEq)]
pub struct CriticWork {
    /// Its architecture, with a scalar head.
    pub arch: Arch,
    /// Its gradients are clipped by their global norm.
    pub clips: bool,
    /// It starts from the policy, as that is before the first step, and not from a checkpoint of its own.
    pub starts_from_policy: bool,
}

impl Workload {
    /// The least that a step of GRPO asks for: `prompts` groups of `group` completions, one optimizer step over all of
    /// them, clipped by the global norm; the policy scores them itself, and there is no other model.
    #[must_use]
    pub fn grpo(arch: Arch, [prompt_length, response_length]: [u64; 2], prompts: u64, group: u64) -> Self {
        Self {
            rollout_precision: arch.precision,
            arch,
            prompt_length,
            response_length,
            mean_lengths: None,
            prompts,
            group,
            greedy: false,
            mini_batch: prompts,
            epochs: 1,
            max_num_batched_tokens: 2048,
            kv_cache_bytes: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            prepack: Prepack::default(),
            cuda_graphs: CudaGraphs { enforce_eager: Some(true), capture_sizes: None },
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
            rows_bytes: 0,
            warm_up: None,
        }
    }

    /// The warm-up as a workload of its own: its batch, of examples in place of rollouts, and nothing that looks at
    /// rollouts.
    pub(crate) fn warming_up(&self) -> Option<Self> {
        let own = self.warm_up?;
        Some(Self {
            prompts: own.batch,
            mean_lengths: None,
            group: 1,
            greedy: false,
            mini_batch: own.batch,
            epochs: 1,
            validation: 0,
            reference: false,
            adapters_off: false,
            old_log_probs: false,
            entropy: false,
            scores: false,
            clips: own.clips,
            scales_loss: own.scales_loss,
            critic: None,
            rewards: Vec::new(),
            examples: Some(Examples { length: own.length, validation: 0 }),
            warm_up: None,
            ..self.clone()
        })
    }

    /// The critic's architecture.
    #[must_use]
    pub fn critic_arch(&self) -> Option<&Arch> {
        self.critic.as_ref().map(|critic| &critic.arch)
    }

    /// Whether every model that is trained can be updated segment by segment, in a warm-up too: no gradient is clipped
    /// by a global norm or comes of a scaled loss.
    pub(crate) fn steps_in_backward(&self) -> bool {
        let warms = |own: WarmUp| !own.scales_loss && !own.clips;
        !self.scales_loss
            && !self.clips
            && self.critic.as_ref().is_none_or(|critic| !critic.clips)
            && self.warm_up.is_none_or(warms)
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

    /// Most tokens of a sequence that any pass with a graph, or any scoring one, is over: also in a warm-up.
    #[must_use]
    pub fn longest_pass(&self) -> u64 {
        let warm = self.warm_up.map_or(0, |own| own.length);
        self.scored_length().max(warm)
    }

    /// Sequences that are scored together.
    pub(crate) fn scored_sequences(&self) -> u64 {
        self.examples.map_or_else(|| self.rollouts(), |e| e.validation.max(1))
    }

    /// Sequences a step.
    pub(crate) fn rollouts(&self) -> u64 {
        self.prompts * self.group
    }

    /// Sequences an optimizer step.
    pub(crate) fn mini_rollouts(&self) -> u64 {
        self.mini_batch.min(self.prompts).max(1) * self.group
    }
}
