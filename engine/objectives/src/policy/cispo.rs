//! CISPO (arXiv:2506.13585): no token is dropped by a clip; its ratio is a bounded constant.

use super::clip::ClipRange;
use super::{ImportanceSamplingLevel, PolicyTerms, Ratios, TokenPolicyLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// `−sg(clip(r, 1 − low, 1 + high)) · A · logp`. TRL bounds r above by `epsilon_high` itself: our `clip_ratio_high` is
/// that less 1, and `clip_ratio_low` 1.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Cispo {
    /// Level of the ratio r (`clip`, `cispo`, `sapo`).
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// Where the ratio is clipped.
    #[serde(flatten)]
    pub range: ClipRange,
}

impl TokenPolicyLoss for Cispo {
    fn level(&self) -> ImportanceSamplingLevel {
        self.importance_sampling_level
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let ratio = ratios.log_ratio.clone().inner().exp();
        let bounded = self.range.clamp(ratio.clone());
        let ratio_is_above = ratio.clone().greater_elem(1.0 + self.range.clip_ratio_high).float();
        let clipped = bounded.clone().not_equal(ratio).float();
        let weight = bounded * ratios.inputs.advantage().neg();
        let advantage = ratios.inputs.advantage();
        let above = ratio_is_above * advantage.greater_elem(0.0).float();
        PolicyTerms {
            loss: ratios.logp.clone() * weight,
            // TRL's name
            metrics: vec![ratios.mean("cispo_clip_ratio", above)],
            clipped_lower: clipped.zeros_like(),
            clipped,
        }
    }
}
