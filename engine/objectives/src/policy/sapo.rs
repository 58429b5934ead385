//! SAPO (arXiv:2511.20347): a sigmoid gate of the ratio instead of a clip.

use super::terms::{PolicyTerms, Ratios};
use burn::tensor::activation::sigmoid;

/// `−σ(τ (r − 1)) · 4/τ · A`, with `positive` as τ where A > 0 and `negative` elsewhere.
pub(super) fn sapo(positive: f64, negative: f64, ratios: &Ratios<'_>) -> PolicyTerms {
    let advantage = ratios.inputs.advantage();
    let above = advantage.clone().greater_elem(0.0).float();
    let tau = above * (positive - negative) + negative;
    let ratio = ratios.log_ratio.clone().exp();
    let gate = sigmoid((ratio - 1.0) * tau.clone()) * (tau.recip() * 4.0);
    let none = advantage.zeros_like();
    PolicyTerms { loss: gate * advantage.neg(), clipped: none.clone(), clipped_lower: none, metrics: Vec::new() }
}
