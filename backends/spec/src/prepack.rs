//! The copies of weights that sampling reads instead of those that are trained.

use serde::{Deserialize, Serialize};

/// The format of the weights that sampling reads, if it has fewer bits than that of the trained ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Quantization {
    /// 8-bit attention and MLP weights with one scale per row (absmax).
    Int8,
}

/// The copies of a decoder's matrices that sampling reads instead of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepack {
    /// Whether matrices are copied for products with few rows: on the CPU, in f32, into panels; on a GPU, where they
    /// are not quantised, those of queries, keys and values into one, and those of an MLP's gate and what it gates into
    /// another.
    pub panels: bool,
    /// Quantisation of the layers' matrices, which are copied into such a layout.
    pub quantization: Option<Quantization>,
}
