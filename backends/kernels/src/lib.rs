//! Fused operations of a decoder, forward and backward, on every backend.
//!
//! Burn makes a pass over memory for every small operation; a kernel makes one for a whole formula. Every function here
//! takes tensors of any backend and returns `None` where no kernel is used for them: the caller then computes the
//! formula in tensor operations, and tests compare the two. `cpu` has the kernels of the CPU backend, in f32 and f64;
//! `cube` those of `CubeCL` backends, in f32 inside and f32, f16 or bf16 outside: each implements the trait `Kernels`,
//! and `dispatch` picks one by the device of the tensors. [`table`] says which are used where.

mod autodiff;
mod backend;
mod choice;
mod clamped_swiglu;
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod delta;
mod dispatch;
mod expert_bias;
mod experts;
mod families;
mod graph;
mod linear_attention;
mod optimizer;
mod packed;
mod paged;
mod products;
mod quantized_experts;
mod quantized_linear;
mod root;
mod sequence_blocks;
mod shapes;
mod step;

pub use autodiff::set_enabled;
pub use choice::table;
pub use cpu::team::with_team;
pub use cpu::thread_pool::in_thread_pool;
pub use delta::{DeltaHeads, SequenceRows, StateRows};
pub use dispatch::{
    add_bias, add_rms_norm, attach_gradient, attention, available, backward_root, clamped_swiglu, combine_experts,
    copy_blocks, dequantize, draw_rows, duplicate, expert_bias, expert_linear, finish_scores, gather_kv, glu,
    glu_joined, linear, linear_add, linear_each, linear_swiglu, matmul, matmul_nt, matmul_tn, norm_heads,
    paged_attention, paged_attention_joined, product, quantized_expert_linear, quantized_linear, rms_norm,
    rms_norm_add, rotary, sample_rows, sample_rows_on_device, scatter_add_rows, score_gradient, score_rows, score_tile,
    tile_gradient, vocabulary_tile, write_kv,
};
pub use experts::{ExpertInput, ExpertRows};
pub use families::{Families, Family};
pub use firebrick_spec::Operation;
pub use graph::Graph;
pub use linear_attention::{
    causal_convolution, continue_convolution, continue_delta_rule, gated_delta_rule, gated_rms_norm, log_decays,
};
pub use optimizer::{adamw, dequantize_blockwise, has_adamw, quantize_blockwise};
pub use packed::PackedWeights;
pub use paged::{BlockTables, KvPool, PagedAttentionShape, RotaryAngles, SlotMapping};
pub use sequence_blocks::{SequenceBlocks, SharedBlocks};
pub use shapes::{
    AdamWOutput, AdamWStep, AttentionShape, Gate, JoinedHeads, QuantizationMap, QuantizedBlocks, RowScores,
    RowsByToken, RunningScores, SampleOptions, SampledToken, Scaling, ScoreGradients, Truncation,
};
pub use step::{StepBuffer, StepInputs, StepRotary, StepShape};
