//! The backward pass of attention: probabilities are computed again, a block of queries at a time.

use super::blocks::{Block, Heads, Rows, probabilities};
use crate::cpu::prelude::*;
use crate::shapes::AttentionShape;

/// Buffers of one thread.
struct Scratch<T> {
    /// Probabilities P.
    p: Vec<T>,
    /// dP, then dS.
    ds: Vec<T>,
    /// Scores before the soft-cap, where there is one.
    raw: Vec<T>,
    /// Shares of the sink, where there is one.
    shares: Vec<T>,
}

/// With P = softmax(S): dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − rowsum(P ∘ dP)), dQ = dS K, dK = dSᵀ Q. The gradient of
/// a sink is the sum of −p rowsum(P ∘ dP) over the rows of its head, where p is its share of a row.
pub(super) fn backward<T: Real>(
    shape: &AttentionShape,
    [q, k, v]: [&FlexTensor; 3],
    sinks: Option<&FlexTensor>,
    gradient: &FlexTensor,
) -> ([FlexTensor; 3], Option<FlexTensor>) {
    let heads = Heads::new(q, k);
    let (q_dims, kv_dims): ([usize; 3], [usize; 3]) = (dims(q), dims(k));
    let (q, k, v): (&[T], &[T], &[T]) = (elements(q), elements(k), elements(v));
    let g: &[T] = elements(gradient);
    let mut dq = vec![T::ZERO; q.len()];
    let mut dk = vec![T::ZERO; k.len()];
    let mut dv = vec![T::ZERO; v.len()];
    let targets = [&mut dq, &mut dk, &mut dv].map(|t| SharedPtr(t.as_mut_ptr()));
    // a tree shares rows of keys, so one task accumulates their gradients
    let sequences: Vec<Vec<Rows>> = shape.groups.trees().iter().map(|tree| Rows::of_tree(tree).collect()).collect();
    let tasks: Vec<(usize, usize, &[Rows])> = sequences
        .iter()
        .enumerate()
        .flat_map(|(index, tree)| (0..heads.kv).map(move |kv| (index, kv, &tree[..])))
        .collect();
    let sinks: Option<&[T]> = sinks.map(elements);
    // a row for each tree: which task is first does not matter
    let rows = sinks.map_or(0, |_| sequences.len());
    let mut d_sinks = vec![T::ZERO; rows * heads.query];
    let d_sinks_start = SharedPtr(d_sinks.as_mut_ptr());
    let empty = || Scratch { p: Vec::new(), ds: Vec::new(), raw: Vec::new(), shares: Vec::new() };
    tasks.par_iter().for_each_init(empty, |scratch, &(index, kv, tree)| {
        let pass = BackwardPass { shape, heads, kv, inputs: [q, k, v, g], sinks, targets };
        for head in kv * heads.group()..(kv + 1) * heads.group() {
            let mut d_sink = T::ZERO;
            for rows in tree {
                for block in rows.blocks(shape.window) {
                    d_sink += pass.block(head, rows, &block, scratch);
                }
            }
            if sinks.is_some() {
                // SAFETY: the buffer has the tree's row, and no other task writes this head of it.
                unsafe {
                    *d_sinks_start.get().add(index * heads.query + head) = d_sink;
                }
            }
        }
    });
    let d_sinks = sinks.map(|_| {
        let sum = |head: usize| d_sinks.chunks(heads.query).map(|row| row[head]).sum();
        let sums: Vec<T> = (0..heads.query).map(sum).collect();
        tensor(sums, [1, heads.query])
    });
    let gradients = [tensor(dq, q_dims), tensor(dk, kv_dims), tensor(dv, kv_dims)];
    (gradients, d_sinks)
}

/// The backward pass of one key head.
struct BackwardPass<'a, T> {
    shape: &'a AttentionShape,
    heads: Heads,
    kv: usize,
    /// Queries, keys, values, and the gradient of the output.
    inputs: [&'a [T]; 4],
    sinks: Option<&'a [T]>,
    /// dQ, dK, dV.
    targets: [SharedPtr<T>; 3],
}

