//! Fused operations of a decoder, forward and backward, on every backend.
//!
//! Burn makes a pass over memory for every small operation; a kernel makes one for a whole formula. `operations` is
//! the table of what there is: a function takes tensors of any backend and computes in a kernel where one takes them,
//! and in tensor operations elsewhere, and tests compare the two. `cpu` has the kernels of the CPU backend, in f32 and
//! f64; `cube` those of `CubeCL` backends, in f32 inside and f32, f16 or bf16 outside. [`table`] says which are used
//! where.

#![cfg_attr(
    not(any(feature = "wgpu", feature = "cuda")),
    allow(dead_code, unused_variables, reason = "the inputs of GPU kernels, which this build leaves out")
)]

mod autodiff;
mod backend;
pub mod check;
mod choice;
mod clamped_swiglu;
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod cublaslt;
mod exact;
mod expert_bias;
mod experts;
mod formulas;
mod gradient_sums;
mod graph;
mod operations;
mod packed;
mod quantized_experts;
mod quantized_linear;
mod root;
mod scoped;
mod step;

pub use autodiff::set_enabled;
pub use choice::table;
pub use cublaslt::{CUBLASLT_OPERATIONS, open_cublaslt, with_cublaslt};
pub use exact::{exact, is_exact_on};
pub use firebrick_device::team::with_team;
pub use firebrick_device::thread_pool::in_thread_pool;
pub use firebrick_metadata::delta::{DeltaHeads, SequenceRows, StateRows, write_slots};
pub use firebrick_metadata::experts::{ExpertInput, ExpertRows};
pub use firebrick_metadata::paged::{BlockTables, KvPool, PagedAttentionShape, RotaryAngles, SlotMapping};
pub use firebrick_metadata::prefix_groups::{PrefixGroups, PrefixRun, PrefixTree};
pub use firebrick_metadata::sequence_blocks::{SequenceBlocks, SharedBlocks};
pub use firebrick_metadata::shapes::{
    AdamWOutput, AdamWSlice, AdamWStep, AttentionShape, JoinedHeads, QuantizationMap, QuantizedBlocks, RowGradients,
    RowScores, RowsByToken, RunningScores, SampleOptions, SampledToken, Scaling, ScoreGradients, Transposed,
    Truncation,
};
pub use firebrick_metadata::step::{StepInputs, StepRotary, StepShape};
pub use firebrick_spec::{Activation, Operation};
pub use gradient_sums::backward_with_sums;
pub use graph::Graph;
pub use operations::*;
pub use packed::PackedWeights;
pub use step::StepBuffer;

use firebrick_metadata::{delta, paged, prefix_groups, shapes};
