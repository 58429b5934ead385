//! Fused operations of a decoder on the CPU backend, forward and backward.
//!
//! Burn's flex backend makes one pass over memory for every small operation, most of them on one core. A kernel here
//! makes one pass for a whole formula, on all cores, with the widest vectors the machine has (chosen at run time). Every
//! function returns `None` for tensors that it does not know: the caller then writes the formula in tensor operations, and
//! tests hold the two against each other. Tensors in half precision are kept in two bytes and computed with in f32.
//!
//! Work is cut into blocks of fixed size, never by the number of threads, so that sums come out the same on any machine.

#![allow(
    clippy::inline_always,
    reason = "a vectoriser sees only what is inlined into the function that has the wide instructions"
)]

mod attention;
mod cores;
mod decode;
mod draw;
mod few;
mod glu;
mod half;
mod linear;
mod norm;
mod panels;
mod parallel;
mod real;
mod rotary;
mod scores;
mod tape;

pub use attention::{AttentionShape, Family, attention};
pub use cores::on_a_core;
pub use decode::{DecodeShape, Kin, decode_attention};
pub use draw::{Drawn, draw_rows};
pub use few::{linear_each, linear_gated, linear_onto};
pub use glu::glu;
pub use linear::{linear, product, product_nt, product_tn};
pub use norm::rms_norm;
pub use panels::Panels;
pub use rotary::rotary;
pub use scores::{RowScores, ScoreGradients, score_gradient, score_rows};
pub use tape::{available, enable};

#[cfg(test)]
mod tests;
