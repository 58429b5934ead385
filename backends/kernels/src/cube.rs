//! Fused operations on `CubeCL` backends, written once for CUDA (through NVRTC), Vulkan (SPIR-V), Metal (MSL) and
//! WebGPU (WGSL).
//!
//! Every kernel computes in f32, whatever type its tensors are stored in, and sums in a fixed order, without atomics.
//! It binds at most eight buffers, as many as WebGPU guarantees.
//!
//! Terms are `CubeCL`'s: a *cube* is a CUDA thread block, a *unit* a thread, a *plane* a warp. `simt` kernels compute
//! on plain units; `tensor_core` kernels, for half precision, through matrix instructions (`cmma`).

#![allow(
    clippy::extra_unused_type_parameters,
    clippy::fn_params_excessive_bools,
    clippy::manual_is_multiple_of,
    clippy::needless_range_loop,
    clippy::too_many_arguments,
    clippy::trivially_copy_pass_by_ref,
    clippy::used_underscore_binding,
    reason = "kernels index buffers, each of them an argument; bools select code at compile time; the macro reads the argument of types, \
              which may be those of another argument's fields, knows no `is_multiple_of`, and takes a unit's own arrays by reference"
)]

pub(super) mod accumulate;
pub(super) mod adamw;
pub(super) mod attention;
pub(super) mod bias;
pub(super) mod block8;
mod cmma;
mod column_sums;
pub(super) mod convolution;
#[cfg(feature = "cuda")]
pub(super) mod cublaslt;
mod cuda;
pub(super) mod decays;
pub(super) mod delta_rule;
pub(super) mod embedding;
pub(super) mod fused_linear;
pub(super) mod fused_norm;
pub(super) mod gated_norm;
mod gemm;
pub(super) mod glu;
mod graph;
mod launch;
pub(super) mod multi_tensor;
pub(super) mod norm;
mod packed;
pub(super) mod paged;
mod prelude;
pub(super) mod product;
pub(super) mod quantized_linear;
pub(super) mod rotary;
pub(super) mod sample;
pub(super) mod scores;
mod skinny_gemm;
pub(super) mod step;

pub(super) use graph::CubeRecorder;
pub(super) use launch::{alike, available, enabled_on, plain};
pub(super) use packed::QuantizedMatrix;
