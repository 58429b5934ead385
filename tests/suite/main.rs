//! Whole-program and cross-crate tests: on the CPU, and on every device that the build knows (`devices`).

// for the settings of a whole run in one `json!`
#![recursion_limit = "512"]

#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod support;

mod devices;
mod documents;
mod fuzz;
mod import;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod kernels;
mod parity;
mod program;
mod turns;

/// What this binary's tensors are.
const PRECISION: burn::tensor::FloatDType = burn::tensor::FloatDType::F32;

/// Whether models run through kernels.
const KERNELS: bool = true;
