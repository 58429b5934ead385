//! Stages of `ZeRO` (arXiv:1910.02054).

use serde::{Deserialize, Serialize};

/// What data-parallel devices share out among themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Zero {
    /// Nothing: each holds everything.
    #[default]
    Off,
    /// Optimizer state.
    Stage1,
    /// Gradients too.
    Stage2,
    /// Weights too (FSDP's full sharding).
    Stage3,
}

impl Zero {
    /// From nothing to everything, at the places of their numbers.
    pub const STAGES: [Self; 4] = [Self::Off, Self::Stage1, Self::Stage2, Self::Stage3];

    /// The number of a stage; 0 is off.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }
}
