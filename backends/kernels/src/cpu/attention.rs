//! Causal attention over the packed rows of several sequences, with its gradient, and no `[heads, T, T]` anywhere.
//!
//! Queries are processed in blocks: a block's scores against all keys that it sees fit in a core's cache. The backward
//! pass computes them again (as `FlashAttention` does; Dao et al., 2022), so that only queries, keys and values are
//! saved. The query heads of a group share their key head's rows, and sequences with a common prefix share its rows:
//! completions of one prompt need its keys and values once.

mod backward;
mod blocks;

use super::prelude::*;
use super::softmax::mixed_parts;
use crate::shapes::AttentionShape;
use backward::backward;
use blocks::{Block, Heads, Rows, probabilities};

/// See [`crate::attention`].
pub(crate) fn attention(qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape) -> Tensor<3> {
    let [q, k, v] = qkv.map(|t| input(t.clone()));
    let kernel = Attention(shape.clone());
    match sinks {
        None => run(kernel, [q, k, v]),
        Some(sinks) => run(kernel, [q, k, v, input(sinks.clone())]),
    }
}

#[derive(Clone, Debug)]
struct Attention(AttentionShape);

/// Of queries, keys and values, and of sinks as a fourth input.
impl<const N: usize> Kernel<N> for Attention {
    const NAME: &str = "attention";

    fn forward(&self, inputs: &[FlexTensor; N]) -> FlexTensor {
        let (qkv, sinks) = split(inputs);
        dispatch_float!(inputs[0].dtype(), forward(&self.0, qkv, sinks))
    }

    fn backward(&self, saved: Maybe<N>, gradient: FlexTensor, _wanted: [bool; N]) -> Maybe<N> {
        let inputs = all_saved(saved);
        let (qkv, sinks) = split(&inputs);
        let (gradients, d_sinks) = dispatch_float!(inputs[0].dtype(), backward(&self.0, qkv, sinks, &gradient));
        let mut gradients = gradients.into_iter().map(Some).chain([d_sinks]);
        std::array::from_fn(|_| gradients.next().flatten())
    }
}

fn split(inputs: &[FlexTensor]) -> ([&FlexTensor; 3], Option<&FlexTensor>) {
    ([&inputs[0], &inputs[1], &inputs[2]], inputs.get(3))
}

fn forward<T: Real>(shape: &AttentionShape, [q, k, v]: [&FlexTensor; 3], sinks: Option<&FlexTensor>) -> FlexTensor {
    let sinks: Option<&[T]> = sinks.map(elements);
    let heads = Heads::new(q, k);
    let dims: [usize; 3] = dims(q);
    let (q, k, v): (&[T], &[T], &[T]) = (elements(q), elements(k), elements(v));
    let mut out = vec![T::ZERO; q.len()];
    let target = SharedPtr(out.as_mut_ptr());
    let sequences: Vec<Rows> = shape.groups.trees().iter().flat_map(Rows::of_tree).collect();
    let tasks: Vec<(usize, &Rows, Block)> = sequences
        .iter()
        .flat_map(|rows| rows.blocks(shape.window).map(move |block| (rows, block)))
        .flat_map(|(rows, block)| (0..heads.query).map(move |head| (head, rows, block.clone())))
        .collect();
    let one = Parallelism::None;
    tasks.par_iter().for_each_init(Scratch::new, |scratch: &mut Scratch<T>, (head, rows, block)| {
        let Scratch { scores, shares, gathered } = scratch;
        let (head, kv) = (*head, head / heads.group());
        let (m, n) = (block.queries.len(), block.width());
        scores.resize(m * n, T::ZERO);
        let query = heads.query(rows.suffix_row(block.queries.start), head);
        let queries = Matrix::row_major(&q[query..], heads.q_row());
        for (tokens, row) in rows.runs(&block.keys) {
            let keys = Matrix::row_major(&k[heads.key(row, kv)..], heads.kv_row());
            let tile = Target::new(&mut scores[tokens.start - block.keys.start..], n, false);
            let size = Size { m, k: heads.dim, n: tokens.len() };
            multiply(size, tile, queries, keys.transposed(), one);
        }
        vectorised!(probabilities(scores, block, shape, sinks.map(|sinks| sinks[head]), shares));
        // SAFETY: no other task writes this head of these rows.
        let start = unsafe { target.get().add(query) };
        for (i, part) in mixed_parts(block.keys.clone()).enumerate() {
            let mut runs = rows.runs(&part).map(|(tokens, row)| (tokens, &v[heads.key(row, kv)..]));
            let values = match (runs.next(), runs.next()) {
                (Some((_, values)), None) => Matrix::row_major(values, heads.kv_row()),
                _ => {
                    // one chain cannot go on in other rows
                    gathered.clear();
                    for (tokens, row) in rows.runs(&part) {
                        let values = v[heads.key(row, kv)..].chunks(heads.kv_row()).take(tokens.len());
                        gathered.extend(values.flat_map(|row| &row[..heads.dim]));
                    }
                    Matrix::row_major(gathered, heads.dim)
                }
            };
            let weights = Matrix::row_major(&scores[part.start - block.keys.start..], n);
            let mixed = Target { start, row: heads.q_row(), add: i > 0 };
            let size = Size { m, k: part.len(), n: heads.dim };
            multiply(size, mixed, weights, values, one);
        }
    });
    tensor(out, dims)
}

/// Buffers of one thread.
struct Scratch<T> {
    scores: Vec<T>,
    /// Shares of the sink, where there is one.
    shares: Vec<T>,
    /// Values of tokens in several runs, one after the other.
    gathered: Vec<T>,
}

impl<T> Scratch<T> {
    fn new() -> Self {
        Self { scores: Vec::new(), shares: Vec::new(), gathered: Vec::new() }
    }
}
