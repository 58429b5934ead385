//! Fused operations on the CPU backend.
//!
//! Burn's flex backend makes one pass over memory for every small operation, most of them on one core. A kernel here
//! makes one pass for a whole formula, on all cores, with the widest vectors the machine has (chosen at run time). Tensors in half
//! precision are kept in two bytes and computed with in f32.
//!
//! Work is cut into blocks of fixed size, never by the number of threads, so that sums come out the same on any machine.

#![allow(
    clippy::inline_always,
    reason = "a vectoriser sees only what is inlined into the function that has the wide instructions"
)]

pub(super) mod attention;
pub(super) mod columns;
pub(super) mod cores;
pub(super) mod decode;
pub(super) mod draw;
pub(super) mod few;
pub(super) mod glu;
mod half;
pub(super) mod linear;
pub(super) mod norm;
pub(super) mod panels;
mod parallel;
mod real;
pub(super) mod rotary;
pub(super) mod scores;
mod tape;

pub(super) use tape::available;

#[cfg(test)]
mod tests;
