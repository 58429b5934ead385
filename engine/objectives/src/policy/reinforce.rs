//! The plain policy gradient: no ratio and nothing to clip (verl's `gpg` and `reinforce`).

use super::{PolicyTerms, Ratios, TokenPolicyLoss};

/// `−A · logp`.
pub(super) struct Reinforce;

impl TokenPolicyLoss for Reinforce {
    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        ratios.unclipped(ratios.logp.clone() * ratios.inputs.advantage().neg())
    }
}
