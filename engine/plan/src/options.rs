//! Values of memory settings.

use crate::Layout;
use serde::{Deserialize, Serialize};

/// What is run again as one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Whole layers.
    #[default]
    Block,
    /// Attention and MLP halves: half the live graph, twice the kept inputs.
    Half,
}

/// Where weights live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ParamOffload {
    /// On the device, always.
    #[default]
    None,
    /// On the host in phases that do not use the model (verl's `param_offload`).
    Idle,
    /// On the host, visiting the device segment by segment.
    Streamed,
}

/// Where the optimizer's state lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OptimizerOffload {
    /// On the device, always.
    #[default]
    None,
    /// On the host outside the update (verl's `optimizer_offload`).
    Idle,
    /// On the host, always; the update is computed there (Megatron's `optimizer_cpu_offload`).
    Cpu,
}

/// How the sequences of a micro-batch lie in its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Whichever was measured to be faster.
    #[default]
    Auto,
    /// One behind the other, without padding (verl's `use_remove_padding`).
    Packed,
    /// Each padded to the longest of its micro-batch.
    Padded,
}

impl Packing {
    /// The layout it comes to.
    #[must_use]
    pub fn layout(self) -> Layout {
        match self {
            Self::Auto | Self::Packed => Layout::Packed,
            Self::Padded => Layout::Padded,
        }
    }
}
