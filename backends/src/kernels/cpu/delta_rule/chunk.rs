//! The gated delta rule for some consecutive tokens of a sequence at once (Yang et al., 2024, arXiv:2406.06484).
//!
//! With c the running sum of g within the chunk, D[i, j] = e^(cᵢ − cⱼ) for i ≥ j, and S the state before it:
//!
//! `A = strict_lower(β K Kᵀ ∘ D)`, `R = β (V − eᶜ K S)`, `N = (I + A)⁻¹ R`, `P = lower(Q Kᵀ ∘ D)`,
//!
//! `O = eᶜ Q S + P N`, `S ← e^(c_last) S + (e^(c_last − c) K)ᵀ N`.
//!
//! N is found by substitution: the inverse is never made.

use super::inputs::{Inputs, inverse_norm};
use crate::kernels::cpu::gemm::{Matrix, Size, Target, multiply};
use crate::kernels::cpu::parallel::vectorised;
use crate::kernels::cpu::real::Real;
use gemm::Parallelism;
use std::ops::Range;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 64;

/// Rows of N that are found by sums of rows; those before them enter by a product.
const SOLVED: usize = 16;

/// A row-major matrix.
pub(super) fn matrix<T>(values: &[T], row: usize) -> Matrix<T> {
    Matrix {
        start: values.as_ptr(),
        row,
        column: 1,
    }
}

pub(super) fn transposed<T>(m: Matrix<T>) -> Matrix<T> {
    Matrix {
        row: m.column,
        column: m.row,
        ..m
    }
}

pub(super) fn target<T>(values: &mut [T], row: usize, add: bool) -> Target<T> {
    Target {
        start: values.as_mut_ptr(),
        row,
        add,
    }
}

/// `out = a · b`, or `out += a · b`, on this thread.
pub(super) fn product<T: Real>([m, k, n]: [usize; 3], out: Target<T>, a: Matrix<T>, b: Matrix<T>) {
    multiply(Size { m, k, n }, out, a, b, Parallelism::None);
}

/// Sets the length of a buffer, whatever it holds.
pub(super) fn sized<T: Real>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    buffer.resize(len, T::ZERO);
    buffer
}

/// Buffers of one thread for a chunk: what the heads of a key share, and what belongs to one of them.
#[derive(Default)]
pub(super) struct Scratch<T> {
    /// Queries and below them keys, divided by their norms and queries by √`key_dim`, `[2 m, key_dim]`.
    pub qk: Vec<T>,
    /// Q Kᵀ and below it K Kᵀ, `[2 m, m]`.
    pub products: Vec<T>,
    /// Running sums of g, and their exponentials.
    pub c: Vec<T>,
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
    /// Q S and below it K S, `[2 m, value_dim]`.
    pub read: Vec<T>,
    /// R, then N, `[m, value_dim]`.
    pub n: Vec<T>,
    /// Keys times `e^(c_last − c)`, `[m, key_dim]`.
    pub kept: Vec<T>,
}

impl<T: Real> Scratch<T> {
    /// Queries and keys of some rows, and their products.
    pub fn load(&mut self, inputs: &Inputs<'_, T>, key_head: usize, rows: Range<usize>) {
        let (dim, m) = (inputs.heads.key_dim, rows.len());
        let qk = sized(&mut self.qk, 2 * m * dim);
        let (queries, keys) = qk.split_at_mut(m * dim);
        vectorised(
            #[inline(always)]
            || {
                let scale = T::ONE / T::of((dim as f64).sqrt());
                let both = queries
                    .chunks_exact_mut(dim)
                    .zip(keys.chunks_exact_mut(dim));
                for ((query, key), row) in both.zip(rows) {
                    let q = &inputs.qkv[inputs.query(row, key_head)..][..dim];
                    let k = &inputs.qkv[inputs.key(row, key_head)..][..dim];
                    let (q_scale, k_scale) = (inverse_norm(q) * scale, inverse_norm(k));
                    for i in 0..dim {
                        query[i] = q[i] * q_scale;
                        key[i] = k[i] * k_scale;
                    }
                }
            },
        );
        let out = target(sized(&mut self.products, 2 * m * m), m, false);
        let keys = transposed(matrix(&self.qk[m * dim..], dim));
        product([2 * m, dim, m], out, matrix(&self.qk, dim), keys);
    }

    /// Decays of a value head, P and −A.
    pub fn decays(&mut self, inputs: &Inputs<'_, T>, head: usize, rows: Range<usize>) {
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
        let (qk, kk) = self.products.split_at(m * m);
        vectorised(
            #[inline(always)]
            || {
                for i in 0..m {
                    gamma[i] = c[i].exp();
                    rest[i] = (sum - c[i]).exp();
                    let at = i * m;
                    let own = &mut decay[at..at + m];
                    for (d, &c_j) in own[..=i].iter_mut().zip(&c[..=i]) {
                        *d = (c[i] - c_j).exp();
                    }
                    own[i + 1..].fill(T::ZERO);
                    for j in 0..m {
                        p[at + j] = qk[at + j] * own[j];
                        minus_a[at + j] = -(beta[i] * kk[at + j] * own[j]);
                    }
                    minus_a[at + i] = T::ZERO;
                }
            },
        );
    }

