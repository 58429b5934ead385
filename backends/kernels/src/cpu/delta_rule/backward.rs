//! The gradient of the chunked form. Only the inputs are saved: states, U and N are computed again, and kept for the
//! chunks of one head at a time; first the end states of sequences that others go on behind. Then these come first, as
//! the gradient of an end state is the sum of those of the states that begin with it.
//!
//! With dO the gradient of a chunk's output and dS′ that of the state after it (L is `lower`, `strict` without the
//! diagonal):
//!
//! - `dN = Pᵀ dO + (e^(c_last − c) K) dS′`, `dR = (I + A)⁻ᵀ dN`, `dA = −strict(dR Nᵀ)`, `dP = L(dO Nᵀ)`
//! - `dV = β dR`, `d(KS) = −β eᶜ dR =: E`, `d(QS) = eᶜ dO =: F`
//! - `dS = e^(c_last) dS′ + Qᵀ F + Kᵀ E`
//! - `dQ = F Sᵀ + (dP ∘ D) K`
//! - `dK = E Sᵀ + (G + Gᵀ) K + (dP ∘ D)ᵀ Q + e^(c_last − c) ∘ (N dS′ᵀ)` with `G = dA ∘ β D`
//! - `dβᵢ = dRᵢ · Uᵢ + Σⱼ dA ∘ (K Kᵀ) ∘ D`
//! - of c: row sums less column sums of `dA ∘ A + dP ∘ P`, `(F Sᵀ)ᵢ · Qᵢ + (E Sᵀ)ᵢ · Kᵢ` for the factor eᶜ, and what
//!   the factors of the new state give. A token's g enters all later c, so that its gradient is the sum of theirs.

use super::chunk::{CHUNK, Keys, Scratch, prefetch_rows, sized};
use super::factors::Factors;
use super::inputs::Inputs;
use super::products::{columns, lower_of, lower_times, lower_transposed_times, product};
use super::run_chunks;
use super::states::{HandedOn, SharedStates, States, tasks};
use crate::cpu::prelude::*;
use crate::delta::{DeltaHeads, SequenceRows};

