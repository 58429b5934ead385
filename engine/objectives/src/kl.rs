//! Estimators of the KL divergence to the reference policy, per token (Schulman, "Approximating KL Divergence", 2020).

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// An estimator of the KL, with d = logp − ref (verl's `kl_loss_type`). A `+` keeps the value and takes the gradient of
/// k2, whose expectation is the gradient of the KL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlType {
    /// `d`.
    #[serde(alias = "kl")]
    #[schemars(extend("x-alias" = ["kl"]))]
    K1,
    /// `d² / 2`.
    #[serde(alias = "mse", alias = "k2+", alias = "mse+")]
    #[schemars(extend("x-alias" = ["mse", "k2+", "mse+"]))]
    K2,
    /// `e^(−d) + d − 1`, clamped to ±10.
    #[serde(alias = "low_var_kl")]
    #[schemars(extend("x-alias" = ["low_var_kl"]))]
    K3,
    /// `|d|`.
    Abs,
    /// `d` with the gradient of `k2`, whose expectation is the KL's gradient.
    #[serde(rename = "k1+", alias = "kl+")]
    #[schemars(extend("x-alias" = ["kl+"]))]
    K1Plus,
    /// `k3` with the gradient of `k2`.
    #[serde(rename = "k3+", alias = "low_var_kl+")]
    #[schemars(extend("x-alias" = ["low_var_kl+"]))]
    K3Plus,
    /// `|d|` with the gradient of `k2`.
    #[serde(rename = "abs+")]
    AbsPlus,
}

impl KlType {
    /// The estimate for one token, on the host.
    pub fn estimate(self, logp: f64, ref_logp: f64) -> f64 {
        let d = logp - ref_logp;
        match self {
            Self::K1 | Self::K1Plus => d,
            Self::Abs | Self::AbsPlus => d.abs(),
            Self::K2 => 0.5 * d * d,
            Self::K3 | Self::K3Plus => {
                let minus_d = (-d).clamp(-20.0, 20.0);
                (minus_d.exp() - minus_d - 1.0).clamp(-10.0, 10.0)
            }
        }
    }
}

/// The KL to the reference policy as a term of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlLoss {
    /// Its weight (verl's `kl_loss_coef`, TRL's `beta`).
    pub coef: f64,
    /// Its estimator.
    pub estimator: KlType,
    /// True to multiply each token's estimate by its probability ratio (TRL's `use_bias_correction_kl`).
    pub bias_correction: bool,
}

/// The estimate for each token, `[tokens]`; differentiable in `logp`.
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
        KlType::K1Plus => straight_through(KlType::K1, logp, ref_logp),
        KlType::K3Plus => straight_through(KlType::K3, logp, ref_logp),
        KlType::AbsPlus => straight_through(KlType::Abs, logp, ref_logp),
    }
}

/// The value of one estimator with the gradient of k2.
fn straight_through(value: KlType, logp: Tensor<1>, ref_logp: Tensor<1>) -> Tensor<1> {
    let forward = kl_penalty(value, logp.clone().inner(), ref_logp.clone());
    let backward = kl_penalty(KlType::K2, logp, ref_logp);
    let correction = forward - backward.clone().inner();
    backward + correction
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    #[test]
    fn a_plus_keeps_the_value_and_takes_the_gradient_of_k2() {
        let device = Device::flex();
        let vector = |v: [f32; 3]| Tensor::<1>::from_data(TensorData::from(v), &device);
        let (logp, reference) = ([-1.0, -2.5, -0.1], [-1.5, -1.0, -0.1]);
        for (plain, plus) in
            [(KlType::K1, KlType::K1Plus), (KlType::K3, KlType::K3Plus), (KlType::Abs, KlType::AbsPlus)]
        {
            let leaf = vector(logp).autodiff().require_grad();
            let kl = kl_penalty(plus, leaf.clone(), vector(reference));
            let values = kl.clone().inner().into_data().try_to_vec::<f32>().unwrap();
            let mut tape = kl.sum().backward();
            let gradient = leaf.grad_remove(&mut tape).unwrap();
            let gradient = gradient.into_data().try_to_vec::<f32>().unwrap();
            for i in 0..3 {
                let (l, r) = (f64::from(logp[i]), f64::from(reference[i]));
                assert!((f64::from(values[i]) - plain.estimate(l, r)).abs() < 1e-6);
                assert!((f64::from(gradient[i]) - (l - r)).abs() < 1e-6, "{plus:?}");
            }
        }
    }
}
