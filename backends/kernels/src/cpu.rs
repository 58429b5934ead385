//! Fused operations on the CPU backend.
//!
//! Burn's flex backend makes one pass over memory for every small operation, most of them on one core. A kernel here
//! makes one pass for a whole formula, on all cores, with the widest vectors the machine has (chosen at run time).
//! Tensors in half precision are saved in two bytes and computed with in f32.
//!
//! Work is divided into blocks of fixed size, never by the number of threads, so that sums are the same on any machine.

#![allow(
    clippy::inline_always,
    reason = "only what is inlined into the function with the wide instructions becomes vector code"
)]
#![allow(unsafe_code, reason = "tasks write disjoint parts of one tensor, and vector code reads without bounds checks")]

pub(super) mod attention;
mod autodiff;
pub(super) mod convolution;
pub(super) mod delta_rule;
pub(super) mod experts;
pub(super) mod gated_norm;
mod gemm;
pub(super) mod glu;
mod half;
pub(super) mod linear;
pub(super) mod norm;
mod packed;
pub(super) mod paged;
mod parallel;
mod prelude;
pub(super) mod quantized_experts;
pub(super) mod quantized_linear;
mod real;
pub(super) mod rotary;
pub(super) mod sample;
pub(super) mod scores;
pub(super) mod skinny_gemm;
mod softmax;
mod widest;

pub(super) use autodiff::{alike, available, is_full_precision, plain};
pub(super) use packed::PanelMatrix;

#[cfg(test)]
mod tests;
