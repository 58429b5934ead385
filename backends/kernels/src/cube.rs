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

mod adamw;
mod attention;
mod backend;
mod bias;
mod block8;
mod cmma;
mod column_sums;
mod convolution;
mod decays;
mod delta_rule;
mod embedding;
mod fused_norm;
mod gated_norm;
mod gemm;
mod glu;
mod graph;
mod launch;
mod norm;
mod packed;
mod paged;
mod product;
mod quantized_linear;
mod rotary;
mod sample;
mod scores;
mod skinny_gemm;
mod step;

pub(super) use backend::CubeKernels;
