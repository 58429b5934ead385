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

mod adamw;
mod attention;
mod backend;
mod block8;
mod cmma;
mod decode;
mod draw;
mod embedding;
mod glu;
mod launch;
mod norm;
mod packed;
mod rotary;
mod scores;

pub(super) use backend::CubeKernels;
