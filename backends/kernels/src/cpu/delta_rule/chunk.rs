//! The gated delta rule for some consecutive tokens of a sequence at once (Yang et al., 2024, arXiv:2406.06484).
//!
//! With c the running sum of g within the chunk, D[i, j] = e^(cᵢ − cⱼ) for i ≥ j, and S the state before it:
//!
//! `A = strict_lower(β K Kᵀ ∘ D)`, `U = V − eᶜ K S`, `N = (I + A)⁻¹ β U`, `P = lower(Q Kᵀ ∘ D)`,
//!
//! `O = eᶜ Q S + P N`, `S ← e^(c_last) S + (e^(c_last − c) K)ᵀ N`.
//!
//! N is found by substitution: the inverse is never made.

use super::inputs::{Inputs, inverse_norm};
use super::products::{columns, lower_of, lower_times, product};
use crate::cpu::prelude::*;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 64;

/// Rows of N that are found by sums of rows; those before them enter by a product.
const SOLVED: usize = 16;

/// Sets the length of a buffer, whatever it holds.
pub(super) fn sized<T: Real>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::ZERO);
    buffer
}

/// Prefetches some columns of a matrix's rows: where rows lie pages apart, hardware prefetchers do not follow.
#[inline(always)]
pub(super) fn prefetch_rows<T>(first: *const T, stride: usize, rows: usize, width: usize) {
    for row in 0..rows {
        let row = first.wrapping_add(row * stride);
        for at in (0..width).step_by(CACHE_LINE / size_of::<T>()) {
            prefetch(row.wrapping_add(at).cast());
        }
    }
}

/// Queries and keys of a chunk, which all value heads of a key head use.
#[derive(Default)]
pub(super) struct Keys<T> {
    /// Queries and below them keys, divided by their norms and queries by √`key_dim`, `[2 m, key_dim]`.
    pub qk: Vec<T>,
    /// The inverse norms of both, `[2 m]`.
    pub inverse: Vec<T>,
    /// Q Kᵀ and below it K Kᵀ, `[2 m, m]`, on the diagonal and below it.
    pub products: Vec<T>,
}

impl<T: Real> Keys<T> {
    /// Those of some rows.
    pub fn load(&mut self, inputs: &Inputs<'_, T>, key_head: usize, rows: Range<usize>) {
        let (dim, m) = (inputs.heads.key_dim, rows.len());
        let qk = sized(&mut self.qk, 2 * m * dim);
        let inverse = sized(&mut self.inverse, 2 * m);
        let (queries, keys) = qk.split_at_mut(m * dim);
        // rows lie pages apart: plain copies keep several loads under way at a time
        let pairs = queries.chunks_exact_mut(dim).zip(keys.chunks_exact_mut(dim));
        for ((query, key), row) in pairs.zip(rows) {
            query.copy_from_slice(&inputs.qkv[inputs.query(row, key_head)..][..dim]);
            key.copy_from_slice(&inputs.qkv[inputs.key(row, key_head)..][..dim]);
        }
        vectorised!({
            let root = T::ONE / T::of((dim as f64).sqrt());
            let rows = qk.chunks_exact_mut(dim).zip(inverse.iter_mut());
            for (i, (x, inverse)) in rows.enumerate() {
                *inverse = inverse_norm(x);
                let scale = if i < m { *inverse * root } else { *inverse };
                for x in x {
                    *x = *x * scale;
                }
            }
        });
        let products = sized(&mut self.products, 2 * m * m);
        let (of_queries, of_keys) = products.split_at_mut(m * m);
        let (queries, keys) = self.qk.split_at(m * dim);
        let keys_t = Matrix::row_major(keys, dim).transposed();
        for (out, left) in [(of_queries, queries), (of_keys, keys)] {
            lower_of([m, dim], Target::new(out, m, false), Matrix::row_major(left, dim), keys_t);
        }
    }

    /// Queries, and keys.
    pub fn split(&self) -> (&[T], &[T]) {
        self.qk.split_at(self.qk.len() / 2)
    }
}

