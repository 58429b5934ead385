//! Estimators of the KL divergence to the reference policy, per token (Schulman, "Approximating KL Divergence", 2020).

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// Which estimator, with d = logp − ref (verl's `kl_loss_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlType {
    /// d.
    #[serde(alias = "kl")]
    K1,
    /// d² / 2.
    #[serde(alias = "mse")]
    K2,
    /// e^{−d} + d − 1, with −d clamped to ±20 and the result to ±10.
    #[serde(alias = "low_var_kl")]
    K3,
    /// |d|.
    Abs,
}

impl KlType {
    /// The estimate for one token, on the host.
    #[must_use]
    pub fn estimate(self, logp: f64, ref_logp: f64) -> f64 {
        let d = logp - ref_logp;
        match self {
            Self::K1 => d,
            Self::Abs => d.abs(),
            Self::K2 => 0.5 * d * d,
            Self::K3 => {
                let minus_d = (-d).clamp(-20.0, 20.0);
                (minus_d.exp() - minus_d - 1.0).clamp(-10.0, 10.0)
            }
        }
    }
}

/// The estimate for each token, `[tokens]`; differentiable in `logp`.
#[must_use]
pub fn kl_penalty(kind: KlType, logp: Tensor<1>, ref_logp: Tensor<1>) -> Tensor<1> {
    match kind {
        KlType::K1 => logp - ref_logp,
        KlType::Abs => (logp - ref_logp).abs(),
        KlType::K2 => {
            let d = logp - ref_logp;
            d.clone() * d * 0.5
        }
        KlType::K3 => {
            let minus_d = (ref_logp - logp).clamp(-20.0, 20.0);
            (minus_d.clone().exp() - minus_d - 1.0).clamp(-10.0, 10.0)
        }
    }
}
