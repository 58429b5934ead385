//! Rows of dataset files: JSON Lines, JSON lists, CSV, Parquet and Arrow, plain or compressed, from local paths or the
//! Hub.

mod arrow;
mod columns;
mod csv;
mod files;
mod first;
mod format;
mod order;
mod parquet;
mod raw;
mod read;
mod saved;
mod store;
mod text;
mod times;

pub use files::{RowFiles, RowSource};
pub(crate) use files::{TRAIN, VALIDATION, validation_schema};
pub(crate) use format::fills_structs;
pub(crate) use order::{Indices, Order};
pub use store::Rows;

use std::collections::HashSet;

use super::shuffle::Permutation;

/// The kept rows, and the `held_out` of `len` rows that `seed` selects; both in order.
pub(crate) fn split(len: u64, held_out: u64, seed: u64) -> (Indices, Indices) {
    if held_out == 0 {
        return (Indices::Range(0..len), Indices::Range(0..0));
    }
    let shuffle = Permutation::new(len, seed, 0);
    let chosen: HashSet<u64> = (0..held_out).map(|i| shuffle.of(i)).collect();
    let rows = |wanted: bool| Indices::List((0..len).filter(|row| chosen.contains(row) == wanted).collect());
    (rows(false), rows(true))
}

#[cfg(test)]
mod tests;
