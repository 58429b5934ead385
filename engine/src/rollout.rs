//! Rollouts: sampled completions with everything that training needs to know of them.

use crate::sequence::TokenColumns;
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
    /// What is known of its completion tokens, in order.
    pub columns: TokenColumns<Vec<f64>>,
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
    /// Which completion tokens are scored; empty until advantages are computed.
    pub mask: Vec<bool>,
    /// Sum of its tokens' rewards: the reward, less the KL penalties where the objective takes them off.
    pub penalized_reward: f64,
}

impl Rollout {
    /// Log-probs under the policy that the update starts from: the trainer's, or else the sampler's.
    #[must_use]
    pub fn old_logp(&self) -> &[f64] {
        let (old, full) = (&self.columns.old_logp, &self.columns.full_logp);
        old.as_deref().or(full.as_deref()).unwrap_or_default()
    }

    /// Log-probs under the distribution that the tokens were drawn from.
    #[must_use]
    pub fn sampler_logp(&self) -> &[f64] {
        self.columns.sampler_logp.as_deref().unwrap_or_default()
    }

    /// Mean advantage of its tokens; 0 where it has none.
    #[must_use]
    pub fn mean_advantage(&self) -> f64 {
        let advantages = self.columns.advantage.as_deref().unwrap_or_default();
        advantages.iter().sum::<f64>() / advantages.len().max(1) as f64
    }

    /// Numbers of the scored tokens as a column of all completion tokens, `fill` for those that are not scored.
    #[must_use]
    pub fn unscored(&self, scored: Vec<f64>, fill: f64) -> Vec<f64> {
        let mut scored = scored.into_iter();
        let own = |&kept: &bool| kept.then(|| scored.next()).flatten().unwrap_or(fill);
        self.mask.iter().map(own).collect()
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
