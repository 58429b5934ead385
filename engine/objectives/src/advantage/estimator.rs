//! Advantage estimators, and their choice.

use super::gae::{Gae, gae};
use super::gpg::gpg;
use super::groups::{ScaleRewards, normalized};
use super::grpo::{grpo, grpo_leave_one_out};
use super::inputs::AdvantageInputs;
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
