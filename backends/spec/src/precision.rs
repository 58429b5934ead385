//! The float type of parameters and activations.
//!
//! In half precision, weights and activations are stored in two bytes, and products take and give two bytes; whatever
//! adds up many numbers or sees their tails is computed in f32: norms, rotary angles, softmax, log-probs, losses,
//! accumulated gradients, master weights, moments.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The float type of a model's parameters and activations. In exactness tests `F32` is the device's type, f64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 4 bytes.
    #[default]
    F32,
    /// 2 bytes with 8 bits of mantissa and the range of f32.
    Bf16,
    /// 2 bytes with 11 bits of mantissa; the loss is scaled.
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// How configurations spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Bytes of a number.
    pub fn width(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Whether it has two bytes.
    pub fn is_half(self) -> bool {
        self != Self::F32
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_configurations() {
        for precision in Precision::ALL {
            let name = serde_json::to_string(&precision).unwrap();
            assert_eq!(name, format!("\"{precision}\""));
            assert_eq!(precision.width() == 2, precision.is_half());
        }
    }
}
