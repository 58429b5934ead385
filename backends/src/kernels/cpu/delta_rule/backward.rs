//! The gradient of the chunked form. Only the inputs are saved: states and N are computed again, and kept for the chunks of one head at a
//! time.
//!
//! With dO the gradient of a chunk's output and dS′ that of the state after it (L is `lower`, `strict` without the diagonal):
//!
//! - `dN = Pᵀ dO + (e^(c_last − c) K) dS′`, `dR = (I + A)⁻ᵀ dN`, `dA = −strict(dR Nᵀ)`, `dP = L(dO Nᵀ)`
//! - `dV = β dR`, `d(KS) = −β eᶜ dR =: E`, `d(QS) = eᶜ dO =: F`
//! - `dS = e^(c_last) dS′ + Qᵀ F + Kᵀ E`
//! - `dQ = F Sᵀ + (dP ∘ D) K`
//! - `dK = E Sᵀ + G K + Gᵀ K + (dP ∘ D)ᵀ Q + e^(c_last − c) ∘ (N dS′ᵀ)` with `G = dA ∘ β D`
//! - `dβᵢ = dRᵢ · (V − eᶜ K S)ᵢ + Σⱼ dA ∘ (K Kᵀ) ∘ D`
//! - of c: row sums less column sums of `dA ∘ A + dP ∘ P`, `eᶜ` times the gradient of that factor, and what the factors of the new state
//!   give. A token's g enters all later c, so that its gradient is the sum of theirs.

use super::chunk::{CHUNK, Scratch, matrix, product, sized, target, transposed};
use super::inputs::{Inputs, inverse_norm};
use crate::kernels::cpu::gemm::Matrix;
use crate::kernels::cpu::parallel::{SharedPtr, dims, elements, tensor, vectorised};
use crate::kernels::cpu::real::{Real, dot};
use crate::kernels::delta::{DeltaHeads, StateRows};
use burn::backend::flex::FlexTensor;
use rayon::prelude::*;
use std::ops::Range;

/// Gradients of queries, keys and values, of g, and of β.
pub(super) fn backward<T: Real>(
    tensors: &[FlexTensor; 3],
    gradient: &FlexTensor,
    heads: DeltaHeads,
    sequences: &[StateRows],
) -> [FlexTensor; 3] {
    let inputs = Inputs::<T>::of(tensors, heads);
    let d_out: &[T] = elements(gradient);
    let [rows, channels] = dims(&tensors[0]);
    let mut d_qkv = vec![T::ZERO; rows * channels];
    let mut d_g = vec![T::ZERO; rows * heads.values];
    let mut d_beta = vec![T::ZERO; rows * heads.values];
    let targets = [&mut d_qkv, &mut d_g, &mut d_beta].map(|t| SharedPtr(t.as_mut_ptr()));
    // value heads of one key head add to the same gradients
    let tasks: Vec<(&StateRows, usize)> = sequences
        .iter()
        .flat_map(|sequence| (0..heads.keys).map(move |head| (sequence, head)))
        .collect();
    tasks.par_iter().for_each_init(
        || (Scratch::default(), Buffers::default()),
        |(scratch, buffers), (sequence, key_head)| {
            let pass = Pass {
                inputs,
                d_out,
                key_head: *key_head,
                targets,
            };
            pass.sequence(sequence.rows.clone(), scratch, buffers);
        },
    );
    let [_, values] = dims(&tensors[1]);
    [
        tensor(d_qkv, [rows, channels]),
        tensor(d_g, [rows, values]),
        tensor(d_beta, [rows, values]),
    ]
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers<T> {
    /// States before each chunk, and N of all rows, of one value head.
    states: Vec<T>,
    n: Vec<T>,
    /// dS.
    d_state: Vec<T>,
    /// dN, then dR, `[m, value_dim]`.
    d_n: Vec<T>,
    /// F and below it E, `[2 m, value_dim]`.
    d_read: Vec<T>,
    /// dP ∘ D and G, `[m, m]` each.
    d_p: Vec<T>,
    d_a: Vec<T>,
    /// N dS′ᵀ, `[m, key_dim]`.
    written: Vec<T>,
    /// dQ and below it dK of a chunk, as they are after division by norms, `[2 m, key_dim]`.
    d_qk: Vec<T>,
    /// dQ and dK of a whole sequence, all value heads of the key head: a chunk's part at twice its first row.
    all_qk: Vec<T>,
    /// Gradients of c and of β of a chunk.
    d_c: Vec<T>,
    d_beta: Vec<T>,
}

/// The backward pass of one sequence's key head.
struct Pass<'a, T> {
    inputs: Inputs<'a, T>,
    d_out: &'a [T],
    key_head: usize,
    /// Gradients of q, k and v, of g, and of β.
    targets: [SharedPtr<T>; 3],
}

