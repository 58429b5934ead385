//! VESPO (arXiv:2602.10693): the log-prob weighted by a Gamma-shaped function of the whole sequence's ratio.

use super::terms::{PolicyTerms, Ratios};
use crate::objective::config::ObjectiveConfig;

/// ln 1e-8: the least log of a weight, as the reference code bounds it.
const LEAST: f64 = -18.420_680_743_952_367;

/// `−sg(φ(w)) · A · logp` with `φ(w) = e^λ w^k e^{−λ w}` and w the product of the sequence's ratios, of corrections too.
/// k and λ depend on the sign of A.
pub(super) fn vespo(config: &ObjectiveConfig, ratios: &Ratios<'_>) -> PolicyTerms {
    let Ratios {
        log_ratio, inputs, ..
    } = ratios;
    let segments = ratios.segments();
    let mut log_w = log_ratio.clone().inner();
    if let Some(correction) = &inputs.correction {
        log_w = log_w + correction.clone().log().clamp(LEAST, 20.0);
    }
    let log_w = segments.spread(segments.sum(log_w).clamp(LEAST, 20.0));
    let advantage = inputs.advantage.clone();
    let negative = advantage.clone().lower_elem(0.0).float();
    let pick = |below: f64, above: f64| negative.clone() * (below - above) + above;
    let k = pick(config.vespo_k_neg, config.vespo_k_pos);
    let lambda = pick(config.vespo_lambda_neg, config.vespo_lambda_pos);
    let phi = (lambda.clone() + k * log_w.clone() - lambda * log_w.exp()).exp();
    let none = advantage.zeros_like();
    PolicyTerms {
        // TRL's name
        metrics: vec![ratios.sequence_mean("vespo/phi_seq_mean", phi.clone())],
        loss: ratios.logp.clone() * (phi * advantage.neg()),
        clipped: none.clone(),
        clipped_lower: none,
    }
}
