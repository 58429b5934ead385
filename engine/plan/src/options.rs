//! Values of memory settings.

use crate::Layout;
use serde::{Deserialize, Serialize};

/// Unit of recomputation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Whole layers.
    #[default]
    Block,
    /// Attention and MLP separately: half the live activations, twice the checkpointed.
    Half,
}

/// Location of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParamOffload {
    /// On the device.
    #[default]
    None,
    /// On the host in phases that do not use them.
    Idle,
    /// On the host, copied to the device segment by segment.
    Streamed,
}

/// Location of the optimizer's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerOffload {
    /// On the device.
    #[default]
    None,
    /// On the host between updates.
    Idle,
    /// On the host, which also computes the update.
    Cpu,
}

/// Layout of the sequences of a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// The same as `packed`.
    #[default]
    Auto,
    /// Concatenated without padding.
    Packed,
    /// Each padded to the longest of its micro-batch.
    Padded,
}

impl Packing {
    /// The layout it comes to.
    pub fn layout(self) -> Layout {
        match self {
            Self::Auto | Self::Packed => Layout::Packed,
            Self::Padded => Layout::Padded,
        }
    }
}

/// State that data-parallel devices shard: stages of `ZeRO` (arXiv:1910.02054).
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
    pub fn number(self) -> u8 {
        self as u8
    }
}
