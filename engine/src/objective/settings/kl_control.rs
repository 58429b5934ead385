//! The section `kl_ctrl`.

use serde::{Deserialize, Serialize};

/// Whether the coefficient moves (verl's `kl_ctrl.type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlControl {
    /// It stays.
    #[default]
    Fixed,
    /// It follows the measured KL.
    Adaptive,
}

/// Settings of the controller, under verl's names (`algorithm.kl_ctrl`).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KlControlConfig {
    /// Whether the coefficient moves.
    #[serde(rename = "type")]
    pub kind: KlControl,
    /// The coefficient, or the one it starts from.
    pub kl_coef: f64,
    /// KL of a completion token that an adaptive coefficient aims at.
    pub target_kl: f64,
    /// Completions over which an adaptive coefficient can change by a fifth of itself.
    pub horizon: f64,
}

impl Default for KlControlConfig {
    fn default() -> Self {
        Self { kind: KlControl::Fixed, kl_coef: 0.001, target_kl: 0.1, horizon: 10_000.0 }
    }
}
