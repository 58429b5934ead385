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

mod attention;
mod autodiff;
mod backend;
mod convolution;
mod delta_rule;
mod experts;
mod gated_norm;
mod gemm;
mod glu;
mod half;
mod linear;
mod norm;
mod packed;
mod paged;
mod parallel;
mod quantized_experts;
mod quantized_linear;
mod real;
mod rotary;
mod sample;
mod scores;
mod skinny_gemm;
pub(super) mod team;
pub(super) mod thread_pool;
mod widest;
pub(super) mod zeros;

pub(super) use backend::CpuKernels;
pub(super) use paged::SlotRuns;

#[cfg(test)]
mod tests;
