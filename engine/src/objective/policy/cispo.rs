//! CISPO (arXiv:2506.13585): no token is dropped by a clip; its ratio is a bounded constant.

use super::{Clip, PolicyTerms, Ratios};

/// `−sg(clip(r, 1 − low, 1 + high)) · A · logp`. TRL bounds r above by `epsilon_high` itself: our `high` is that less 1, and `low` 1.
pub(super) fn cispo(clip: Clip, ratios: &Ratios<'_>) -> PolicyTerms {
    let ratio = ratios.log_ratio.clone().inner().exp();
    let bounded = ratio.clone().clamp(1.0 - clip.low, 1.0 + clip.high);
    let clipped = bounded.clone().not_equal(ratio).float();
    let weight = bounded * ratios.inputs.advantage.clone().neg();
    PolicyTerms {
        loss: ratios.logp.clone() * weight,
        clipped_lower: clipped.zeros_like(),
        clipped,
    }
}
