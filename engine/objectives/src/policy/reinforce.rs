//! The plain policy gradient: no ratio and nothing to clip (verl's `gpg` and `reinforce`).

use super::terms::{PolicyTerms, Ratios};

/// `−A · logp`.
pub(super) fn reinforce(ratios: &Ratios<'_>) -> PolicyTerms {
    let advantage = ratios.inputs.advantage();
    let none = advantage.zeros_like();
    PolicyTerms {
        loss: ratios.logp.clone() * advantage.neg(),
        clipped: none.clone(),
        clipped_lower: none,
        metrics: Vec::new(),
    }
}
