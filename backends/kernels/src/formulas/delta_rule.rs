//! The gated delta rule in tensor operations, in chunks (Yang et al., 2024, arXiv:2406.06484), on any device and
//! differentiable.
//!
//! With c the running sum of g within a chunk, D[i, j] = e^(cᵢ − cⱼ) for i ≥ j, and S the state before it:
//!
//! `A = strict_lower(β K Kᵀ ∘ D)`, `N = (I + A)⁻¹ β (V − eᶜ K S)`, `O = eᶜ Q S + lower(Q Kᵀ ∘ D) N`,
//! `S ← e^(c_last) S + (e^(c_last − c) K)ᵀ N`.

use crate::delta::{CHUNK, DeltaHeads, PaddedGeneration, SequenceRows};
use burn::tensor::{Bool, Device, Tensor, TensorData};

/// Term added to the squared norm of a query or key.
const NORM_EPS: f64 = 1e-6;

/// Stands for no weight at all in the exponent.
const HIDDEN: f64 = -1e9;

/// Of sequences that begin, or go on behind others: `[rows, value heads · value_dim]`.
pub(crate) fn whole(inputs: [&Tensor<2>; 3], heads: DeltaHeads, sequences: &SequenceRows) -> Tensor<2> {
    generations(inputs, heads, sequences, None).0
}

