//! Causal attention of packed sequences, with its gradient, and no `[heads, T, T]` anywhere (`FlashAttention`; Dao,
//! 2023).
//!
//! Forward, a cube has a block of queries of one head and iterates over tiles of the keys that they see, with online
//! softmax; each row's logsumexp is saved. Backward, scores are recomputed: cubes with a block of queries compute dQ,
//! and cubes with a block of keys compute dK and dV, summed over the query heads of their group. No two cubes write the
//! same element, so there are no atomics.
//!
//! Sinks need no kernel of their own: they add to a row's logsumexp and rescale what it gives, and the backward pass
//! recomputes the probabilities from the logsumexp that they are part of.
//!
//! There are two versions of each kernel: `tensor_core` for half precision, and `simt` on SIMT units for the rest.

mod blocks;
mod simt;
mod tensor_core;

use super::cmma::{SIDE, VECTOR, has_tensor_cores};
use super::prelude::*;
use crate::prefix_groups::BLOCK_FIELDS;
use crate::shapes::AttentionShape;
use blocks::{Layout, Sizes, softmax_delta};
use firebrick_device::precision::{stored_as, widened};
use simt::STAGE;

/// Returns true if the kernels take these tensors and sequences.
pub(crate) fn takes(qkv: [&Tensor<3>; 3], shape: &AttentionShape) -> bool {
    alike(Operation::LongAttention, &qkv) && qkv[0].dims()[2] <= STAGE && shape.groups.blocks.is_some()
}

/// See [`crate::attention`].
pub(crate) fn attention(qkv: [&Tensor<3>; 3], sinks: Option<&Tensor<2>>, shape: &AttentionShape) -> Tensor<3> {
    let [q, k, v] = qkv.map(|t| autodiff::input(t.clone()));
    let kernel = Attention(shape.clone());
    match sinks {
        None => run(kernel, [q, k, v]),
        Some(sinks) => run(kernel, [q, k, v, autodiff::input(sinks.clone())]),
    }
}

#[derive(Clone, Debug)]
struct Attention(AttentionShape);

/// The arguments that all launches share.
struct LaunchParams {
    table: CubeTensor,
    /// True if every row is in a sequence.
    whole: bool,
    layout: Layout,
    sizes: Sizes,
    on_tensor_cores: bool,
}

/// Launches the version of a kernel for the tensors on `$count` cubes.
macro_rules! launch_version {
    ($kernel:ident, $params:expr, $like:expr, $count:expr, [$($buffer:expr),*]) => {{
        let (params, like): (&LaunchParams, &CubeTensor) = ($params, $like);
        let (grid, table, layout, dtype) = (Grid::cubes([like], $count), &params.table, params.layout.argument(), elem(like));
        if params.on_tensor_cores {
            launch!(tensor_core::$kernel, grid, VECTOR, [$($buffer,)* table], layout, params.sizes, dtype);
        } else {
            launch!(simt::$kernel, grid, [$($buffer,)* table], layout, params.sizes, dtype);
        }
    }};
}

impl Attention {
    fn params(&self, q: &CubeTensor, k: &CubeTensor) -> LaunchParams {
        let blocks = self.0.groups.blocks.as_ref();
        let blocks = blocks.expect("the device was checked before");
        let ([rows, heads, dim], [_, kv, _]) = (dims(q), dims(k));
        let sizes = Sizes { dim, capped: self.0.softcap.is_some() };
        LaunchParams {
            table: integers(&blocks.table),
            whole: blocks.rows == rows,
            layout: Layout {
                blocks: blocks.count,
                keys: blocks.count * BLOCK_FIELDS,
                spans: 2 * blocks.count * BLOCK_FIELDS,
                heads,
                group: heads / kv,
                window: self.0.window.map_or(i32::MAX / 2, |w| w.min(1 << 29) as i32),
                scale: self.0.scale as f32,
                cap: self.0.softcap.unwrap_or(1.0) as f32,
            },
            sizes,
            // shared memory has to be enough too
            on_tensor_cores: dim.is_multiple_of(SIDE) && has_tensor_cores(q, sizes.shared_bytes()),
        }
    }
}

/// The buffer of an output; zeros where some rows are in no sequence.
fn output_buffer(like: &CubeTensor, whole: bool) -> CubeTensor {
    empty_or_zeros(like, like.shape(), like.dtype, whole)
}

impl Attention {
    /// The output and every row's logsumexp, `[rows, heads]`; zeros in rows of no sequence.
    fn attend(&self, [q, k, v]: [&CubeTensor; 3]) -> [CubeTensor; 2] {
        let params = self.params(q, k);
        let out = output_buffer(q, params.whole);
        let [rows, ..] = dims::<3>(q);
        let lse = empty(q, [rows, params.layout.heads], DType::F32);
        let lse = if params.whole { lse } else { output_buffer(&lse, false) };
        let count = params.layout.blocks * params.layout.heads;
        launch_version!(attention_forward, &params, q, count, [q, k, v, &out, &lse]);
        [out, lse]
    }

