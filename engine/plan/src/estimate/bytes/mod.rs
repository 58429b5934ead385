//! Bytes that a device and its host hold, moment by moment.

pub(crate) mod activations;
pub(crate) mod elements;
pub(crate) mod experts;
pub(crate) mod linear;
pub(crate) mod quantized_base;
pub(crate) mod sample;
pub(crate) mod sizes;
pub(crate) mod states;
pub(crate) mod train;
pub(crate) mod usage;
