//! Which estimator turns rewards into advantages.

use super::gae::{Gae, gae};
use super::gpg::gpg;
use super::groups::{ScaleRewards, normalized};
use super::grpo::{grpo, grpo_leave_one_out};
use super::inputs::AdvantageInputs;
use super::opo::opo;
use super::pass_at_k::pass_at_k;
use super::reinforce_plus_plus::{reinforce_plus_plus, reinforce_plus_plus_baseline};
use super::remax::remax;
use super::rloo::{rloo, rloo_vectorized};

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdvantageEstimator {
    /// One advantage a completion, by comparison with the other completions of its prompt.
    Group {
        /// What they are compared by.
        baseline: GroupEstimator,
        /// Normalises the advantages over the step: less their mean, over their standard deviation plus this (TRL's
        /// RLOO).
        normalize: Option<f64>,
    },
    /// Returns by token, normalised over the step (arXiv:2501.03262).
    ReinforcePlusPlus {
        /// Discount a token.
        gamma: f64,
    },
    /// The reward less the group's mean, normalised over the step.
    ReinforcePlusPlusBaseline,
    /// Returns by token less the reward of the greedy completion (arXiv:2310.10505).
    Remax,
    /// By a critic, normalised over the step (PPO, arXiv:1707.06347).
    Gae(Gae),
}

/// How completions of one prompt are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupEstimator {
    /// Less the group's mean, over a standard deviation (arXiv:2402.03300).
    Grpo {
        /// Which standard deviation.
        scale: ScaleRewards,
        /// Added to it.
        eps: f64,
    },
    /// Less the mean of the group's others, over their standard deviation (`NeMo RL`).
    GrpoLeaveOneOut {
        /// Which standard deviation; of the group means of the others.
        scale: ScaleRewards,
        /// Added to it.
        eps: f64,
    },
    /// Less the mean of the group's others (arXiv:2402.14740). A group of one keeps its reward.
    Rloo,
    /// The same; a group of one has no advantage.
    RlooVectorized,
    /// Less the group's mean weighted by length (arXiv:2505.23585).
    Opo,
    /// The lead of the group's best, for the best alone (arXiv:2503.19595).
    PassAtK {
        /// Which standard deviation it is divided by.
        scale: ScaleRewards,
        /// Added to it.
        eps: f64,
    },
    /// Less the group's mean, times the step's completions over those with a reward (arXiv:2504.02546).
    Gpg,
}

impl AdvantageEstimator {
    /// The advantage of every token.
    #[must_use]
    pub fn advantages(self, inputs: AdvantageInputs<'_>) -> Vec<Vec<f64>> {
        match self {
            Self::Group { baseline, normalize } => {
                let mut advantages = baseline.advantages(inputs);
                if let Some(eps) = normalize {
                    // what cannot be compared has no part in it
                    let compared: Vec<usize> = (0..advantages.len()).filter(|&i| !inputs.is_lone(i)).collect();
                    let own: Vec<f64> = compared.iter().map(|&i| advantages[i]).collect();
                    for (i, advantage) in compared.into_iter().zip(normalized(&own, eps)) {
                        advantages[i] = advantage;
                    }
                }
                inputs.expand(&advantages)
            }
            Self::ReinforcePlusPlus { gamma } => reinforce_plus_plus(inputs, gamma),
            Self::ReinforcePlusPlusBaseline => reinforce_plus_plus_baseline(inputs),
            Self::Remax => remax(inputs),
            Self::Gae(by) => gae(inputs, by),
        }
    }
}

impl GroupEstimator {
    /// The advantage of every completion; 0 for the only one with a reward in a group of several.
    #[must_use]
    pub fn advantages(self, inputs: AdvantageInputs<'_>) -> Vec<f64> {
        let (rewards, groups) = (inputs.sequence_rewards(), inputs.groups);
        let mut advantages = match self {
            Self::Grpo { scale, eps } => grpo(&rewards, groups, scale, eps),
            Self::GrpoLeaveOneOut { scale, eps } => grpo_leave_one_out(&rewards, groups, scale, eps),
            Self::Rloo => rloo(&rewards, groups),
            Self::RlooVectorized => rloo_vectorized(&rewards, groups),
            Self::Opo => opo(&rewards, groups, &inputs.lengths()),
            Self::PassAtK { scale, eps } => pass_at_k(&rewards, groups, scale, eps),
            Self::Gpg => gpg(&rewards, groups),
        };
        for (advantage, _) in advantages.iter_mut().zip(inputs.lone).filter(|(_, lone)| **lone) {
            *advantage = 0.0;
        }
        advantages
    }
}