    /// Gradients of queries, keys and values, given each row's logsumexp and Δ.
    fn gradients(&self, [q, k, v, gradient, rows]: [&CubeTensor; 5], wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let params = self.params(q, k);
        let count = params.layout.blocks * params.layout.heads;
        let d_q = wanted[0].then(|| {
            let d_q = output_buffer(q, params.whole);
            launch_version!(query_backward, &params, q, count, [q, k, v, gradient, rows, &d_q]);
            d_q
        });
        if !(wanted[1] || wanted[2]) {
            return [d_q, None, None];
        }
        let [d_k, d_v] = [k, v].map(|t| output_buffer(t, params.whole));
        let count = count / params.layout.group;
        launch_version!(key_value_backward, &params, q, count, [q, k, v, gradient, rows, &d_k, &d_v]);
        [d_q, Some(d_k), Some(d_v)]
    }
}

impl Kernel<Cube, 3> for Attention {
    const NAME: &str = "attention";
    type Saved = [CubeTensor; 5];

    fn forward(&self, [q, k, v]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [out, lse] = self.attend([&q, &k, &v]);
        (out.clone(), [q, k, v, out, lse])
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let [q, k, v, out, lse] = saved;
        let rows = softmax_stats(out, &gradient, lse);
        self.gradients([&q, &k, &v, &gradient, &rows], wanted)
    }
}

/// With sinks: of a row with logsumexp l and a sink s, the output is multiplied by `exp(l − l')` where `l' =
/// ln(exp(l) + exp(s))`. Its probabilities are `exp(score − l')`, so that the kernels of the backward pass take
/// l' for l, and the sink's gradient is the sum of `−exp(s − l') Δ`.
impl Kernel<Cube, 4> for Attention {
    const NAME: &str = "attention";
    type Saved = [CubeTensor; 6];

    fn forward(&self, [q, k, v, sinks]: [CubeTensor; 4]) -> (CubeTensor, Self::Saved) {
        let [out, lse] = self.attend([&q, &k, &v]);
        let (out, lse): (Tensor<3>, Tensor<2>) = (Cube::tensor(out), Cube::tensor(lse));
        let sink: Tensor<2> = widened(Cube::tensor(sinks.clone()));
        let sink = sink.expand(lse.dims());
        let top = lse.clone().max_pair(sink.clone());
        let sum = (lse.clone() - top.clone()).exp() + (sink - top.clone()).exp();
        let joint = sum.log() + top;
        let [rows, heads] = lse.dims();
        let kept = (lse - joint.clone()).exp().reshape([rows, heads, 1]);
        let stored = out.dtype();
        let out = Cube::contiguous(Cube::primitive(stored_as(widened(out) * kept, stored)));
        let joint = Cube::contiguous(Cube::primitive(joint));
        (out.clone(), [q, k, v, out, joint, sinks])
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 4]) -> [Option<CubeTensor>; 4] {
        let [q, k, v, out, joint, sinks] = saved;
        let rows = softmax_stats(out, &gradient, joint.clone());
        let of_sinks = wanted[3].then(|| sink_gradient(joint, &rows, sinks));
        let [a, b, c, _] = wanted;
        let [d_q, d_k, d_v] = self.gradients([&q, &k, &v, &gradient, &rows], [a, b, c]);
        [d_q, d_k, d_v, of_sinks]
    }
}

/// The gradient of sinks, `[1, heads]`, given each row's logsumexp with them, and the same beside Δ.
fn sink_gradient(joint: CubeTensor, rows: &CubeTensor, sinks: CubeTensor) -> CubeTensor {
    let (joint, sinks): (Tensor<2>, Tensor<2>) = (Cube::tensor(joint), Cube::tensor(sinks));
    let pairs: Tensor<3> = Cube::tensor(rows.clone());
    let delta = pairs.narrow(2, 1, 1).reshape(joint.dims());
    let stored = sinks.dtype();
    let share = (widened(sinks).expand(joint.dims()) - joint).exp();
    let sum = (share * delta).sum_dim(0).neg();
    Cube::contiguous(Cube::primitive(stored_as(sum, stored)))
}

/// Each row's and head's logsumexp and Δ = Σ O ∘ dO: `[rows, heads, 2]`.
fn softmax_stats(out: CubeTensor, gradient: &CubeTensor, lse: CubeTensor) -> CubeTensor {
    let [rows, heads, dim] = dims(&out);
    let pairs = empty(&lse, [rows, heads, 2], DType::F32);
    let (grid, dtype) = (Grid::elements([gradient], rows * heads), elem(&out));
    launch!(softmax_delta, grid, [out, gradient, lse, &pairs], rows * heads, dim, dtype);
    pairs
}
