//! The work of a run, as far as its memory depends on it.

use crate::{Layout, ModelPlan, sharing_pays};
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::{Arch, KvCacheDtype};
use firebrick_spec::{CudaGraphs, Precision, Prepack};

/// Sequences with a common prefix, whose rows are computed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    /// Tokens of the prefix; 0 where none is shared.
    pub prefix: u64,
    /// Sequences that have it, at least 1.
    pub members: u64,
    /// Tokens of each behind it.
    pub behind: u64,
}

impl Tree {
    /// Sequences of this many tokens that share nothing.
    pub fn single(length: u64) -> Self {
        Self { prefix: 0, members: 1, behind: length }
    }

    /// Tokens of a sequence.
    pub fn length(self) -> u64 {
        self.prefix + self.behind
    }

    /// Rows of sequences.
    pub fn rows(self, sequences: u64) -> u64 {
        sequences.div_ceil(self.members) * self.prefix + sequences * self.behind
    }

    /// Sequences that a number of rows holds, at least 1.
    pub fn sequences_within(self, rows: u64) -> u64 {
        let trees = rows / self.rows(self.members);
        let part = rows.saturating_sub(self.prefix) / self.behind;
        if trees > 0 { trees * self.members } else { part.max(1) }
    }

    /// Twice the mean keys of a row: the length, where nothing is shared.
    pub fn keys(self) -> f64 {
        let [prefix, members, behind] = [self.prefix, self.members, self.behind].map(|n| n as f64);
        (prefix * prefix + members * behind * (2.0 * prefix + behind)) / (prefix + members * behind)
    }
}

/// The work of a run, without memory decisions.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part of a step that there is or is not")]
pub struct Workload {
    /// The policy.
    pub arch: Arch,
    /// Most tokens of a prompt.
    pub prompt_length: u64,
    /// Most tokens of a completion.
    pub response_length: u64,
    /// Mean tokens of prompts and completions, if known, for seconds. Bytes always assume the longest sequences.
    pub mean_lengths: Option<[f64; 2]>,
    /// Prompts per step.
    pub prompts: u64,
    /// Completions per prompt.
    pub group: u64,
    /// True if every prompt also has a greedy completion, which is scored and not trained on (`ReMax`).
    pub greedy: bool,
    /// Prompts per optimizer step.
    pub mini_batch: u64,
    /// Passes over a step's rollouts.
    pub epochs: u64,
    /// Most tokens of a forward of prompts.
    pub max_num_batched_tokens: u64,
    /// Most bytes of keys and values, if there is a limit.
    pub kv_cache_bytes: Option<u64>,
    /// Type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// The copies that sampling makes of the matrices, where a kernel reads them.
    pub prepack: Prepack,
    /// Which decoding steps are captured as graphs.
    pub cuda_graphs: CudaGraphs,
    /// cuBLASLt multiplies large matrices in training and scoring.
    pub cublaslt: bool,
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
    /// Precision of sampling.
    pub rollout_precision: Precision,
    /// The critic, if one is trained.
    pub critic: Option<CriticWork>,
    /// Reward models that score the rollouts on the run's device, with their own plans.
    pub rewards: Vec<RewardWork>,
    /// Examples of supervised training, in place of rollouts. Each example counts as a prompt.
    pub examples: Option<Examples>,
    /// Host bytes that the rows of the data are held in, all the time.
    pub rows_bytes: u64,
    /// Checkpoints are written between steps that sample.
    pub saves_beside: bool,
    /// Supervised steps before the first one, if there are any: phases of their own.
    pub warm_up: Option<WarmUp>,
}

/// A warm-up: supervised training of the policy before its first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarmUp {
    /// Examples per optimizer step.
    pub batch: u64,
    /// Most tokens of one.
    pub length: u64,
    /// Its gradients are clipped by their global norm.
    pub clips: bool,
    /// Its loss is scaled.
    pub scales_loss: bool,
}

/// Data of supervised training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Examples {
    /// Most tokens of one.
    pub length: u64,
    /// Those whose loss is validated.
    pub validation: u64,
}

/// The work of a reward model.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardWork {
    /// Its architecture, with a scalar head.
    pub arch: Arch,
    /// Its plan.
    pub plan: ModelPlan,
}

