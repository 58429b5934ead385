//! Whole-program and cross-crate tests, in f32 on the CPU.

#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod support;

mod names;
mod parity;
mod plans;
mod precision;
mod program;
#[cfg(feature = "wgpu")]
mod wgpu;
#[cfg(feature = "wgpu")]
mod wgpu_memory;

/// What this binary's tensors are.
const PRECISION: burn::tensor::FloatDType = burn::tensor::FloatDType::F32;

/// Whether models run through kernels.
const KERNELS: bool = true;
