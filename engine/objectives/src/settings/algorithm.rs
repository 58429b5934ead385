//! The names of algorithms.

use serde::{Deserialize, Serialize};

/// An RL algorithm by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Group-relative policy optimization (arXiv:2402.03300).
    Grpo,
    /// GRPO without its length and difficulty biases (arXiv:2503.20783).
    DrGrpo,
    /// Clip-higher and token means (arXiv:2503.14476).
    Dapo,
    /// Ratio per sequence (arXiv:2507.18071).
    Gspo,
    /// GSPO for advantages by token.
    GspoToken,
    /// GSPO weighted by length (arXiv:2602.05261).
    Luspo,
    /// Clipped ratio as a constant weight (arXiv:2506.13585).
    Cispo,
    /// Sigmoid gate instead of clipping (arXiv:2511.20347).
    Sapo,
    /// Geometric mean of ratios (arXiv:2507.20673).
    Gmpo,
    /// Smooth weight of sequence ratios (arXiv:2602.10693).
    Vespo,
    /// Plain policy gradient (arXiv:2504.02546).
    Gpg,
    /// KL penalty on high-covariance tokens (arXiv:2505.22617).
    KlCov,
    /// No gradient for some high-covariance tokens (arXiv:2505.22617).
    ClipCov,
    /// Leave-one-out baseline (arXiv:2402.14740).
    Rloo,
    /// Returns normalized over the step (arXiv:2501.03262).
    ReinforcePlusPlus,
    /// `reinforce_plus_plus` with group means as baseline.
    ReinforcePlusPlusBaseline,
    /// Greedy completion as baseline (arXiv:2310.10505).
    Remax,
    /// Length-weighted mean as baseline (arXiv:2505.23585).
    Opo,
    /// Credit only for the group's best (arXiv:2503.19595).
    PassAtK,
    /// Proximal policy optimization with a critic (arXiv:1707.06347).
    Ppo,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::Grpo,
        Self::DrGrpo,
        Self::Dapo,
        Self::Gspo,
        Self::GspoToken,
        Self::Luspo,
        Self::Cispo,
        Self::Sapo,
        Self::Gmpo,
        Self::Vespo,
        Self::Gpg,
        Self::KlCov,
        Self::ClipCov,
        Self::Rloo,
        Self::ReinforcePlusPlus,
        Self::ReinforcePlusPlusBaseline,
        Self::Remax,
        Self::Opo,
        Self::PassAtK,
        Self::Ppo,
    ];
}
