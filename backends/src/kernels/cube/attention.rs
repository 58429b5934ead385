//! Causal attention of packed sequences, with its gradient, and no `[heads, T, T]` anywhere (`FlashAttention`; Dao, 2023).
//!
//! Forward, a cube has a block of queries of one head and goes through the keys that they see, a tile at a time, with softmax as
//! it goes; each row's logsumexp is kept. Backward, scores are made again: a cube that has a block of queries adds up their
//! gradient, and one that has a block of keys adds up those of the keys and their values over all query heads of their group. So
//! nothing is added from two places, and there are no atomics.

mod backward;
mod forward;
mod tile;

use super::launch::{UNITS, address, cubes, dims, elem, elementwise, empty, integers, knows};
use crate::kernels::choice::Operation;
use crate::kernels::families::BLOCK_FIELDS;
use crate::kernels::shapes::AttentionShape;
use crate::kernels::tape::{self, Kernel, run};
use backward::{differentiate_keys, differentiate_queries, meet};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use forward::attend;
use tile::STAGE;

/// Attention of packed rows; see [`crate::kernels::attention`].
pub(in crate::kernels) fn attention(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    shape: &AttentionShape,
) -> Option<Tensor<3>> {
    let known = |t: &Tensor<3>| knows(Operation::LongAttention, t) && t.dtype() == q.dtype();
    if ![q, k, v].into_iter().all(known) || q.dims()[2] > STAGE || shape.families.blocks.is_none() {
        return None;
    }
    let inputs = [q, k, v].map(|t| tape::input(t.clone()));
    Some(run(Attention(shape.clone()), inputs))
}

#[derive(Clone, Debug)]
struct Attention(AttentionShape);

/// What all launches over one kind of blocks are told.
struct Told {
    table: CubeTensor,
    blocks: usize,
    /// First of the blocks of keys, and of the spans, in the table.
    keys: usize,
    spans: usize,
    /// Whether every row is in a sequence.
    whole: bool,
    heads: usize,
    group: usize,
    dim: usize,
    window: i32,
}

impl Attention {
    fn told(&self, q: &CubeTensor, k: &CubeTensor) -> Told {
        let blocks = self.0.families.blocks.as_ref();
        let blocks = blocks.expect("the device was looked at before");
        let ([rows, heads, dim], [_, kv, _]) = (dims(q), dims(k));
        Told {
            table: integers(&blocks.table),
            blocks: blocks.count,
            keys: blocks.count * BLOCK_FIELDS,
            spans: 2 * blocks.count * BLOCK_FIELDS,
            whole: blocks.rows == rows,
            heads,
            group: heads / kv,
            dim,
            window: self
                .0
                .window
                .map_or(i32::MAX / 2, |w| w.min(1 << 29) as i32),
        }
    }

    fn cap(&self) -> f32 {
        self.0.softcap.unwrap_or(1.0) as f32
    }
}

/// Room for a result: rows in no sequence get zeros.
fn room(like: &CubeTensor, whole: bool) -> CubeTensor {
    if whole {
        empty(like, like.shape(), like.dtype)
    } else {
        let (client, device) = (like.client.clone(), like.device.clone());
        zeros_client(client, device, like.shape(), like.dtype)
    }
}

impl Kernel<Cube, 3> for Attention {
    const NAME: &str = "attention";
    type Saved = [CubeTensor; 5];

    fn forward(&self, inputs: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [q, k, v] = inputs;
        let told = self.told(&q, &k);
        let out = room(&q, told.whole);
        let [rows, ..] = dims::<3>(&q);
        let lse = empty(&q, [rows, told.heads], DType::F32);
        attend::launch(
            &out.client,
            cubes(&out, told.blocks * told.heads),
            CubeDim::new_1d(UNITS as u32),
            address([&q]),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            told.table.into_buffer_arg(),
            told.blocks,
            told.spans,
            told.heads,
            told.group,
            told.window,
            self.0.scale as f32,
            self.cap(),
            self.0.softcap.is_some(),
            told.dim,
            elem(&q),
        );
        (out.clone(), [q, k, v, out, lse])
    }

    fn backward(
        &self,
        [q, k, v, out, lse]: Self::Saved,
        gradient: CubeTensor,
        wanted: [bool; 3],
    ) -> [Option<CubeTensor>; 3] {
        let told = self.told(&q, &k);
        let rows = row_numbers(out, &gradient, lse);
        let inputs = [&q, &k, &v, &gradient, &rows];
        let d_q = wanted[0].then(|| self.query_gradient(&told, inputs));
        let [d_k, d_v] = if wanted[1] || wanted[2] {
            self.key_gradients(&told, inputs).map(Some)
        } else {
            [None, None]
        };
        [d_q, d_k, d_v]
    }
}

/// Of every row and head its logsumexp, and Σ of the mixed values times their gradient: `[rows, heads, 2]`.
fn row_numbers(out: CubeTensor, gradient: &CubeTensor, lse: CubeTensor) -> CubeTensor {
    let [rows, heads, dim] = dims(&out);
    let both = empty(&lse, [rows, heads, 2], DType::F32);
    let (count, cube) = elementwise(&both, rows * heads);
    let dtype = elem(&out);
    meet::launch(
        &both.client,
        count,
        cube,
        address([gradient]),
        out.into_buffer_arg(),
        gradient.clone().into_buffer_arg(),
        lse.into_buffer_arg(),
        both.clone().into_buffer_arg(),
        rows * heads,
        dim,
        dtype,
    );
    both
}

impl Attention {
    fn query_gradient(
        &self,
        told: &Told,
        [q, k, v, gradient, rows]: [&CubeTensor; 5],
    ) -> CubeTensor {
        let d_q = room(q, told.whole);
        differentiate_queries::launch(
            &d_q.client,
            cubes(&d_q, told.blocks * told.heads),
            CubeDim::new_1d(UNITS as u32),
            address([q]),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            rows.clone().into_buffer_arg(),
            d_q.clone().into_buffer_arg(),
            told.table.clone().into_buffer_arg(),
            told.blocks,
            told.spans,
            told.heads,
            told.group,
            told.window,
            self.0.scale as f32,
            self.cap(),
            self.0.softcap.is_some(),
            told.dim,
            elem(q),
        );
        d_q
    }

    fn key_gradients(
        &self,
        told: &Told,
        [q, k, v, gradient, rows]: [&CubeTensor; 5],
    ) -> [CubeTensor; 2] {
        let [d_k, d_v] = [k, v].map(|t| room(t, told.whole));
        differentiate_keys::launch(
            &d_k.client,
            cubes(&d_k, told.blocks * told.heads / told.group),
            CubeDim::new_1d(UNITS as u32),
            address([q]),
            q.clone().into_buffer_arg(),
            k.clone().into_buffer_arg(),
            v.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            rows.clone().into_buffer_arg(),
            d_k.clone().into_buffer_arg(),
            d_v.clone().into_buffer_arg(),
            told.table.clone().into_buffer_arg(),
            told.blocks,
            told.keys,
            told.spans,
            told.heads,
            told.group,
            told.window,
            self.0.scale as f32,
            self.cap(),
            self.0.softcap.is_some(),
            told.dim,
            elem(q),
        );
        [d_k, d_v]
    }
}