/// The work of a critic.
#[derive(Clone, Debug, PartialEq)]
pub struct CriticWork {
    /// Its architecture, with a scalar head.
    pub arch: Arch,
    /// Its gradients are clipped by their global norm.
    pub clips: bool,
    /// True if it starts from the policy before the first step instead of its own checkpoint.
    pub starts_from_policy: bool,
}

impl Workload {
    /// The least that a step of GRPO asks for: `prompts` groups of `group` completions, one optimizer step over all of
    /// them, clipped by the global norm; the policy scores them itself, and there is no other model.
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
            cublaslt: false,
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
            saves_beside: false,
            warm_up: None,
        }
    }

    /// The warm-up as a workload: its batch of examples, without everything that needs rollouts.
    pub(crate) fn warming_up(&self) -> Option<Self> {
        let warm_up = self.warm_up?;
        Some(Self {
            prompts: warm_up.batch,
            mean_lengths: None,
            group: 1,
            greedy: false,
            mini_batch: warm_up.batch,
            epochs: 1,
            validation: 0,
            reference: false,
            adapters_off: false,
            old_log_probs: false,
            entropy: false,
            scores: false,
            clips: warm_up.clips,
            scales_loss: warm_up.scales_loss,
            critic: None,
            rewards: Vec::new(),
            examples: Some(Examples { length: warm_up.length, validation: 0 }),
            saves_beside: false,
            warm_up: None,
            ..self.clone()
        })
    }

    /// The critic's architecture.
    pub fn critic_arch(&self) -> Option<&Arch> {
        self.critic.as_ref().map(|critic| &critic.arch)
    }

    /// True if every model that is trained can be updated segment by segment, in a warm-up too: no gradient is clipped
    /// by a global norm or comes of a scaled loss.
    pub(crate) fn allows_step_in_backward(&self) -> bool {
        let warms = |warm_up: WarmUp| !warm_up.scales_loss && !warm_up.clips;
        !self.scales_loss
            && !self.clips
            && self.critic.as_ref().is_none_or(|critic| !critic.clips)
            && self.warm_up.is_none_or(warms)
    }

    /// True if the policy scores sequences apart from its training: rollouts, or examples whose loss is validated.
    pub fn policy_scores(&self) -> bool {
        let validates = self.examples.is_some_and(|e| e.validation > 0);
        self.old_log_probs || self.adapters_off || self.scores || validates
    }

    /// True if anything is sampled: rollouts, or completions of validation prompts.
    pub fn samples(&self) -> bool {
        self.examples.is_none() || self.validation > 0
    }

    /// Most tokens of a sequence that is sampled.
    pub fn length(&self) -> u64 {
        self.prompt_length + self.response_length
    }

    /// Most tokens of a sequence that is scored or trained on.
    pub fn scored_length(&self) -> u64 {
        self.examples.map_or_else(|| self.length(), |e| e.length)
    }

    /// The completions of a prompt, as long as allowed, under a layout.
    pub(crate) fn tree(&self, layout: Layout) -> Tree {
        let length = self.scored_length().max(1);
        if layout != Layout::SharedPrefix || self.examples.is_some() || self.group <= 1 {
            return Tree::single(length);
        }
        // the last token of a prompt, which predicts the first one of a completion, is a row of each completion
        let prefix = self.prompt_length.saturating_sub(1).min(length - 1);
        if !sharing_pays(prefix + self.group * (length - prefix), self.group * length) {
            return Tree::single(length);
        }
        Tree { prefix, members: self.group, behind: length - prefix }
    }

    /// [`Self::tree`] in the policy's training.
    pub(crate) fn training_tree(&self, planned: Layout) -> Tree {
        self.tree(planned.in_training(self.lora.as_ref()))
    }

    /// Most tokens of a sequence that any pass with a graph, or any scoring one, is over: also in a warm-up.
    pub fn longest_pass(&self) -> u64 {
        let warm = self.warm_up.map_or(0, |warm_up| warm_up.length);
        self.scored_length().max(warm)
    }

    /// Sequences that are scored together.
    pub(crate) fn scored_sequences(&self) -> u64 {
        self.examples.map_or_else(|| self.rollouts(), |e| e.validation.max(1))
    }

    /// Sequences per step.
    pub(crate) fn rollouts(&self) -> u64 {
        self.prompts * self.group
    }

    /// Sequences per optimizer step.
    pub(crate) fn mini_rollouts(&self) -> u64 {
        self.mini_batch.min(self.prompts).max(1) * self.group
    }
}