/// Of sequences whose states are in `pool`, where the new ones go.
pub(crate) fn continued(
    inputs: [&Tensor<2>; 3],
    pool: Tensor<2>,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> (Tensor<2>, Tensor<2>) {
    let states = sequences.read(&pool);
    let (out, states) = generations(inputs, heads, sequences, Some(states));
    (out, sequences.write(pool, states))
}

/// The rule generation by generation, the first of which begins with `states`, `[sequences, numbers]`, or with zeros: the
/// output, `[rows, value heads · value_dim]`, and the states after the last generation.
fn generations(
    [qkv, g, beta]: [&Tensor<2>; 3],
    heads: DeltaHeads,
    sequences: &SequenceRows,
    mut states: Option<Tensor<2>>,
) -> (Tensor<2>, Tensor<2>) {
    let [rows, _] = qkv.dims();
    let padding = sequences.padded_rows(rows);
    let place = (&qkv.device(), qkv.dtype());
    let columns = heads.values * heads.value_dim;
    let mut outputs = Vec::new();
    for generation in &padding.generations {
        if let Some(parents) = &generation.parents {
            states = states.map(|states| states.select(0, parents.clone()));
        }
        let shape = [generation.sequences * heads.values, heads.key_dim, heads.value_dim];
        let state = states.map_or_else(|| Tensor::zeros(shape, place), |states| states.reshape(shape));
        let (out, after) = chunked([qkv, g, beta], heads, generation, state);
        outputs.push(out);
        states = Some(after.reshape([generation.sequences, heads.state()]));
    }
    outputs.push(Tensor::zeros([1, columns], place));
    let out = Tensor::cat(outputs, 0).select(0, padding.places.clone());
    (out, states.unwrap_or_else(|| Tensor::zeros([0, heads.state()], place)))
}

/// The rule over the sequences of a generation with states `[sequences · value heads, key_dim, value_dim]`: the output of
/// padded rows, `[sequences · width, value heads · value_dim]`, and the states after it.
fn chunked(
    [qkv, g, beta]: [&Tensor<2>; 3],
    heads: DeltaHeads,
    padding: &PaddedGeneration,
    mut state: Tensor<3>,
) -> (Tensor<2>, Tensor<3>) {
    let (count, width) = (padding.sequences, padding.width);
    let batch = count * heads.values;
    let (key_dim, value_dim) = (heads.key_dim, heads.value_dim);
    let padded = spread(qkv, padding);
    let keys = heads.keys * key_dim;
    let of_keys = |first: usize| {
        let vectors = padded.clone().narrow(1, first, keys).reshape([count, width, heads.keys, key_dim]);
        let vectors = normed(vectors).swap_dims(1, 2).reshape([count * heads.keys, 1, width, key_dim]);
        let shape = [count * heads.keys, heads.group(), width, key_dim];
        vectors.expand(shape).reshape([batch, width, key_dim])
    };
    let by_head = |t: Tensor<2>, dim: usize| {
        t.reshape([count, width, heads.values, dim]).swap_dims(1, 2).reshape([batch, width, dim])
    };
    let q = of_keys(0) * (key_dim as f64).sqrt().recip();
    let k = of_keys(keys);
    let v = by_head(padded.clone().narrow(1, 2 * keys, heads.values * value_dim), value_dim);
    let [g, beta] = [g, beta].map(|t| by_head(spread(t, padding), 1));
    let size = width.min(CHUNK);
    let masks = Masks::new(size, &qkv.device());
    let mut outputs = Vec::new();
    for start in (0..width).step_by(size) {
        let part = |t: &Tensor<3>| t.clone().narrow(1, start, size);
        let (out, next) = chunk([&q, &k, &v, &g, &beta].map(part), state, &masks);
        outputs.push(out);
        state = next;
    }
    let out = Tensor::cat(outputs, 1)
        .reshape([count, heads.values, width, value_dim])
        .swap_dims(1, 2)
        .reshape([count * width, heads.values * value_dim]);
    (out, state)
}

/// Rows as padded rows of each sequence, `[sequences · width, columns]`, padding being zeros: neither decays nor writes
/// anything.
fn spread(rows: &Tensor<2>, padding: &PaddedGeneration) -> Tensor<2> {
    let [_, columns] = rows.dims();
    let zeros = Tensor::zeros([1, columns], (&rows.device(), rows.dtype()));
    Tensor::cat(vec![rows.clone(), zeros], 0).select(0, padding.spread.clone())
}

fn normed(x: Tensor<4>) -> Tensor<4> {
    let squares = (x.clone() * x.clone()).sum_dim(3);
    x * (squares + NORM_EPS).sqrt().recip()
}

/// Masks of `[size, size]` matrices, as `[1, size, size]`.
struct Masks {
    /// True above the diagonal, and on it.
    above: Tensor<3, Bool>,
    from: Tensor<3, Bool>,
    /// Ones on the diagonal and below it.
    lower: Vec<f32>,
    /// For each doubling of the blocks on the diagonal: true outside of the blocks that two of them leave below it.
    outside: Vec<Tensor<3, Bool>>,
    size: usize,
}

impl Masks {
    fn new(size: usize, device: &Device) -> Self {
        let values = |hidden: &dyn Fn(usize, usize) -> bool| {
            (0..size).flat_map(|i| (0..size).map(move |j| (i, j))).map(|(i, j)| hidden(i, j)).collect::<Vec<bool>>()
        };
        let mask = |hidden: &dyn Fn(usize, usize) -> bool| {
            let data = TensorData::new(values(hidden), [1, size, size]);
            Tensor::<3, Bool>::from_data(data, device)
        };
        let doublings = (0..size.ilog2()).map(|level| {
            let block = 1usize << level;
            mask(&|i, j| {
                let below = i / block == j / block + 1 && (j / block).is_multiple_of(2);
                !below
            })
        });
        Self {
            above: mask(&|i, j| j > i),
            from: mask(&|i, j| j >= i),
            lower: values(&|i, j| j <= i).into_iter().map(|seen| f32::from(u8::from(seen))).collect(),
            outside: doublings.collect(),
            size,
        }
    }

    /// Ones on the diagonal and below it, as a tensor like another.
    fn ones(&self, like: &Tensor<3>) -> Tensor<3> {
        let shape = [1, self.size, self.size];
        let data = TensorData::new(self.lower.clone(), shape);
        let place = (&like.device(), like.dtype());
        Tensor::<3>::from_data(data, place)
    }

    /// `(I + A)⁻¹`, where A is zero on the diagonal and above it, by doubling the blocks on the diagonal that are
    /// inverted: with X of two neighbours, the block below them becomes `−X₂ A₂₁ X₁`. Unlike a product of powers of A,
    /// nothing in it grows and cancels.
    fn inverse(&self, a: &Tensor<3>) -> Tensor<3> {
        let shape = a.dims();
        let n = self.size;
        let identity = (0..n * n).map(|i| f32::from(u8::from(i % (n + 1) == 0)));
        let identity = TensorData::new(identity.collect::<Vec<f32>>(), [1, n, n]);
        let identity = Tensor::<3>::from_data(identity, (&a.device(), a.dtype()));
        let mut x = identity.expand(shape);
        for outside in &self.outside {
            let between = a.clone().mask_fill(outside.clone().expand(shape), 0.0);
            let below = x.clone().matmul(between).matmul(x.clone());
            x = x - below;
        }
        x
    }
}

/// A chunk of queries, keys, values, log decays and β, `[batch, size, …]`: its output, and the state after it.
fn chunk([q, k, v, g, beta]: [Tensor<3>; 5], state: Tensor<3>, masks: &Masks) -> (Tensor<3>, Tensor<3>) {
    let [batch, size, _] = q.dims();
    let shape = [batch, size, size];
    let ones = masks.ones(&g).expand(shape);
    let c = ones.matmul(g);
    let last = c.clone().narrow(1, size - 1, 1);
    let apart = c.clone().expand(shape) - c.clone().swap_dims(1, 2).expand(shape);
    // hidden before the exponential, which would be infinite there
    let decay = apart.mask_fill(masks.above.clone().expand(shape), HIDDEN).exp();
    let k_t = k.clone().swap_dims(1, 2);
    let a = beta.clone() * k.clone().matmul(k_t.clone()) * decay.clone();
    let a = a.mask_fill(masks.from.clone().expand(shape), 0.0);
    let gamma = c.clone().exp();
    let residual = beta * (v - gamma.clone() * k.clone().matmul(state.clone()));
    let n = masks.inverse(&a).matmul(residual);
    let out = gamma * q.clone().matmul(state.clone()) + (q.matmul(k_t) * decay).matmul(n.clone());
    let kept = (last.clone() - c).exp() * k;
    let state = last.exp() * state + kept.swap_dims(1, 2).matmul(n);
    (out, state)
}
