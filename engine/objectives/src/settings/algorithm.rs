//! The names of algorithms, and what each one's paper sets over GRPO's defaults.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// An RL algorithm by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Group-relative policy optimization (arXiv:2402.03300).
    #[default]
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

    /// The keys of a configuration that it sets.
    pub(super) fn changes(self) -> Map<String, Value> {
        let changes = match self {
            Self::Grpo => json!({}),
            Self::DrGrpo => json!({"scale_rewards": "none", "loss_agg_mode": "seq-mean-token-sum-norm"}),
            Self::Dapo => json!({"clip_ratio_high": 0.28, "clip_ratio_c": null}),
            // section 5.1 of GSPO's paper
            Self::Gspo => gspo("sequence"),
            Self::GspoToken => gspo("sequence_token"),
            Self::Luspo => json!({
                "importance_sampling_level": "sequence", "clip_ratio_low": 2e-3, "clip_ratio_high": 2.5e-3,
                "clip_ratio_c": null, "loss_agg_mode": "seq-mean-token-sum"
            }),
            Self::Cispo => json!({"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
            Self::Sapo => json!({"policy_loss": "sapo", "loss_agg_mode": "seq-mean-token-mean"}),
            Self::Gmpo => json!({
                "policy_loss": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4,
                "loss_agg_mode": "seq-mean-token-mean"
            }),
            Self::Vespo => json!({"policy_loss": "vespo"}),
            Self::Gpg => json!({"adv_estimator": "gpg", "policy_loss": "reinforce"}),
            Self::KlCov => json!({"policy_loss": "kl_cov"}),
            Self::ClipCov => json!({"policy_loss": "clip_cov"}),
            Self::Rloo => json!({
                "adv_estimator": "rloo", "importance_sampling_level": "sequence_product", "clip_ratio_c": null,
                "loss_agg_mode": "seq-mean-token-mean"
            }),
            Self::ReinforcePlusPlus => json!({"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": true}),
            Self::ReinforcePlusPlusBaseline => json!({
                "adv_estimator": "reinforce_plus_plus_baseline", "kl_loss_coef": 0.001, "kl_loss_type": "k2"
            }),
            Self::Remax => json!({
                "adv_estimator": "remax", "policy_loss": "reinforce", "loss_agg_mode": "seq-mean-token-sum"
            }),
            Self::Opo => json!({"adv_estimator": "opo", "policy_loss": "reinforce"}),
            Self::PassAtK => json!({"adv_estimator": "pass_at_k"}),
            Self::Ppo => json!({"adv_estimator": "gae"}),
        };
        changes.as_object().cloned().unwrap_or_default()
    }
}

/// GSPO's settings at a level of the ratio.
fn gspo(level: &str) -> Value {
    json!({
        "importance_sampling_level": level, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "clip_ratio_c": null,
        "loss_agg_mode": "seq-mean-token-mean"
    })
}
