//! CISPO (arXiv:2506.13585): no token is dropped by a clip; its ratio is a bounded constant.

use super::clip::ClipRange;
use super::terms::{PolicyTerms, Ratios};

/// `−sg(clip(r, 1 − low, 1 + high)) · A · logp`. TRL bounds r above by `epsilon_high` itself: our `high` is that less
/// 1, and `low` 1.
pub(super) fn cispo(range: ClipRange, ratios: &Ratios<'_>) -> PolicyTerms {
    let ratio = ratios.log_ratio.clone().inner().exp();
    let bounded = ratio.clone().clamp(1.0 - range.low, 1.0 + range.high);
    let ratio_is_above = ratio.clone().greater_elem(1.0 + range.high).float();
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
