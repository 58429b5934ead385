//! SAPO (arXiv:2511.20347): a sigmoid gate of the ratio instead of a clip.

use super::{ImportanceSamplingLevel, PolicyTerms, Ratios, TokenPolicyLoss};
use burn::tensor::activation::sigmoid;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// `−σ(τ (r − 1)) · 4/τ · A`, with `tau_pos` as τ where A > 0 and `tau_neg` elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Sapo {
    /// Level of the ratio r (`clip`, `cispo`, `sapo`).
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// SAPO: τ for positive advantages.
    #[default(1.0)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub tau_pos: f64,
    /// SAPO: τ for other advantages.
    #[default(1.05)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub tau_neg: f64,
}

impl TokenPolicyLoss for Sapo {
    fn level(&self) -> ImportanceSamplingLevel {
        self.importance_sampling_level
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let advantage = ratios.inputs.advantage();
        let above = advantage.clone().greater_elem(0.0).float();
        let tau = above * (self.tau_pos - self.tau_neg) + self.tau_neg;
        let ratio = ratios.log_ratio.clone().exp();
        let gate = sigmoid((ratio - 1.0) * tau.clone()) * (tau.recip() * 4.0);
        ratios.unclipped(gate * advantage.neg())
    }
}
