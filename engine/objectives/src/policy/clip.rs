//! The clipped policy-gradient loss of PPO (arXiv:1707.06347), with clip-higher and dual clip.

use super::{ImportanceSamplingLevel, PolicyTerms, Ratios, TokenPolicyLoss};
use crate::token_loss::{Metric, Reduction};
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Where the probability ratio is clipped; more room above than below is DAPO's clip-higher.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct ClipRange {
    /// Clip range of the ratio below 1.
    #[default(0.2)]
    #[schemars(range(min = 0, max = 1))]
    pub clip_ratio_low: f64,
    /// Clip range of the ratio above 1.
    #[default(0.2)]
    #[schemars(range(min = 0))]
    pub clip_ratio_high: f64,
}

impl ClipRange {
    /// The ratio within the range.
    pub(super) fn clamp(self, ratio: Tensor<1>) -> Tensor<1> {
        ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
    }
}

/// `max(−A r, −A clip(r, 1 − low, 1 + high))`, and with a dual clip c (arXiv:1912.09729) `min(that, −A c)` where A < 0.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Clip {
    /// Level of the ratio r (`clip`, `cispo`, `sapo`).
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// Where the ratio is clipped.
    #[serde(flatten)]
    pub range: ClipRange,
    /// Dual clip c: with a negative advantage A, the loss is at most −A·c. `null` disables it.
    #[default(Some(3.0))]
    #[schemars(extend("exclusiveMinimum" = 1))]
    pub clip_ratio_c: Option<f64>,
}

impl TokenPolicyLoss for Clip {
    fn level(&self) -> ImportanceSamplingLevel {
        self.importance_sampling_level
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        clip(self.range, self.clip_ratio_c, ratios)
    }
}

/// The clipped loss of every token, with a dual clip if there is one.
pub(super) fn clip(range: ClipRange, dual: Option<f64>, ratios: &Ratios<'_>) -> PolicyTerms {
    let advantage = ratios.inputs.advantage();
    let ratio = ratios.log_ratio.clone().exp();
    let minus_a = advantage.clone().neg();
    let plain = minus_a.clone() * ratio.clone();
    let bounded = minus_a.clone() * range.clamp(ratio);
    let clipped = bounded.clone().greater(plain.clone()).float();
    let outer = plain.max_pair(bounded);
    let (loss, clipped_lower) = match dual {
        None => (outer, clipped.zeros_like()),
        Some(c) => {
            let ceiling = minus_a * c;
            let negative = advantage.lower_elem(0.0);
            let held = outer.clone().greater(ceiling.clone()).float() * negative.clone().float();
            let capped = outer.clone().min_pair(ceiling);
            (outer.mask_where(negative, capped), held)
        }
    };
    PolicyTerms { loss, metrics: shares(ratios, &clipped), clipped, clipped_lower }
}

/// Clipped fractions on either side, under TRL's names: of the tokens, or of the sequences if each has one
/// ratio. Losses of whole sequences also report the smallest fraction below and the largest above of a sequence.
fn shares(ratios: &Ratios<'_>, clipped: &Tensor<1>) -> Vec<Metric> {
    let clipped = clipped.clone().inner();
    let advantage = ratios.inputs.advantage();
    let low = clipped.clone() * advantage.clone().lower_elem(0.0).float();
    let high = clipped.clone() * advantage.greater_elem(0.0).float();
    let mut metrics = vec![
        ratios.mean("clip_ratio/low_mean", low.clone()),
        ratios.mean("clip_ratio/high_mean", high.clone()),
        ratios.mean("clip_ratio/region_mean", clipped),
    ];
    if let Some(sequences) = ratios.sequences {
        let metric = |name, reduction, sum| Metric { name, reduction, sum };
        metrics.extend([
            metric("clip_ratio/low_min", Reduction::Min, sequences.mean(low).min()),
            metric("clip_ratio/high_max", Reduction::Max, sequences.mean(high).max()),
        ]);
    }
    metrics
}
