//! Rollouts: sampled completions with everything that training needs to know of them.

use firebrick_models::generate::FinishReason;
use serde::Serialize;

/// One sampled completion.
#[derive(Clone, Debug)]
pub struct Rollout {
    /// Index of its prompt among the run's draws: names its group.
    pub prompt_index: u64,
    /// Index in the group.
    pub sample: usize,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Completion tokens, the stop id included.
    pub completion: Vec<u32>,
    /// Completion's text, without special tokens.
    pub text: String,
    /// Log-probs under the distribution that the tokens were drawn from.
    pub sampler_logp: Vec<f32>,
    /// Log-probs under the sampler's full distribution at the same temperature.
    pub full_logp: Vec<f32>,
    /// Log-probs under the policy that the update starts from, by the trainer's own forward.
    pub old_logp: Option<Vec<f32>>,
    /// Log-probs under the reference policy.
    pub ref_logp: Option<Vec<f32>>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Training step whose weights sampled it.
    pub policy_version: u64,
    /// What it was worth.
    pub reward: f64,
    /// The reward's parts by name, before weighting.
    pub reward_parts: Vec<(String, f64)>,
    /// Weights of the parts in the reward.
    pub reward_weights: Vec<f64>,
    /// Reward of the greedy completion of its prompt, where the objective compares with it.
    pub baseline: Option<f64>,
    /// Which completion tokens are scored; empty until credit is given.
    pub mask: Vec<bool>,
    /// Importance-sampling correction of each scored token; empty where there is none.
    pub correction: Vec<f64>,
    /// A critic's value of the state that each completion token was drawn in; empty without a critic.
    pub values: Vec<f32>,
    /// What each completion token turned out to be worth, by rewards and values; empty without a critic.
    pub returns: Vec<f64>,
    /// Sum of its tokens' rewards: the reward, less the KL penalties where the objective takes them off.
    pub penalized_reward: f64,
    /// Advantage of each completion token.
    pub advantages: Vec<f64>,
}

impl Rollout {
    /// Log-probs under the policy that the update starts from: the trainer's, or else the sampler's.
    #[must_use]
    pub fn old(&self) -> &[f32] {
        self.old_logp.as_deref().unwrap_or(&self.full_logp)
    }

    /// Those of the completion tokens' values that belong to scored tokens.
    #[must_use]
    pub fn scored<T: Copy>(&self, values: &[T]) -> Vec<T> {
        let pairs = values.iter().zip(&self.mask);
        pairs.filter(|(_, m)| **m).map(|(v, _)| *v).collect()
    }
}

/// A rollout as `samples.jsonl` keeps it.
#[derive(Debug, Serialize)]
pub struct SampleRecord<'a> {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    #[serde(rename = "draw")]
    pub prompt_index: u64,
    /// Index in the group.
    pub sample: usize,
    /// The prompt's text.
    pub prompt: &'a str,
    /// The completion's text.
    pub completion: &'a str,
    /// Ground truth.
    pub answer: &'a str,
    /// Reward.
    pub reward: f64,
    /// Its parts.
    pub reward_parts: &'a [(String, f64)],
    /// Advantage of its tokens (their mean where they differ).
    pub advantage: f64,
    /// Why it ended.
    pub finish: FinishReason,
    /// Completion tokens.
    pub tokens: usize,
}
