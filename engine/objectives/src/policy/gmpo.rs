//! GMPO (arXiv:2507.20673): the geometric mean of a sequence's ratios, clipped token by token before it is taken.

use super::clip::ClipRange;
use super::{PolicyTerms, Ratios, TokenPolicyLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// `−A · exp(mean_t d_t)` for every token of a sequence, with `d = logp − old` bounded above by `high` where A > 0 and
/// below by `−low` where A < 0, and A the mean of the sequence's advantages.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Gmpo {
    /// Where the log of each token's ratio is clipped.
    #[serde(flatten)]
    pub range: ClipRange,
}

impl TokenPolicyLoss for Gmpo {
    fn takes_corrections(&self) -> bool {
        true
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let Ratios { difference, inputs, .. } = ratios;
        let sequences = ratios.sequences();
        let sign = inputs.advantage().sign();
        let bounded = difference.clone().clamp(-self.range.clip_ratio_low, self.range.clip_ratio_high);
        let outside = bounded.clone().inner().not_equal(difference.clone().inner()).float();
        // the smaller of both times the sign: one side only
        let held = (difference.clone() * sign.clone()).min_pair(bounded * sign.clone()) * sign.clone();
        let mut exponent = sequences.mean(held).clamp(-20.0, 20.0);
        if let Some(correction) = &inputs.columns.correction {
            // the correction of the sequence is the geometric mean of its tokens'
            exponent = exponent + sequences.mean((correction.clone() + 1e-10).log());
        }
        let advantage = sequences.mean(inputs.advantage());
        PolicyTerms {
            loss: sequences.broadcast(exponent.exp() * advantage.neg()),
            clipped: outside.clone() * sign.clone().greater_elem(0.0).float(),
            clipped_lower: outside * sign.lower_elem(0.0).float(),
            metrics: Vec::new(),
        }
    }
}
