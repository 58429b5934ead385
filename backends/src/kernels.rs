//! Fused operations of a decoder, forward and backward, on every backend.
//!
//! Burn makes a pass over memory for every small operation; a kernel makes one for a whole formula. Every function here takes
//! tensors of any backend and returns `None` where no kernel is used for them: the caller then computes the formula in tensor
//! operations, and tests compare the two. `cpu` has the kernels of the CPU backend, in f32 and f64; `cube` those
//! of `CubeCL` backends, in f32 inside and f32, f16 or bf16 outside: each implements the trait `Kernels`, and `dispatch` picks one
//! by the device of the tensors. [`table`] says which are used where.

mod autodiff;
mod backend;
mod choice;
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
mod dispatch;
mod families;
mod packed;
mod shapes;

pub use autodiff::enable;
pub use choice::table;
pub use cpu::columns::{Window, copy_columns, zeros};
pub use cpu::thread_pool::in_thread_pool;
pub use dispatch::{
    adamw, add_rows, attention, available, choose_rows, decode_attention, dequantise8, draw_rows,
    glu, linear, linear_each, linear_gated, linear_onto, product, product_nt, product_tn,
    quantise8, rms_norm, rms_norm_onto, rotary, score_gradient, score_rows, score_tile, scores,
    tile_gradient, updates, vocabulary_tile,
};
pub use families::{Families, Family};
pub use firebrick_spec::Operation;
pub use packed::Panels;
pub use shapes::{
    AdamWStep, AttentionShape, Blocks8, Choice, DecodeShape, Decoded, Drawn, Gate, Kin, Map8,
    RowScores, RunningScores, Scaling, ScoreGradients, Segments, Truncation, Updated,
};