/// Buffers of one thread for a chunk of a value head.
#[derive(Default)]
pub(super) struct Scratch<T> {
    /// Running sums of g, and their exponentials.
    c: Vec<T>,
    pub gamma: Vec<T>,
    /// `e^(c_last − c)`.
    pub rest: Vec<T>,
    pub beta: Vec<T>,
    /// D, of which the part above the diagonal is zero, `[m, m]`.
    pub decay: Vec<T>,
    /// P, `[m, m]`.
    pub p: Vec<T>,
    /// −A, `[m, m]`.
    pub minus_a: Vec<T>,
    /// Q S, if wanted, and behind it K S, `[m, value_dim]` each.
    read: Vec<T>,
    /// U, `[m, value_dim]`.
    pub u: Vec<T>,
    /// β U, then N, `[m, value_dim]`.
    pub n: Vec<T>,
    /// Keys times `e^(c_last − c)`, `[m, key_dim]`.
    pub kept: Vec<T>,
}

impl<T: Real> Scratch<T> {
    /// Decays of a value head, P and −A. Matrices have their lower blocks.
    pub fn decays(&mut self, inputs: &Inputs<'_, T>, head: usize, rows: Range<usize>, keys: &Keys<T>) {
        let m = rows.len();
        let values = inputs.heads.values;
        let mut sum = T::ZERO;
        self.c.clear();
        self.beta.clear();
        for row in rows {
            sum += inputs.g[row * values + head];
            self.c.push(sum);
            self.beta.push(inputs.beta[row * values + head]);
        }
        let (c, beta) = (&self.c, &self.beta);
        let gamma = sized(&mut self.gamma, m);
        let rest = sized(&mut self.rest, m);
        let decay = sized(&mut self.decay, m * m);
        let p = sized(&mut self.p, m * m);
        let minus_a = sized(&mut self.minus_a, m * m);
        let (qk, kk) = keys.products.split_at(m * m);
        vectorised!({
            for i in 0..m {
                let (own_c, own_beta) = (c[i], beta[i]);
                gamma[i] = own_c.exp();
                rest[i] = (sum - own_c).exp();
                let row_part = i * m..i * m + columns(i, m);
                let width = row_part.len();
                let d = &mut decay[row_part.clone()];
                // whole blocks: rows of any length would end in exponentials one by one
                for (d, &c_j) in d.iter_mut().zip(&c[..width]) {
                    *d = (own_c - c_j).exp();
                }
                d[i + 1..].fill(T::ZERO);
                let (p, qk) = (&mut p[row_part.clone()], &qk[row_part.clone()]);
                for ((p, &qk), &d) in p.iter_mut().zip(qk).zip(&*d) {
                    *p = qk * d;
                }
                let (minus_a, kk) = (&mut minus_a[row_part.clone()], &kk[row_part]);
                for ((a, &kk), &d) in minus_a.iter_mut().zip(kk).zip(&*d) {
                    *a = -(own_beta * kk * d);
                }
                minus_a[i] = T::ZERO;
            }
        });
    }

    /// K S, with Q S where `queries`, then U and β U.
    fn residuals(
        &mut self,
        inputs: &Inputs<'_, T>,
        head: usize,
        rows: Range<usize>,
        keys: &Keys<T>,
        state: &[T],
        queries: bool,
    ) {
        let (dim, width, m) = (inputs.heads.key_dim, inputs.heads.value_dim, rows.len());
        let first = &inputs.qkv[inputs.value(rows.start, head)..];
        prefetch_rows(first.as_ptr(), inputs.heads.channels(), m, width);
        let (skipped, count) = if queries { (0, 2 * m) } else { (m, m) };
        let read = sized(&mut self.read, count * width);
        product(
            [count, dim, width],
            Target::new(read, width, false),
            Matrix::row_major(&keys.qk[skipped * dim..], dim),
            Matrix::row_major(state, width),
        );
        let ks = &self.read[(count - m) * width..];
        let (u, n) = (sized(&mut self.u, m * width), sized(&mut self.n, m * width));
        let (gamma, beta) = (&self.gamma, &self.beta);
        vectorised!({
            for (i, row) in rows.enumerate() {
                let (gamma, beta) = (gamma[i], beta[i]);
                let v = &inputs.qkv[inputs.value(row, head)..][..width];
                let part = i * width..(i + 1) * width;
                let (u, n) = (&mut u[part.clone()], &mut n[part.clone()]);
                for (((u, n), &v), &ks) in u.iter_mut().zip(n).zip(v).zip(&ks[part]) {
                    *u = v - gamma * ks;
                    *n = beta * *u;
                }
            }
        });
    }

