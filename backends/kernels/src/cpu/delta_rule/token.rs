//! The gated delta rule for one token of a sequence. The states of a batch do not fit the caches, one head's does: each
//! is read from memory once and written once.

use super::chunk::{prefetch_rows, sized};
use super::inputs::{Inputs, inverse_norm};
use crate::cpu::prelude::*;

/// Rows of a state that are read or written at a time, so that a sum over them stays in a register.
const ROWS_PER_PASS: usize = 4;

/// Distance of the prefetched rows from those that are read, in units of [`ROWS_PER_PASS`]. Behind a state is that of
/// the next head.
const AHEAD: usize = 2;

/// One token of the heads that share a key, each with its state.
pub(super) fn step<T: Real>(
    inputs: &Inputs<'_, T>,
    key_head: usize,
    row: usize,
    states: &mut [T],
    delta: &mut Vec<T>,
    target: SharedPtr<T>,
) {
    let heads = inputs.heads;
    let (dim, width) = (heads.key_dim, heads.value_dim);
    let q = &inputs.qkv[inputs.query(row, key_head)..][..dim];
    let k = &inputs.qkv[inputs.key(row, key_head)..][..dim];
    let delta = sized(delta, width);
    vectorised!({
        let q_scale = inverse_norm(q) / T::of((dim as f64).sqrt());
        let k_scale = inverse_norm(k);
        for (i, state) in states.chunks_exact_mut(dim * width).enumerate() {
            let head = key_head * heads.group() + i;
            let at = row * heads.values + head;
            let (decay, beta) = (inputs.g[at].exp(), inputs.beta[at]);
            let vectors = Vectors { q, k, q_scale, k_scale, decay };
            vectors.held(state, delta);
            let v = &inputs.qkv[inputs.value(row, head)..][..width];
            for (d, &v) in delta.iter_mut().zip(v) {
                *d = beta * (v - *d);
            }
            // SAFETY: no other task writes this head of this row.
            let out = unsafe { target.slice(row * inputs.out_row() + head * width, width) };
            vectors.write(state, delta, out);
        }
    });
}

/// A token's query and key, the factors that make unit vectors of them, and the decay of the state.
#[derive(Clone, Copy)]
struct Vectors<'a, T> {
    q: &'a [T],
    k: &'a [T],
    q_scale: T,
    k_scale: T,
    decay: T,
}

impl<T: Real> Vectors<'_, T> {
    /// The value that the decayed state holds for the key.
    #[inline(always)]
    fn held(&self, state: &[T], held: &mut [T]) {
        held.fill(T::ZERO);
        let width = held.len();
        let whole = self.k.len() / ROWS_PER_PASS * ROWS_PER_PASS;
        for row in (0..whole).step_by(ROWS_PER_PASS) {
            let rows = &state[row * width..];
            let ahead = rows.as_ptr().wrapping_add(AHEAD * ROWS_PER_PASS * width);
            prefetch_rows(ahead, width, ROWS_PER_PASS, width);
            self.read_rows::<ROWS_PER_PASS>(rows, row, held);
        }
        for row in whole..self.k.len() {
            self.read_rows::<1>(&state[row * width..], row, held);
        }
    }

    /// Changes the state, and adds to `out` what the query reads of it.
    #[inline(always)]
    fn write(&self, state: &mut [T], delta: &[T], out: &mut [T]) {
        let width = out.len();
        let whole = self.k.len() / ROWS_PER_PASS * ROWS_PER_PASS;
        for row in (0..whole).step_by(ROWS_PER_PASS) {
            self.write_rows::<ROWS_PER_PASS>(&mut state[row * width..], row, delta, out);
        }
        for row in whole..self.k.len() {
            self.write_rows::<1>(&mut state[row * width..], row, delta, out);
        }
    }

    /// Adds what N rows of the state hold, the first of which is `row`.
    #[inline(always)]
    fn read_rows<const N: usize>(&self, rows: &[T], row: usize, held: &mut [T]) {
        let (width, decay) = (held.len(), self.decay);
        let rows: [&[T]; N] = std::array::from_fn(|i| &rows[i * width..][..width]);
        let k: [T; N] = std::array::from_fn(|i| self.k[row + i] * self.k_scale);
        for (d, held) in held.iter_mut().enumerate() {
            let mut sum = *held;
            for i in 0..N {
                sum += rows[i][d] * decay * k[i];
            }
            *held = sum;
        }
    }

    /// Changes N rows of the state, the first of which is `row`.
    #[inline(always)]
    fn write_rows<const N: usize>(&self, rows: &mut [T], row: usize, delta: &[T], out: &mut [T]) {
        let width = out.len();
        let q: [T; N] = std::array::from_fn(|i| self.q[row + i] * self.q_scale);
        let k: [T; N] = std::array::from_fn(|i| self.k[row + i] * self.k_scale);
        let mut rest = rows;
        let mut rows: [&mut [T]; N] = std::array::from_fn(|_| {
            let (row, others) = std::mem::take(&mut rest).split_at_mut(width);
            rest = others;
            row
        });
        let whole = width / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            self.write_columns(first..first + LANES, &mut rows, [q, k], delta, out);
        }
        self.write_columns(whole..width, &mut rows, [q, k], delta, out);
    }

    /// As many columns as there are lanes, or fewer. Sums and changes are copied: of so many slices the compiler would
    /// not believe that none overlaps another.
    #[inline(always)]
    fn write_columns<const N: usize>(
        &self,
        columns: Range<usize>,
        rows: &mut [&mut [T]; N],
        [q, k]: [[T; N]; 2],
        delta: &[T],
        out: &mut [T],
    ) {
        let (count, decay) = (columns.len(), self.decay);
        let mut sums = lanes(&out[columns.clone()]);
        let changes = lanes(&delta[columns.clone()]);
        for (i, row) in rows.iter_mut().enumerate() {
            let row = &mut row[columns.clone()][..count];
            for lane in 0..count {
                let s = row[lane] * decay + k[i] * changes[lane];
                row[lane] = s;
                sums[lane] += s * q[i];
            }
        }
        out[columns].copy_from_slice(&sums[..count]);
    }
}
