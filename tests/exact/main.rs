//! Tests in f64: here two ways to the same number must agree to ten digits, so that no mistake hides in rounding.

#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod support;

mod parity;

/// What this binary's tensors are.
const PRECISION: burn::tensor::FloatDType = burn::tensor::FloatDType::F64;

/// Whether models run through kernels.
const KERNELS: bool = true;
