//! The tests in f64 once more with the CPU's kernels off: the formulas in tensor operations, which GPUs run.

#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod support;

#[path = "../exact/parity"]
mod parity {
    mod adapters;
    mod critic;
    mod plans;
    mod shared;
}

/// What this binary's tensors are.
const PRECISION: burn::tensor::FloatDType = burn::tensor::FloatDType::F64;

/// Whether models run through kernels.
const KERNELS: bool = false;