impl<T: Real> BackwardPass<'_, T> {
    /// One head's block of queries: its dQ, and what it adds to dK and dV. Gives what it adds to the gradient of the
    /// head's sink.
    fn block(&self, head: usize, rows: &Rows, block: &Block, scratch: &mut Scratch<T>) -> T {
        let (heads, one) = (self.heads, Parallelism::None);
        let (q_row, kv_row) = (heads.q_row(), heads.kv_row());
        let [q, k, v, g] = self.inputs;
        let [dq, dk, dv] = self.targets;
        let (m, n) = (block.queries.len(), block.width());
        let query = heads.query(rows.suffix_row(block.queries.start), head);
        let (queries, d_out) = (Matrix::row_major(&q[query..], q_row), Matrix::row_major(&g[query..], q_row));
        scratch.p.resize(m * n, T::ZERO);
        scratch.ds.resize(m * n, T::ZERO);
        for (tokens, row) in rows.runs(&block.keys) {
            let (column, key) = (tokens.start - block.keys.start, heads.key(row, self.kv));
            let size = Size { m, k: heads.dim, n: tokens.len() };
            let keys = Matrix::row_major(&k[key..], kv_row).transposed();
            multiply_in_any_order(size, Target::new(&mut scratch.p[column..], n, false), queries, keys, one);
            let values = Matrix::row_major(&v[key..], kv_row).transposed();
            multiply_in_any_order(size, Target::new(&mut scratch.ds[column..], n, false), d_out, values, one);
        }
        let d_sink = self.score_gradients(block, scratch, self.sinks.map(|sinks| sinks[head]));
        // SAFETY: no other task writes dQ of this head and these rows.
        let dq = unsafe { dq.get().add(query) };
        for (i, (tokens, row)) in rows.runs(&block.keys).enumerate() {
            let (column, key) = (tokens.start - block.keys.start, heads.key(row, self.kv));
            let (p, ds) = (Matrix::row_major(&scratch.p[column..], n), Matrix::row_major(&scratch.ds[column..], n));
            let keys = Matrix::row_major(&k[key..], kv_row);
            let target = Target { start: dq, row: q_row, add: i > 0 };
            multiply_in_any_order(Size { m, k: tokens.len(), n: heads.dim }, target, ds, keys, one);
            // SAFETY: no other task writes dK and dV of this key head and this tree's rows.
            let (dk, dv) = unsafe { (dk.get().add(key), dv.get().add(key)) };
            let size = Size { m: tokens.len(), k: m, n: heads.dim };
            let target = |start| Target { start, row: kv_row, add: true };
            multiply_in_any_order(size, target(dk), ds.transposed(), queries, one);
            multiply_in_any_order(size, target(dv), p.transposed(), d_out, one);
        }
        d_sink
    }

    /// Turns raw scores into probabilities and dP into the gradient of the raw scores, in place; gives that of the
    /// sink.
    fn score_gradients(&self, block: &Block, scratch: &mut Scratch<T>, sink: Option<T>) -> T {
        let (shape, n, keys) = (self.shape, block.width(), block.keys.len());
        let Scratch { p, ds, raw, shares } = scratch;
        let mut d_sink = T::ZERO;
        if shape.softcap.is_some() {
            raw.clear();
            raw.extend_from_slice(p);
        }
        vectorised!({
            probabilities(p, block, shape, sink, shares);
            let scale = T::of(shape.scale);
            let rows = p.chunks_exact(n).zip(ds.chunks_exact_mut(n));
            for (query, (p, ds)) in rows.enumerate() {
                let (p, ds) = (&p[..keys], &mut ds[..keys]);
                let mean = dot(p, ds);
                if let Some(&share) = shares.get(query) {
                    d_sink += -(share * mean);
                }
                for (ds, &p) in ds.iter_mut().zip(p) {
                    *ds = p * (*ds - mean) * scale;
                }
            }
            if let Some(cap) = shape.softcap {
                let shrink = T::of(shape.scale / cap);
                for (ds, &raw) in ds.iter_mut().zip(raw.iter()) {
                    let t = (raw * shrink).tanh();
                    *ds = *ds * (T::ONE - t * t);
                }
            }
        });
        d_sink
    }
}
