//! The choice of an advantage estimator, and its inputs.

use super::gae::{Gae, gae};
use super::gpg::gpg;
use super::groups::{ScaleRewards, normalized};
use super::grpo::{grpo, grpo_leave_one_out};
use super::opo::opo;
use super::pass_at_k::pass_at_k;
use super::reinforce_plus_plus::{ReinforcePlusPlus, reinforce_plus_plus, reinforce_plus_plus_baseline};
use super::remax::remax;
use super::rloo::{rloo, rloo_vectorized};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the rewards R of a group (the completions of a prompt) become advantages.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "adv_estimator", rename_all = "snake_case")]
pub enum AdvantageEstimator {
    /// (R − mean) / (std + `adv_eps`).
    Grpo(Scaled),
    /// As `grpo`, with mean and std of the others in the group; not divided if they are equal (`NeMo RL`).
    GrpoLeaveOneOut(Scaled),
    /// R − mean of the others; R in a group of one.
    Rloo(Plain),
    /// As `rloo`; 0 in a group of one.
    RlooVectorized(Plain),
    /// Returns by token, normalized over the step.
    ReinforcePlusPlus(ReinforcePlusPlus),
    /// R − mean, normalized over the step.
    ReinforcePlusPlusBaseline,
    /// Returns − R of the greedy completion.
    Remax,
    /// R − length-weighted mean.
    Opo(Plain),
    /// Best: (R − second best) / (std + `adv_eps`); others: 0.
    #[serde(alias = "grpo_passk")]
    #[schemars(extend("x-alias" = ["grpo_passk"]))]
    PassAtK(Scaled),
    /// (R − mean) · completions / completions with R ≠ 0.
    Gpg(Plain),
    /// Generalized advantage estimation, normalized over the step.
    Gae(Gae),
}

/// Settings of one advantage a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Plain {
    /// Normalize advantages over the step: zero mean, unit standard deviation.
    pub normalize_advantages: bool,
}

/// Settings of one advantage a completion, over a standard deviation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Scaled {
    /// Standard deviation that advantages are divided by (`grpo`, `grpo_leave_one_out`, `pass_at_k`).
    pub scale_rewards: ScaleRewards,
    /// See [`Plain`].
    #[serde(flatten)]
    pub plain: Plain,
}

impl Default for AdvantageEstimator {
    fn default() -> Self {
        Self::Grpo(Scaled::default())
    }
}

impl AdvantageEstimator {
    /// The advantage of every token; `eps` is added to standard deviations.
    pub fn advantages(self, inputs: AdvantageInputs<'_>, eps: f64) -> Vec<Vec<f64>> {
        let (rewards, groups) = (inputs.sequence_rewards(), inputs.groups);
        let (advantages, by) = match self {
            Self::Grpo(by) => (grpo(&rewards, groups, by.scale_rewards, eps), by.plain),
            Self::GrpoLeaveOneOut(by) => (grpo_leave_one_out(&rewards, groups, by.scale_rewards, eps), by.plain),
            Self::PassAtK(by) => (pass_at_k(&rewards, groups, by.scale_rewards, eps), by.plain),
            Self::Rloo(by) => (rloo(&rewards, groups), by),
            Self::RlooVectorized(by) => (rloo_vectorized(&rewards, groups), by),
            Self::Opo(by) => (opo(&rewards, groups, &inputs.lengths()), by),
            Self::Gpg(by) => (gpg(&rewards, groups), by),
            Self::ReinforcePlusPlus(by) => return reinforce_plus_plus(inputs, by.gamma),
            Self::ReinforcePlusPlusBaseline => return reinforce_plus_plus_baseline(inputs),
            Self::Remax => return remax(inputs),
            Self::Gae(by) => return gae(inputs, by),
        };
        inputs.expand(&compared(inputs, advantages, by.normalize_advantages.then_some(eps)))
    }

    /// Returns true if tokens of one completion have different advantages.
    pub(crate) fn by_token(self) -> bool {
        matches!(self, Self::ReinforcePlusPlus(_) | Self::Gae(_))
    }
}

/// Data of a step's completions with rewards, one entry each.
#[derive(Clone, Copy, Debug)]
pub struct AdvantageInputs<'a> {
    /// Reward of every token.
    pub rewards: &'a [Vec<f64>],
    /// Mask of scored tokens.
    pub masks: &'a [Vec<bool>],
    /// Group of each: the completions of one prompt.
    pub groups: &'a [u64],
    /// True for the only completion with a reward in a group of several, which cannot be compared. Empty
    /// without any.
    pub lone: &'a [bool],
    /// Reward of the greedy completion of its prompt; empty without one.
    pub baselines: &'a [f64],
    /// A critic's value of every token; empty without a critic.
    pub values: &'a [Vec<f64>],
}

impl AdvantageInputs<'_> {
    /// Each completion's reward: the sum over its tokens.
    pub fn sequence_rewards(&self) -> Vec<f64> {
        self.rewards.iter().map(|rewards| rewards.iter().sum()).collect()
    }

    /// Returns true if it is the only one with a reward in a group of several.
    pub fn is_lone(&self, completion: usize) -> bool {
        self.lone.get(completion).copied().unwrap_or(false)
    }

    /// Number of scored tokens of each.
    pub fn lengths(&self) -> Vec<usize> {
        let scored = |mask: &Vec<bool>| mask.iter().filter(|m| **m).count();
        self.masks.iter().map(scored).collect()
    }

    /// Repeats one number per completion for each of its tokens.
    pub fn expand(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let repeat = |(mask, value): (&Vec<bool>, &f64)| vec![*value; mask.len()];
        self.masks.iter().zip(values).map(repeat).collect()
    }
}

/// Zeroes the advantage of the only completion with a reward in a group of several, and normalizes the others
/// over the step; `eps` is added to their standard deviation.
fn compared(inputs: AdvantageInputs<'_>, mut advantages: Vec<f64>, eps: Option<f64>) -> Vec<f64> {
    let (lone, compared): (Vec<usize>, Vec<usize>) = (0..advantages.len()).partition(|&i| inputs.is_lone(i));
    for i in lone {
        advantages[i] = 0.0;
    }
    if let Some(eps) = eps {
        let values: Vec<f64> = compared.iter().map(|&i| advantages[i]).collect();
        for (i, advantage) in compared.into_iter().zip(normalized(&values, eps)) {
            advantages[i] = advantage;
        }
    }
    advantages
}
