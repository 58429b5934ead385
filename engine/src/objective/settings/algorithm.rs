//! The names of algorithms.

use serde::{Deserialize, Serialize};

/// An algorithm of the family by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Group-relative policy optimisation (arXiv:2402.03300).
    Grpo,
    /// GRPO without its two biases (arXiv:2503.20783).
    DrGrpo,
    /// Clip-higher and token means (arXiv:2503.14476).
    Dapo,
    /// One ratio a sequence (arXiv:2507.18071).
    Gspo,
    /// Its form for advantages by token.
    GspoToken,
    /// GSPO with every sequence's loss times its length (arXiv:2602.05261).
    Luspo,
    /// A clipped ratio as a constant weight of the log-prob (arXiv:2506.13585).
    Cispo,
    /// A sigmoid gate instead of the clip (arXiv:2511.20347).
    Sapo,
    /// The geometric mean of a sequence's ratios (arXiv:2507.20673).
    Gmpo,
    /// A smooth weight of whole sequences' ratios (arXiv:2602.10693).
    Vespo,
    /// The plain policy gradient with group means (arXiv:2504.02546).
    Gpg,
    /// A KL penalty on the tokens of largest covariance (arXiv:2505.22617).
    KlCov,
    /// No gradient for some tokens of large covariance (arXiv:2505.22617).
    ClipCov,
    /// The mean of the others as baseline (arXiv:2402.14740).
    Rloo,
    /// Returns by token, normalised over the step (arXiv:2501.03262).
    ReinforcePlusPlus,
    /// The same with the group's mean as baseline.
    ReinforcePlusPlusBaseline,
    /// The greedy completion's reward as baseline (arXiv:2310.10505).
    Remax,
    /// The length-weighted mean as baseline, exactly on policy (arXiv:2505.23585).
    Opo,
    /// Credit for the best of a group alone (arXiv:2503.19595).
    PassAtK,
    /// Proximal policy optimisation with a critic (arXiv:1707.06347).
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
