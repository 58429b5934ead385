//! Operations in tensor operations, on any device and differentiable, where the formula is longer than a row of the
//! table.

pub(crate) mod block8;
pub(crate) mod convolution;
pub(crate) mod delta_rule;
pub(crate) mod dequantize;
