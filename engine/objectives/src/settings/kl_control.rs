//! The section `kl_ctrl`.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Whether the coefficient adapts (verl's `kl_ctrl.type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlControl {
    /// Constant.
    #[default]
    Fixed,
    /// `β *= 1 + clip(KL / target_kl − 1, ±0.2) · completions / horizon` after every step.
    Adaptive,
}

/// Settings of the KL coefficient, under verl's names (`algorithm.kl_ctrl`).
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KlControlConfig {
    /// Whether the coefficient adapts.
    #[serde(rename = "type")]
    pub kind: KlControl,
    /// Coefficient; the initial one of `adaptive`.
    #[default(0.001)]
    #[schemars(range(min = 0))]
    pub kl_coef: f64,
    /// Target KL per token of `adaptive`.
    #[default(0.1)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub target_kl: f64,
    /// Horizon of `adaptive`, in completions.
    #[default(10_000.0)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub horizon: f64,
}
