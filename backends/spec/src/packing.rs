//! The copies of weights that sampling reads instead of those that are trained.

use serde::{Deserialize, Serialize};

/// How the weights of a rollout are kept in fewer bits than those that are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantization {
    /// The layers' projections and MLPs in 8 bits, each row with a scale of its own (absmax); activations, embedding, norms, biases,
    /// bypasses and the head stay as they are.
    Int8,
}

/// The copies that sampling makes of a decoder's matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Matrices in a layout for products with few rows, where a kernel knows one.
    pub panels: bool,
    /// The layers' matrices in fewer bits, in such a layout.
    pub quantization: Option<Quantization>,
}