    /// Q S, K S and R.
    pub fn residuals(
        &mut self,
        inputs: &Inputs<'_, T>,
        head: usize,
        rows: Range<usize>,
        state: &[T],
    ) {
        let (dim, width, m) = (inputs.heads.key_dim, inputs.heads.value_dim, rows.len());
        let read = sized(&mut self.read, 2 * m * width);
        let out = target(read, width, false);
        product(
            [2 * m, dim, width],
            out,
            matrix(&self.qk, dim),
            matrix(state, width),
        );
        let n = sized(&mut self.n, m * width);
        let ks = &self.read[m * width..];
        let (gamma, beta) = (&self.gamma, &self.beta);
        vectorised(
            #[inline(always)]
            || {
                for (i, row) in rows.enumerate() {
                    let v = &inputs.qkv[inputs.value(row, head)..][..width];
                    let (n, ks) = (&mut n[i * width..][..width], &ks[i * width..][..width]);
                    for d in 0..width {
                        n[d] = beta[i] * (v[d] - gamma[i] * ks[d]);
                    }
                }
            },
        );
    }

    /// R into N.
    fn solve(&mut self, m: usize, width: usize) {
        for start in (0..m).step_by(SOLVED) {
            let end = (start + SOLVED).min(m);
            let (before, own) = self.n.split_at_mut(start * width);
            if start > 0 {
                let a = matrix(&self.minus_a[start * m..], m);
                let out = target(own, width, true);
                product([end - start, start, width], out, a, matrix(before, width));
            }
            let minus_a = &self.minus_a;
            vectorised(
                #[inline(always)]
                || {
                    for i in start + 1..end {
                        let (before, row) = own.split_at_mut((i - start) * width);
                        let row = &mut row[..width];
                        for (j, before) in (start..i).zip(before.chunks_exact(width)) {
                            let a = minus_a[i * m + j];
                            for (x, &y) in row.iter_mut().zip(before) {
                                *x += a * y;
                            }
                        }
                    }
                },
            );
        }
    }

    /// Keys times `e^(c_last − c)`.
    pub fn kept_keys(&mut self, m: usize, dim: usize) {
        let kept = sized(&mut self.kept, m * dim);
        let keys = &self.qk[m * dim..];
        let rest = &self.rest;
        vectorised(
            #[inline(always)]
            || {
                for (i, (kept, key)) in kept
                    .chunks_exact_mut(dim)
                    .zip(keys.chunks_exact(dim))
                    .enumerate()
                {
                    for (kept, &key) in kept.iter_mut().zip(key) {
                        *kept = key * rest[i];
                    }
                }
            },
        );
    }

    /// N of a chunk, and the state after it; queries and keys are loaded.
    pub fn advance(
        &mut self,
        inputs: &Inputs<'_, T>,
        head: usize,
        rows: Range<usize>,
        state: &mut [T],
    ) {
        let (dim, width, m) = (inputs.heads.key_dim, inputs.heads.value_dim, rows.len());
        self.decays(inputs, head, rows.clone());
        self.residuals(inputs, head, rows, state);
        self.solve(m, width);
        self.kept_keys(m, dim);
        let decay = self.gamma[m - 1];
        vectorised(
            #[inline(always)]
            || {
                for s in state.iter_mut() {
                    *s = *s * decay;
                }
            },
        );
        let keys = transposed(matrix(&self.kept, dim));
        let out = target(state, width, true);
        product([dim, m, width], out, keys, matrix(&self.n, width));
    }

    /// [`Self::advance`], and the output of the rows, the first of which begins at `out`.
    pub fn forward(
        &mut self,
        inputs: &Inputs<'_, T>,
        head: usize,
        rows: Range<usize>,
        state: &mut [T],
        out: *mut T,
    ) {
        let (width, m) = (inputs.heads.value_dim, rows.len());
        self.advance(inputs, head, rows, state);
        let (read, gamma, stride) = (&self.read, &self.gamma, inputs.out_row());
        vectorised(
            #[inline(always)]
            || {
                for i in 0..m {
                    // SAFETY: the caller passes the place of this head in rows that no other thread writes.
                    #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
                    let out = unsafe { std::slice::from_raw_parts_mut(out.add(i * stride), width) };
                    for (out, &q) in out.iter_mut().zip(&read[i * width..]) {
                        *out = gamma[i] * q;
                    }
                }
            },
        );
        let out = Target {
            start: out,
            row: stride,
            add: true,
        };
        product(
            [m, m, width],
            out,
            matrix(&self.p, m),
            matrix(&self.n, width),
        );
    }
}