    /// β U into N.
    fn solve(&mut self, m: usize, width: usize) {
        for start in (0..m).step_by(SOLVED) {
            let end = (start + SOLVED).min(m);
            let (before, block) = self.n.split_at_mut(start * width);
            if start > 0 {
                let a = Matrix::row_major(&self.minus_a[start * m..], m);
                let out = Target::new(block, width, true);
                product([end - start, start, width], out, a, Matrix::row_major(before, width));
            }
            let minus_a = &self.minus_a;
            vectorised!({
                for i in start + 1..end {
                    let (before, row) = block.split_at_mut((i - start) * width);
                    let row = &mut row[..width];
                    for (j, before) in (start..i).zip(before.chunks_exact(width)) {
                        let a = minus_a[i * m + j];
                        for (x, &y) in row.iter_mut().zip(before) {
                            *x += a * y;
                        }
                    }
                }
            });
        }
    }

    /// Keys times `e^(c_last − c)`.
    pub fn kept_keys(&mut self, keys: &Keys<T>, dim: usize) {
        let (_, keys) = keys.split();
        let kept = sized(&mut self.kept, keys.len());
        let rest = &self.rest;
        vectorised!({
            let rows = kept.chunks_exact_mut(dim).zip(keys.chunks_exact(dim));
            for ((kept, key), &rest) in rows.zip(rest) {
                for (kept, &key) in kept.iter_mut().zip(key) {
                    *kept = key * rest;
                }
            }
        });
    }

    /// U and N of a chunk, and the state after it; with Q S where `queries`.
    pub fn advance(
        &mut self,
        inputs: &Inputs<'_, T>,
        head: usize,
        rows: Range<usize>,
        keys: &Keys<T>,
        state: &mut [T],
        queries: bool,
    ) {
        let (dim, width, m) = (inputs.heads.key_dim, inputs.heads.value_dim, rows.len());
        self.decays(inputs, head, rows.clone(), keys);
        self.residuals(inputs, head, rows, keys, state, queries);
        self.solve(m, width);
        self.kept_keys(keys, dim);
        let decay = self.gamma[m - 1];
        vectorised!({
            for s in state.iter_mut() {
                *s = *s * decay;
            }
        });
        let kept = Matrix::row_major(&self.kept, dim).transposed();
        let out = Target::new(state, width, true);
        product([dim, m, width], out, kept, Matrix::row_major(&self.n, width));
    }

    /// [`Self::advance`], and the output of the rows, the first of which begins at `out`.
    pub fn forward(
        &mut self,
        inputs: &Inputs<'_, T>,
        head: usize,
        rows: Range<usize>,
        keys: &Keys<T>,
        state: &mut [T],
        out: *mut T,
    ) {
        let (width, m) = (inputs.heads.value_dim, rows.len());
        prefetch_rows(out, inputs.out_row(), m, width);
        self.advance(inputs, head, rows, keys, state, true);
        let (read, gamma, stride) = (&self.read, &self.gamma, inputs.out_row());
        vectorised!({
            for (i, &gamma) in gamma.iter().enumerate() {
                // SAFETY: the caller passes the place of this head in rows that no other thread writes.
                let out = unsafe { std::slice::from_raw_parts_mut(out.add(i * stride), width) };
                for (out, &q) in out.iter_mut().zip(&read[i * width..]) {
                    *out = gamma * q;
                }
            }
        });
        let out = Target { start: out, row: stride, add: true };
        let (p, n) = (Matrix::row_major(&self.p, m), Matrix::row_major(&self.n, width));
        lower_times([m, width], out, p, n);
    }
}
