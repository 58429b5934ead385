//! Fused operations on `CubeCL` backends, written once for CUDA (through NVRTC), Vulkan (SPIR-V), Metal (MSL) and WebGPU (WGSL).
//!
//! Each computes in f32 inside whatever type its tensors are stored in, and adds up in one order: there are no atomics. A
//! kernel binds at most eight buffers, as many as WGSL guarantees.

#![allow(
    clippy::needless_range_loop,
    clippy::too_many_arguments,
    clippy::used_underscore_binding,
    reason = "kernels index buffers, each an argument; the macro reads the types' argument"
)]

pub(super) mod adamw;
pub(super) mod attention;
pub(super) mod block8;
pub(super) mod decode;
pub(super) mod draw;
pub(super) mod embedding;
pub(super) mod glu;
mod launch;
mod matrices;
pub(super) mod norm;
pub(super) mod panels;
pub(super) mod rotary;
pub(super) mod scores;

pub(super) use launch::{available, largest_buffer};