impl<T: Real> Pass<'_, T> {
    fn sequence(&self, rows: Range<usize>, scratch: &mut Scratch<T>, own: &mut Buffers<T>) {
        let heads = self.inputs.heads;
        let (dim, width) = (heads.key_dim, heads.value_dim);
        let chunks: Vec<Range<usize>> = rows
            .clone()
            .step_by(CHUNK)
            .map(|start| start..(start + CHUNK).min(rows.end))
            .collect();
        own.all_qk.clear();
        own.all_qk.resize(2 * rows.len() * dim, T::ZERO);
        let size = dim * width;
        for head in self.key_head * heads.group()..(self.key_head + 1) * heads.group() {
            own.states.clear();
            own.states.resize((chunks.len() + 1) * size, T::ZERO);
            sized(&mut own.n, rows.len() * width);
            for (i, chunk) in chunks.iter().enumerate() {
                scratch.load(&self.inputs, self.key_head, chunk.clone());
                let (before, after) = own.states[i * size..].split_at_mut(size);
                let after = &mut after[..size];
                after.copy_from_slice(before);
                scratch.advance(&self.inputs, head, chunk.clone(), after);
                own.n[(chunk.start - rows.start) * width..][..scratch.n.len()]
                    .copy_from_slice(&scratch.n);
            }
            own.d_state.clear();
            own.d_state.resize(size, T::ZERO);
            for (i, chunk) in chunks.iter().enumerate().rev() {
                scratch.load(&self.inputs, self.key_head, chunk.clone());
                scratch.decays(&self.inputs, head, chunk.clone());
                let state = std::mem::take(&mut own.states);
                let before = &state[i * size..][..size];
                scratch.residuals(&self.inputs, head, chunk.clone(), before);
                scratch.kept_keys(chunk.len(), dim);
                self.chunk(head, chunk, rows.start, before, scratch, own);
                own.states = state;
            }
        }
        for chunk in &chunks {
            self.through_norms(
                chunk.clone(),
                &own.all_qk[2 * (chunk.start - rows.start) * dim..],
            );
        }
    }

    /// The gradient of one chunk of a value head, where `first` is the sequence's first row; the gradient of the state becomes that of
    /// the state before the chunk.
    fn chunk(
        &self,
        head: usize,
        rows: &Range<usize>,
        first: usize,
        state: &[T],
        scratch: &Scratch<T>,
        own: &mut Buffers<T>,
    ) {
        let heads = self.inputs.heads;
        let (dim, width, m) = (heads.key_dim, heads.value_dim, rows.len());
        let n = own.n[(rows.start - first) * width..][..m * width].to_vec();
        let d_out = Matrix {
            start: self.d_out[rows.start * self.inputs.out_row() + head * width..].as_ptr(),
            row: self.inputs.out_row(),
            column: 1,
        };
        let n_t = transposed(matrix(&n, width));

        let d_n = sized(&mut own.d_n, m * width);
        let p_t = transposed(matrix(&scratch.p, m));
        product([m, m, width], target(d_n, width, false), p_t, d_out);
        let kept = matrix(&scratch.kept, dim);
        let d_state = matrix(&own.d_state, width);
        product([m, dim, width], target(d_n, width, true), kept, d_state);
        solve_transposed(&scratch.minus_a, d_n, m, width);

        let d_p = sized(&mut own.d_p, m * m);
        product([m, width, m], target(d_p, m, false), d_out, n_t);
        let d_a = sized(&mut own.d_a, m * m);
        let d_r = matrix(&own.d_n, width);
        product([m, width, m], target(d_a, m, false), d_r, n_t);

        let written = sized(&mut own.written, m * dim);
        let d_state_t = transposed(matrix(&own.d_state, width));
        let out = target(written, dim, false);
        product([m, width, dim], out, matrix(&n, width), d_state_t);

        self.small_gradients(head, rows, state, scratch, own);
        self.wide_gradients(rows, first, state, scratch, own);
    }

    /// Gradients of values, β and g, and the gradients of what is read: sums over rows. Turns dA and dP into factors of K and Q.
    fn small_gradients(
        &self,
        head: usize,
        rows: &Range<usize>,
        state: &[T],
        scratch: &Scratch<T>,
        own: &mut Buffers<T>,
    ) {
        let inputs = &self.inputs;
        let (dim, width, m) = (inputs.heads.key_dim, inputs.heads.value_dim, rows.len());
        let (qs, ks) = scratch.read.split_at(m * width);
        let (gamma, beta) = (&scratch.gamma, &scratch.beta);
        let kk = &scratch.products[m * m..];
        own.d_c.clear();
        own.d_c.resize(m, T::ZERO);
        let d_beta = sized(&mut own.d_beta, m);
        let (d_c, d_r) = (&mut own.d_c, &own.d_n);
        let (f, e) = sized(&mut own.d_read, 2 * m * width).split_at_mut(m * width);
        let (d_p, d_a, written) = (&mut own.d_p, &mut own.d_a, &own.written);
        let d_state = &own.d_state;
        vectorised(
            #[inline(always)]
            || {
                let mut last = gamma[m - 1] * dot(d_state, state);
                for (i, row) in rows.clone().enumerate() {
                    let v = &inputs.qkv[inputs.value(row, head)..][..width];
                    let d_o = &self.d_out[row * inputs.out_row() + head * width..][..width];
                    let place = i * width..(i + 1) * width;
                    let (qs, ks, d_r) =
                        (&qs[place.clone()], &ks[place.clone()], &d_r[place.clone()]);
                    let (f, e) = (&mut f[place.clone()], &mut e[place]);
                    let of_ks = dot(d_r, ks);
                    let d_gamma = dot(d_o, qs) - beta[i] * of_ks;
                    let mut d_b = dot(d_r, v) - gamma[i] * of_ks;
                    for d in 0..width {
                        f[d] = gamma[i] * d_o[d];
                        e[d] = -(beta[i] * gamma[i] * d_r[d]);
                    }
                    // SAFETY: no other task writes this head of this row.
                    #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
                    let d_v = unsafe {
                        let at = self.targets[0].get().add(inputs.value(row, head));
                        std::slice::from_raw_parts_mut(at, width)
                    };
                    for (d_v, &d_r) in d_v.iter_mut().zip(d_r) {
                        *d_v = beta[i] * d_r;
                    }
                    let place = i * m..i * m + m;
                    let (d_p, d_a) = (&mut d_p[place.clone()], &mut d_a[place.clone()]);
                    let (decay, kk) = (&scratch.decay[place.clone()], &kk[place.clone()]);
                    let p = &scratch.p[place];
                    d_a[i] = T::ZERO;
                    let mut row_sum = T::ZERO;
                    for j in 0..=i {
                        let a = -(d_a[j] * decay[j]);
                        let through = a * kk[j];
                        d_b += through;
                        let moved = beta[i] * through + d_p[j] * p[j];
                        row_sum += moved;
                        d_c[j] += -moved;
                        d_a[j] = beta[i] * a;
                        d_p[j] = d_p[j] * decay[j];
                    }
                    d_a[i + 1..].fill(T::ZERO);
                    d_p[i + 1..].fill(T::ZERO);
                    let place = i * dim..(i + 1) * dim;
                    let put = dot(&scratch.kept[place.clone()], &written[place]);
                    d_c[i] += row_sum + gamma[i] * d_gamma - put;
                    last += put;
                    d_beta[i] = d_b;
                }
                d_c[m - 1] += last;
            },
        );
        let mut sum = T::ZERO;
        for (i, row) in rows.clone().enumerate().rev() {
            sum += d_c[i];
            let at = row * inputs.heads.values + head;
            // SAFETY: no other task writes this head of this row.
            #[allow(unsafe_code, reason = "tasks write disjoint parts of two tensors")]
            unsafe {
                *self.targets[1].get().add(at) = sum;
                *self.targets[2].get().add(at) = d_beta[i];
            }
        }
    }

    /// Gradients of queries and keys, added to those of other value heads, and of the state.
    fn wide_gradients(
        &self,
        rows: &Range<usize>,
        first: usize,
        state: &[T],
        scratch: &Scratch<T>,
        own: &mut Buffers<T>,
    ) {
        let heads = self.inputs.heads;
        let (dim, width, m) = (heads.key_dim, heads.value_dim, rows.len());
        let d_qk = sized(&mut own.d_qk, 2 * m * dim);
        let d_read = matrix(&own.d_read, width);
        let out = target(d_qk, dim, false);
        product(
            [2 * m, width, dim],
            out,
            d_read,
            transposed(matrix(state, width)),
        );
        let (queries, keys) = scratch.qk.split_at(m * dim);
        let (queries, keys) = (matrix(queries, dim), matrix(keys, dim));
        let (d_q, d_k) = d_qk.split_at_mut(m * dim);
        let (d_p, g) = (matrix(&own.d_p, m), matrix(&own.d_a, m));
        product([m, m, dim], target(d_q, dim, true), d_p, keys);
        product([m, m, dim], target(d_k, dim, true), g, keys);
        product([m, m, dim], target(d_k, dim, true), transposed(g), keys);
        product(
            [m, m, dim],
            target(d_k, dim, true),
            transposed(d_p),
            queries,
        );
        let all = &mut own.all_qk[2 * (rows.start - first) * dim..][..2 * m * dim];
        let (written, rest, d_qk) = (&own.written, &scratch.rest, &own.d_qk);
        let decay = scratch.gamma[m - 1];
        let d_state = &mut own.d_state;
        vectorised(
            #[inline(always)]
            || {
                for (all, &d) in all.iter_mut().zip(d_qk) {
                    *all += d;
                }
                for (i, keys) in all[m * dim..].chunks_exact_mut(dim).enumerate() {
                    for (key, &w) in keys.iter_mut().zip(&written[i * dim..]) {
                        *key += rest[i] * w;
                    }
                }
                for d in d_state.iter_mut() {
                    *d = *d * decay;
                }
            },
        );
        let qk_t = transposed(matrix(&scratch.qk, dim));
        let out = target(d_state, width, true);
        product([dim, 2 * m, width], out, qk_t, d_read);
    }

    /// Gradients of queries and keys before the division by their norms.
    fn through_norms(&self, rows: Range<usize>, d_qk: &[T]) {
        let (dim, m) = (self.inputs.heads.key_dim, rows.len());
        let scale = T::ONE / T::of((dim as f64).sqrt());
        vectorised(
            #[inline(always)]
            || {
                for (i, row) in rows.enumerate() {
                    for (at, d, scale) in [
                        (self.inputs.query(row, self.key_head), i, scale),
                        (self.inputs.key(row, self.key_head), m + i, T::ONE),
                    ] {
                        let (x, d) = (&self.inputs.qkv[at..][..dim], &d_qk[d * dim..][..dim]);
                        let r = inverse_norm(x);
                        let along = dot(x, d) * r * r;
                        // SAFETY: no other task writes this head of this row.
                        #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
                        let out = unsafe {
                            let at = self.targets[0].get().add(at);
                            std::slice::from_raw_parts_mut(at, dim)
                        };
                        for ((out, &x), &d) in out.iter_mut().zip(x).zip(d) {
                            *out = scale * r * (d - x * along);
                        }
                    }
                }
            },
        );
    }
}

/// `(I + A)⁻ᵀ x` in place of x, `[m, width]`, by substitution from the last row on.
fn solve_transposed<T: Real>(minus_a: &[T], x: &mut [T], m: usize, width: usize) {
    const SOLVED: usize = 16;
    for start in (0..m).step_by(SOLVED).rev() {
        let end = (start + SOLVED).min(m);
        let (own, after) = x[start * width..].split_at_mut((end - start) * width);
        if end < m {
            let a = Matrix {
                start: minus_a[end * m + start..].as_ptr(),
                row: 1,
                column: m,
            };
            let out = target(own, width, true);
            product([end - start, m - end, width], out, a, matrix(after, width));
        }
        vectorised(
            #[inline(always)]
            || {
                for i in (start + 1..end).rev() {
                    let (before, row) = own.split_at_mut((i - start) * width);
                    for (j, before) in (start..i).zip(before.chunks_exact_mut(width)) {
                        let a = minus_a[i * m + j];
                        for (x, &y) in before.iter_mut().zip(row.iter()) {
                            *x += a * y;
                        }
                    }
                }
            },
        );
    }
}
