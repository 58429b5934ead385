//! VESPO (arXiv:2602.10693): the log-prob weighted by a Gamma-shaped function of the whole sequence's ratio.

use super::terms::{PolicyTerms, Ratios};

/// ln 1e-8: the least log of a weight, as the reference code bounds it.
const LEAST: f64 = -18.420_680_743_952_367;

/// Settings of the weight `φ(w) = e^λ w^k e^{−λ w}` (TRL's `vespo_k_*` and `vespo_lambda_*`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Vespo {
    /// k where the advantage is not negative.
    pub k_pos: f64,
    /// λ there.
    pub lambda_pos: f64,
    /// k where the advantage is negative.
    pub k_neg: f64,
    /// λ there.
    pub lambda_neg: f64,
}

/// `−sg(φ(w)) · A · logp` with `φ(w) = e^λ w^k e^{−λ w}` and w the product of the sequence's ratios, of corrections
/// too. k and λ depend on the sign of A.
pub(super) fn vespo(by: Vespo, ratios: &Ratios<'_>) -> PolicyTerms {
    let Ratios { log_ratio, inputs, .. } = ratios;
    let sequences = ratios.sequences();
    let mut log_w = log_ratio.clone().inner();
    if let Some(correction) = &inputs.columns.correction {
        log_w = log_w + correction.clone().log().clamp(LEAST, 20.0);
    }
    let log_w = sequences.broadcast(sequences.sum(log_w).clamp(LEAST, 20.0));
    let advantage = inputs.advantage();
    let negative = advantage.clone().lower_elem(0.0).float();
    let pick = |below: f64, above: f64| negative.clone() * (below - above) + above;
    let k = pick(by.k_neg, by.k_pos);
    let lambda = pick(by.lambda_neg, by.lambda_pos);
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