/// Gradients of queries, keys and values, of g, and of β.
pub(super) fn backward<T: Real>(
    tensors: &[FlexTensor; 3],
    gradient: &FlexTensor,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> [FlexTensor; 3] {
    let inputs = Inputs::<T>::new(tensors, heads);
    let d_out: &[T] = elements(gradient);
    let [rows, channels] = dims(&tensors[0]);
    let mut d_qkv = vec![T::ZERO; rows * channels];
    let mut d_g = vec![T::ZERO; rows * heads.values];
    let mut d_beta = vec![T::ZERO; rows * heads.values];
    let targets = [&mut d_qkv, &mut d_g, &mut d_beta].map(|t| SharedPtr(t.as_mut_ptr()));
    let tree = sequences.generations();
    let mut handed = tree.handed().map(|count| States::new(count, heads));
    let handed = handed.each_mut().map(States::shared);
    end_states(inputs, sequences, handed[0]);
    for members in tree.members.iter().rev() {
        // value heads of one key head add to the same gradients
        tasks(members, heads).par_iter().for_each_init(
            || (Scratch::default(), Buffers::default()),
            |(scratch, buffers), &(sequence, key_head)| {
                let pass = Pass { inputs, d_out, key_head, targets };
                // SAFETY: a sequence's gradient is written by one task, and read in the generation before.
                let handed = unsafe { HandedOn::new(tree, handed, (sequence, key_head)) };
                pass.sequence(sequences[sequence].rows.clone(), handed, scratch, buffers);
            },
        );
    }
    let [_, values] = dims(&tensors[1]);
    [tensor(d_qkv, [rows, channels]), tensor(d_g, [rows, values]), tensor(d_beta, [rows, values])]
}

/// Computes the end states of sequences that others go on behind.
fn end_states<T: Real>(inputs: Inputs<'_, T>, sequences: &SequenceRows, ends: SharedStates<T>) {
    let tree = sequences.generations();
    for members in &tree.members {
        let parents: Vec<usize> = members.iter().copied().filter(|&i| tree.ends[i].is_some()).collect();
        tasks(&parents, inputs.heads).par_iter().for_each_init(
            || (Keys::default(), Scratch::default()),
            |(keys, scratch), &(sequence, key_head)| {
                // SAFETY: one task writes a sequence's state, and the generation before has written its parent's.
                let place = |sequence: usize| tree.ends[sequence].map(|end| unsafe { ends.of_key_head(end, key_head) });
                let Some(states) = place(sequence) else { return };
                if let Some(start) = tree.parents[sequence].and_then(place) {
                    states.copy_from_slice(start);
                }
                run_chunks(&inputs, key_head, &sequences[sequence].rows, states, (keys, scratch), None);
            },
        );
    }
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers<T> {
    /// Of each chunk, the keys that the value heads of a key head share.
    keys: Vec<Keys<T>>,
    /// Of each chunk, the results of the forward pass for one value head.
    forward: Vec<Forward<T>>,
    /// dQ and below it dK of each chunk, as they are after division by norms, of all value heads of the key head, `[2
    /// m, key_dim]`.
    d_qk: Vec<Vec<T>>,
    chunk: ChunkBuffers<T>,
}

/// Results of the forward pass for a chunk of a value head.
#[derive(Default)]
struct Forward<T> {
    /// The state before it.
    state: Vec<T>,
    /// U and N, `[m, value_dim]`.
    u: Vec<T>,
    n: Vec<T>,
}

/// Buffers for one chunk.
#[derive(Default)]
struct ChunkBuffers<T> {
    /// dS, of the state after the chunk, then of that before it.
    d_state: Vec<T>,
    /// dN, then dR, `[m, value_dim]`.
    d_n: Vec<T>,
    /// F and below it E, `[2 m, value_dim]`.
    d_read: Vec<T>,
    /// dP, then dP ∘ D, and dA, then G, `[m, m]` each, lower blocks.
    d_p: Vec<T>,
    d_a: Vec<T>,
    /// G + Gᵀ, `[m, m]`.
    g_sums: Vec<T>,
    /// N dS′ᵀ, `[m, key_dim]`.
    written: Vec<T>,
    /// F Sᵀ and below it E Sᵀ, then dQ and dK of this value head, `[2 m, key_dim]`.
    d_qk: Vec<T>,
    /// Gradients of c and of β.
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

/// A chunk of a value head, and what is known of it.
struct Chunk<'a, T> {
    head: usize,
    rows: Range<usize>,
    keys: &'a Keys<T>,
    forward: &'a Forward<T>,
}

impl<T: Real> Pass<'_, T> {
    fn sequence(
        &self,
        rows: Range<usize>,
        mut handed: HandedOn<'_, T>,
        scratch: &mut Scratch<T>,
        buffers: &mut Buffers<T>,
    ) {
        let heads = self.inputs.heads;
        let chunks: Vec<Range<usize>> =
            rows.clone().step_by(CHUNK).map(|start| start..(start + CHUNK).min(rows.end)).collect();
        let Buffers { keys, forward, d_qk, chunk: workspace } = buffers;
        keys.resize_with(chunks.len(), Keys::default);
        forward.resize_with(chunks.len(), Forward::default);
        d_qk.resize_with(chunks.len(), Vec::new);
        for ((rows, keys), d_qk) in chunks.iter().zip(keys.iter_mut()).zip(d_qk.iter_mut()) {
            keys.load(&self.inputs, self.key_head, rows.clone());
            sized(d_qk, keys.qk.len()).fill(T::ZERO);
        }
        for head in self.key_head * heads.group()..(self.key_head + 1) * heads.group() {
            let size = heads.key_dim * heads.value_dim;
            let place = (head - self.key_head * heads.group()) * size;
            let place = place..place + size;
            let state = &mut workspace.d_state;
            state.clear();
            match handed.start {
                Some(start) => state.extend_from_slice(&start[place.clone()]),
                None => state.resize(size, T::ZERO),
            }
            for ((rows, keys), forward) in chunks.iter().zip(&*keys).zip(forward.iter_mut()) {
                forward.state.clone_from(state);
                scratch.advance(&self.inputs, head, rows.clone(), keys, state, false);
                std::mem::swap(&mut forward.u, &mut scratch.u);
                std::mem::swap(&mut forward.n, &mut scratch.n);
            }
            workspace.d_state.fill(T::ZERO);
            for d_end in &handed.d_ends {
                for (sum, &d) in workspace.d_state.iter_mut().zip(&d_end[place.clone()]) {
                    *sum += d;
                }
            }
            for (i, rows) in chunks.iter().enumerate().rev() {
                let chunk = Chunk { head, rows: rows.clone(), keys: &keys[i], forward: &forward[i] };
                self.chunk(&chunk, scratch, workspace, &mut d_qk[i]);
            }
            if let Some(d_start) = &mut handed.d_start {
                d_start[place].copy_from_slice(&workspace.d_state);
            }
        }
        for ((rows, keys), d_qk) in chunks.into_iter().zip(keys).zip(d_qk) {
            self.through_norms(rows, keys, d_qk);
        }
    }

    /// The gradient of one chunk of a value head; the gradient of the state becomes that of the state before the chunk.
    fn chunk(&self, chunk: &Chunk<'_, T>, scratch: &mut Scratch<T>, buffers: &mut ChunkBuffers<T>, d_qk: &mut [T]) {
        let (inputs, heads) = (&self.inputs, self.inputs.heads);
        let (dim, width, m) = (heads.key_dim, heads.value_dim, chunk.rows.len());
        let (first, stride) = (chunk.rows.start, inputs.out_row());
        let d_out =
            Matrix { start: self.d_out[first * stride + chunk.head * width..].as_ptr(), row: stride, column: 1 };
        prefetch_rows(d_out.start, stride, m, width);
        let values = self.targets[0].get();
        let values = values.wrapping_add(inputs.value(first, chunk.head));
        prefetch_rows(values, heads.channels(), m, width);
        scratch.decays(inputs, chunk.head, chunk.rows.clone(), chunk.keys);
        scratch.kept_keys(chunk.keys, dim);
        let n = Matrix::row_major(&chunk.forward.n, width);
        let n_t = n.transposed();

        let d_n = sized(&mut buffers.d_n, m * width);
        let p = Matrix::row_major(&scratch.p, m);
        lower_transposed_times([m, width], Target::new(d_n, width, false), p, d_out);
        let kept = Matrix::row_major(&scratch.kept, dim);
        let d_state = Matrix::row_major(&buffers.d_state, width);
        product([m, dim, width], Target::new(d_n, width, true), kept, d_state);
        solve_transposed(&scratch.minus_a, d_n, m, width);

        let d_p = Target::new(sized(&mut buffers.d_p, m * m), m, false);
        lower_of([m, width], d_p, d_out, n_t);
        let d_a = Target::new(sized(&mut buffers.d_a, m * m), m, false);
        lower_of([m, width], d_a, Matrix::row_major(&buffers.d_n, width), n_t);

        let written = sized(&mut buffers.written, m * dim);
        let out = Target::new(written, dim, false);
        product([m, width, dim], out, n, d_state.transposed());

        self.through_reads(chunk, scratch, buffers);
        self.through_decays(chunk, scratch, buffers);
        Self::through_keys(chunk, heads, scratch, buffers, d_qk);
    }

    /// The gradients of values and of what is read of the state, and, from those, the first part of those of queries
    /// and keys.
    fn through_reads(&self, chunk: &Chunk<'_, T>, scratch: &Scratch<T>, buffers: &mut ChunkBuffers<T>) {
        let inputs = &self.inputs;
        let (dim, width, m) = (inputs.heads.key_dim, inputs.heads.value_dim, chunk.rows.len());
        let (f, e) = sized(&mut buffers.d_read, 2 * m * width).split_at_mut(m * width);
        let d_r = &buffers.d_n;
        vectorised!({
            for (i, row) in chunk.rows.clone().enumerate() {
                let place = i * width..(i + 1) * width;
                let d_r = &d_r[place.clone()];
                let (f, e) = (&mut f[place.clone()], &mut e[place]);
                let d_o = row * inputs.out_row() + chunk.head * width;
                let d_o = &self.d_out[d_o..][..width];
                // SAFETY: no other task writes this head of this row.
                let d_v = unsafe { self.targets[0].slice(inputs.value(row, chunk.head), width) };
                let (gamma, beta) = (scratch.gamma[i], scratch.beta[i]);
                for d in 0..width {
                    f[d] = gamma * d_o[d];
                    let through = beta * d_r[d];
                    d_v[d] = through;
                    e[d] = -(gamma * through);
                }
            }
        });
        let out = Target::new(sized(&mut buffers.d_qk, 2 * m * dim), dim, false);
        let state = Matrix::row_major(&chunk.forward.state, width).transposed();
        let d_read = Matrix::row_major(&buffers.d_read, width);
        product([2 * m, width, dim], out, d_read, state);
    }

    /// Gradients of β and g: sums over rows. Turns dA and dP into factors of K and Q.
    fn through_decays(&self, chunk: &Chunk<'_, T>, scratch: &Scratch<T>, buffers: &mut ChunkBuffers<T>) {
        let heads = self.inputs.heads;
        let (dim, width, m) = (heads.key_dim, heads.value_dim, chunk.rows.len());
        let kk = &chunk.keys.products[m * m..];
        buffers.d_c.clear();
        buffers.d_c.resize(m, T::ZERO);
        let d_beta = sized(&mut buffers.d_beta, m);
        let (d_c, d_r, d_qk) = (&mut buffers.d_c, &buffers.d_n, &buffers.d_qk);
        let (d_p, d_a, written) = (&mut buffers.d_p, &mut buffers.d_a, &buffers.written);
        let g_sums = sized(&mut buffers.g_sums, m * m);
        let d_state = &buffers.d_state;
        vectorised!({
            let mut last = scratch.gamma[m - 1] * dot(d_state, &chunk.forward.state);
            for i in 0..m {
                let beta = scratch.beta[i];
                let place = i * m..i * m + columns(i, m);
                let factors = Factors {
                    d_p: &mut d_p[place.clone()],
                    d_a: &mut d_a[place.clone()],
                    d_c: &mut d_c[..place.len()],
                    decay: &scratch.decay[place.clone()],
                    kk: &kk[place.clone()],
                    p: &scratch.p[place],
                };
                let [through, moved] = factors.row(i, beta);
                let place = i * width..(i + 1) * width;
                d_beta[i] = through + dot(&d_r[place.clone()], &chunk.forward.u[place]);
                let place = i * dim..(i + 1) * dim;
                let put = dot(&scratch.kept[place.clone()], &written[place]);
                let read = [i, m + i].map(|row| row * dim..(row + 1) * dim);
                let read = read.map(|row| dot(&d_qk[row.clone()], &chunk.keys.qk[row]));
                d_c[i] += moved + read[0] + read[1] - put;
                last += put;
            }
            d_c[m - 1] += last;
            for i in 0..m {
                g_sums[i * m + i] = T::ZERO;
                for j in 0..i {
                    let g = d_a[i * m + j];
                    g_sums[i * m + j] = g;
                    g_sums[j * m + i] = g;
                }
            }
        });
        let mut sum = T::ZERO;
        for (i, row) in chunk.rows.clone().enumerate().rev() {
            sum += d_c[i];
            let at = row * heads.values + chunk.head;
            // SAFETY: no other task writes this head of this row.
            unsafe {
                *self.targets[1].get().add(at) = sum;
                *self.targets[2].get().add(at) = d_beta[i];
            }
        }
    }

    /// Gradients of queries and keys, added to those of other value heads, and of the state.
    fn through_keys(
        chunk: &Chunk<'_, T>,
        heads: DeltaHeads,
        scratch: &Scratch<T>,
        buffers: &mut ChunkBuffers<T>,
        d_keys: &mut [T],
    ) {
        let (dim, width, m) = (heads.key_dim, heads.value_dim, chunk.rows.len());
        let (queries, keys) = chunk.keys.split();
        let (queries, keys) = (Matrix::row_major(queries, dim), Matrix::row_major(keys, dim));
        let (d_q, d_k) = buffers.d_qk.split_at_mut(m * dim);
        let d_p = Matrix::row_major(&buffers.d_p, m);
        lower_times([m, dim], Target::new(d_q, dim, true), d_p, keys);
        let g_sums = Matrix::row_major(&buffers.g_sums, m);
        product([m, m, dim], Target::new(d_k, dim, true), g_sums, keys);
        lower_transposed_times([m, dim], Target::new(d_k, dim, true), d_p, queries);
        let (written, rest, d_qk) = (&buffers.written, &scratch.rest, &buffers.d_qk);
        let decay = scratch.gamma[m - 1];
        let d_state = &mut buffers.d_state;
        vectorised!({
            for (sum, &d) in d_keys.iter_mut().zip(d_qk) {
                *sum += d;
            }
            let keys = d_keys[m * dim..].chunks_exact_mut(dim);
            for ((key, written), &rest) in keys.zip(written.chunks_exact(dim)).zip(rest) {
                for (key, &w) in key.iter_mut().zip(written) {
                    *key += rest * w;
                }
            }
            for d in d_state.iter_mut() {
                *d = *d * decay;
            }
        });
        let qk_t = Matrix::row_major(&chunk.keys.qk, dim).transposed();
        let out = Target::new(d_state, width, true);
        let d_read = Matrix::row_major(&buffers.d_read, width);
        product([dim, 2 * m, width], out, qk_t, d_read);
    }

    /// Gradients of queries and keys before the division by their norms.
    fn through_norms(&self, rows: Range<usize>, keys: &Keys<T>, d_qk: &[T]) {
        let (heads, m) = (self.inputs.heads, rows.len());
        let dim = heads.key_dim;
        let root = T::of((dim as f64).sqrt());
        let targets = [self.inputs.query(rows.start, self.key_head), self.inputs.key(rows.start, self.key_head)];
        let targets = targets.map(|at| self.targets[0].get().wrapping_add(at));
        for target in targets {
            prefetch_rows(target, heads.channels(), m, dim);
        }
        vectorised!({
            // x̂ is x divided by its norm, times `times`; d is the gradient of x̂
            for (part, times) in [T::ONE / root, T::ONE].into_iter().enumerate() {
                for i in 0..m {
                    let place = (part * m + i) * dim..(part * m + i + 1) * dim;
                    let (x, d) = (&keys.qk[place.clone()], &d_qk[place]);
                    let along = dot(x, d) / (times * times);
                    let scale = times * keys.inverse[part * m + i];
                    // SAFETY: no other task writes this head of this row.
                    let out = unsafe {
                        let at = targets[part].add(i * heads.channels());
                        std::slice::from_raw_parts_mut(at, dim)
                    };
                    for ((out, &x), &d) in out.iter_mut().zip(x).zip(d) {
                        *out = scale * (d - x * along);
                    }
                }
            }
        });
    }
}

/// `(I + A)⁻ᵀ x` in place of x, `[m, width]`, by substitution from the last row on.
fn solve_transposed<T: Real>(minus_a: &[T], x: &mut [T], m: usize, width: usize) {
    const SOLVED: usize = 16;
    for start in (0..m).step_by(SOLVED).rev() {
        let end = (start + SOLVED).min(m);
        let (block, after) = x[start * width..].split_at_mut((end - start) * width);
        if end < m {
            let a = Matrix { start: minus_a[end * m + start..].as_ptr(), row: 1, column: m };
            let out = Target::new(block, width, true);
            product([end - start, m - end, width], out, a, Matrix::row_major(after, width));
        }
        vectorised!({
            for i in (start + 1..end).rev() {
                let (before, row) = block.split_at_mut((i - start) * width);
                for (j, before) in (start..i).zip(before.chunks_exact_mut(width)) {
                    let a = minus_a[i * m + j];
                    for (x, &y) in before.iter_mut().zip(row.iter()) {
                        *x += a * y;
                    }
                }
            }
        });
    }
}
