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
//! There are three versions of each kernel: `flash` on NVIDIA's tensor cores, `tensor_core` on other devices' and for
//! heads that `flash` does not take, both in half precision, and `simt` on SIMT units for the rest. Exact forward passes
//! take `simt` in place of `tensor_core`.

pub(super) mod blocks;
pub(super) mod flash;
pub(super) mod simt;
mod tensor_core;

use super::cmma::{SIDE, VECTOR, has_tensor_cores};
use super::paged::flash_decodes_in_order;
use super::prelude::*;
use crate::exact::is_exact;
use crate::prefix_groups::BlockRows;
use crate::shapes::AttentionShape;
pub(super) use blocks::Sizes;
use blocks::{Layout, softmax_delta};
use firebrick_device::precision::{stored_as, widened};
use flash::Params;
use simt::STAGE;

/// Returns true if the kernels take these tensors and sequences.
pub(crate) fn takes(qkv: [&Tensor<3>; 3], shape: &AttentionShape) -> bool {
    alike(Operation::LongAttention, &qkv) && qkv[0].dims()[2] <= STAGE && shape.groups.blocks().is_some()
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

/// Blocks of the kernels in `CubeCL`.
const BLOCK: BlockRows = BlockRows::Of64;

#[derive(Clone, Debug)]
struct Attention(AttentionShape);

/// Launches the version of a kernel in `CubeCL` for the tensors on `$count` cubes.
macro_rules! launch_version {
    ($kernel:ident, $params:expr, $like:expr, $count:expr, [$($buffer:expr),*]) => {{
        let (params, like): (&Params<'_>, &CubeTensor) = ($params, $like);
        let sizes = Sizes { dim: dims::<3>(like)[2], capped: params.capped };
        let table = integers(&params.blocks.table(BLOCK).entries);
        let (grid, layout, dtype) = (Grid::cubes([like], $count), params.layout.argument(), elem(like));
        // shared memory has to be enough too, and only `simt` has kernels of one order
        if !is_exact() && sizes.dim.is_multiple_of(SIDE) && has_tensor_cores(like, sizes.shared_bytes()) {
            launch!(tensor_core::$kernel, grid, VECTOR, [$($buffer,)* &table], layout, sizes, dtype);
        } else {
            launch!(simt::$kernel, grid, [$($buffer,)* &table], layout, sizes, dtype);
        }
    }};
}

impl Attention {
    fn params(&self, q: &CubeTensor, k: &CubeTensor) -> Params<'_> {
        let blocks = self.0.groups.blocks().expect("the device was checked before");
        let ([rows, heads, _], [_, kv, _]) = (dims(q), dims(k));
        let table = blocks.table(BLOCK);
        Params {
            blocks,
            whole: blocks.rows() == rows,
            capped: self.0.softcap.is_some(),
            layout: Layout {
                blocks: table.count,
                keys: table.keys(),
                spans: table.spans(),
                heads,
                group: heads / kv,
                window: self.0.window.map_or(i32::MAX / 2, |w| w.min(1 << 29) as i32),
                scale: self.0.scale as f32,
                cap: self.0.softcap.unwrap_or(1.0) as f32,
            },
        }
    }

    /// The output and every row's logsumexp, `[rows, heads]`, with the sinks of heads, `[1, heads]`, if there are any;
    /// zeros in rows of no sequence.
    fn attend(&self, [q, k, v]: [&CubeTensor; 3], sinks: Option<&CubeTensor>) -> [CubeTensor; 2] {
        let params = self.params(q, k);
        let [rows, heads, _] = dims(q);
        let out = empty_or_zeros(q, q.shape(), q.dtype, params.whole);
        let lse = empty_or_zeros(q, [rows, heads], DType::F32, params.whole);
        let sinks = sinks.map(|sinks| widened::<2>(Cube::tensor(sinks.clone())));
        if flash::takes(q) && (!is_exact() || flash_decodes_in_order(q, params.layout.group)) {
            let sinks = sinks.map(|sinks| Cube::contiguous(Cube::primitive(sinks)));
            flash::forward(&params, [q, k, v], sinks.as_ref(), &out, &lse);
            return [out, lse];
        }
        launch_version!(attention_forward, &params, q, params.layout.blocks * heads, [q, k, v, &out, &lse]);
        match sinks {
            Some(sinks) => join_sinks(out, lse, sinks),
            None => [out, lse],
        }
    }

    /// Each row's and head's logsumexp and Δ = Σ O ∘ dO: `[rows, heads, 2]`.
    fn softmax_stats(&self, [q, k, out, gradient, lse]: [&CubeTensor; 5]) -> CubeTensor {
        let [rows, heads, dim] = dims(out);
        let pairs = empty(lse, [rows, heads, 2], DType::F32);
        if flash::takes(q) {
            flash::delta(&self.params(q, k), [out, gradient, lse, &pairs]);
        } else {
            let (grid, dtype) = (Grid::elements([gradient], rows * heads), elem(out));
            launch!(softmax_delta, grid, [out, gradient, lse, &pairs], rows * heads, dim, dtype);
        }
        pairs
    }

    /// Gradients of queries, keys and values, given each row's logsumexp and Δ.
    fn gradients(&self, [q, k, v, gradient, rows]: [&CubeTensor; 5], wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let params = self.params(q, k);
        let inputs = [q, k, v, gradient, rows];
        let count = params.layout.blocks * params.layout.heads;
        let d_q = wanted[0].then(|| {
            let d_q = empty_or_zeros(q, q.shape(), q.dtype, params.whole);
            if flash::takes(q) {
                flash::query_gradient(&params, inputs, &d_q);
            } else {
                launch_version!(query_backward, &params, q, count, [q, k, v, gradient, rows, &d_q]);
            }
            d_q
        });
        if !(wanted[1] || wanted[2]) {
            return [d_q, None, None];
        }
        if flash::takes(q) {
            let [d_k, d_v] = flash::key_value_gradients(&params, inputs);
            return [d_q, Some(d_k), Some(d_v)];
        }
        let [d_k, d_v] = [k, v].map(|t| empty_or_zeros(t, t.shape(), t.dtype, params.whole));
        let count = count / params.layout.group;
        launch_version!(key_value_backward, &params, q, count, [q, k, v, gradient, rows, &d_k, &d_v]);
        [d_q, Some(d_k), Some(d_v)]
    }
}

/// The output and logsumexp of rows whose softmax sinks have joined: of a row with logsumexp l and a sink s, the output
/// is multiplied by `exp(l − l')` where `l' = ln(exp(l) + exp(s))`.
pub(super) fn join_sinks(out: CubeTensor, lse: CubeTensor, sink: Tensor<2>) -> [CubeTensor; 2] {
    let (out, lse): (Tensor<3>, Tensor<2>) = (Cube::tensor(out), Cube::tensor(lse));
    let sink = sink.expand(lse.dims());
    let top = lse.clone().max_pair(sink.clone());
    let sum = (lse.clone() - top.clone()).exp() + (sink - top.clone()).exp();
    let joint = sum.log() + top;
    let [rows, heads] = lse.dims();
    let kept = (lse - joint.clone()).exp().reshape([rows, heads, 1]);
    let stored = out.dtype();
    let out = Cube::contiguous(Cube::primitive(stored_as(widened(out) * kept, stored)));
    [out, Cube::contiguous(Cube::primitive(joint))]
}

impl Kernel<Cube, 3> for Attention {
    const NAME: &str = "attention";
    type Saved = [CubeTensor; 5];

    fn forward(&self, [q, k, v]: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [out, lse] = self.attend([&q, &k, &v], None);
        (out.clone(), [q, k, v, out, lse])
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let [q, k, v, out, lse] = saved;
        let rows = self.softmax_stats([&q, &k, &out, &gradient, &lse]);
        self.gradients([&q, &k, &v, &gradient, &rows], wanted)
    }
}

/// With sinks, probabilities of a row are `exp(score − l')`, where its logsumexp l' includes the sink s, so that the
/// kernels of the backward pass take l' for l, and the sink's gradient is the sum of `−exp(s − l') Δ`.
impl Kernel<Cube, 4> for Attention {
    const NAME: &str = "attention";
    type Saved = [CubeTensor; 6];

    fn forward(&self, [q, k, v, sinks]: [CubeTensor; 4]) -> (CubeTensor, Self::Saved) {
        let [out, joint] = self.attend([&q, &k, &v], Some(&sinks));
        (out.clone(), [q, k, v, out, joint, sinks])
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 4]) -> [Option<CubeTensor>; 4] {
        let [q, k, v, out, joint, sinks] = saved;
        let rows = self.softmax_stats([&q, &k, &out, &gradient, &joint]);
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
