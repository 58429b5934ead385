//! Causal attention of packed sequences, with its gradient, and no `[heads, T, T]` anywhere (`FlashAttention`; Dao, 2023).
//!
//! Forward, a cube has a block of queries of one head and goes through the keys that they see, a tile at a time, with softmax as
//! it goes; each row's logsumexp is kept. Backward, scores are made again: a cube that has a block of queries adds up their
//! gradient, and one that has a block of keys adds up those of the keys and their values over all query heads of their group. So
//! nothing is added from two places, and there are no atomics.
//!
//! There are two kinds of each kernel: on tensor cores for half precision (`tensor_core`), and on plain units for the rest (`simt`).

mod blocks;
mod simt;
mod tensor_core;

use super::cmma::{SIDE, VECTOR, has_tensor_cores};
use super::launch::{UNITS, address, cubes, dims, elem, elementwise, empty, integers, supports};
use crate::kernels::autodiff::{self, Kernel, run};
use crate::kernels::choice::Operation;
use crate::kernels::families::BLOCK_FIELDS;
use crate::kernels::shapes::AttentionShape;
use blocks::meet;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use simt::STAGE;
use tensor_core::Sizes;

/// Attention of packed rows; see [`crate::kernels::attention`].
pub(super) fn attention(
    q: &Tensor<3>,
    k: &Tensor<3>,
    v: &Tensor<3>,
    shape: &AttentionShape,
) -> Option<Tensor<3>> {
    let known = |t: &Tensor<3>| supports(Operation::LongAttention, t) && t.dtype() == q.dtype();
    if ![q, k, v].into_iter().all(known) || q.dims()[2] > STAGE || shape.families.blocks.is_none() {
        return None;
    }
    let inputs = [q, k, v].map(|t| autodiff::input(t.clone()));
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
    scale: f32,
    /// One where scores have none.
    cap: f32,
    capped: bool,
    /// Where tensor cores make the products.
    tensor_cores: Option<Sizes>,
}

/// Launches a kernel of the kind that there is for the tensors, on so many cubes: buffers, the table and the number of its
/// blocks, places in the table, and what else is told.
macro_rules! launch {
    ($kernel:ident, $told:expr, $like:expr, $count:expr, [$($buffer:expr),*], [$($place:ident),*]) => {{
        let (told, like): (&Told, &CubeTensor) = ($told, $like);
        let cube = CubeDim::new_1d(UNITS as u32);
        let (client, count, address, dtype) = (&like.client, cubes(like, $count), address([like]), elem(like));
        match told.tensor_cores {
            Some(sizes) => tensor_core::$kernel::launch(
                client, count, cube, address, VECTOR,
                $($buffer.clone().into_buffer_arg(),)*
                told.table.clone().into_buffer_arg(), told.blocks, $(told.$place,)* told.heads, told.group, told.window,
                told.scale, told.cap, told.capped, sizes, dtype,
            ),
            None => simt::$kernel::launch(
                client, count, cube, address,
                $($buffer.clone().into_buffer_arg(),)*
                told.table.clone().into_buffer_arg(), told.blocks, $(told.$place,)* told.heads, told.group, told.window,
                told.scale, told.cap, told.capped, told.dim, dtype,
            ),
        }
    }};
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
            scale: self.0.scale as f32,
            cap: self.0.softcap.unwrap_or(1.0) as f32,
            capped: self.0.softcap.is_some(),
            tensor_cores: tensor_core_sizes(q, dim),
        }
    }
}

/// Sizes of the kernels on tensor cores, where a device has those that they want, and shared memory for them.
fn tensor_core_sizes(q: &CubeTensor, dim: usize) -> Option<Sizes> {
    let sizes = Sizes { dim };
    let fits = dim.is_multiple_of(SIDE);
    (fits && has_tensor_cores(q, sizes.shared_bytes())).then_some(sizes)
}

/// Room for a result: rows in no sequence get zeros.
fn room(like: &CubeTensor, whole: bool) -> CubeTensor {
    if whole {
        return empty(like, like.shape(), like.dtype);
    }
    // CUDA pads the rows of zeros, unless there is but one
    let all = Shape::new([like.shape().num_elements()]);
    let (client, device) = (like.client.clone(), like.device.clone());
    let flat = zeros_client(client, device, all, like.dtype);
    CubeTensor::new_contiguous(
        flat.client,
        flat.device,
        like.shape(),
        flat.handle,
        flat.dtype,
    )
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
        let count = told.blocks * told.heads;
        launch!(attend, &told, &q, count, [q, k, v, out, lse], [spans]);
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
        let d_q = wanted[0].then(|| query_gradient(&told, inputs));
        let [d_k, d_v] = if wanted[1] || wanted[2] {
            key_gradients(&told, inputs).map(Some)
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

fn query_gradient(told: &Told, [q, k, v, gradient, rows]: [&CubeTensor; 5]) -> CubeTensor {
    let d_q = room(q, told.whole);
    let count = told.blocks * told.heads;
    launch!(
        differentiate_queries,
        told,
        q,
        count,
        [q, k, v, gradient, rows, d_q],
        [spans]
    );
    d_q
}

fn key_gradients(told: &Told, [q, k, v, gradient, rows]: [&CubeTensor; 5]) -> [CubeTensor; 2] {
    let [d_k, d_v] = [k, v].map(|t| room(t, told.whole));
    let count = told.blocks * told.heads / told.group;
    launch!(
        differentiate_keys,
        told,
        q,
        count,
        [q, k, v, gradient, rows, d_k, d_v],
        [keys, spans]
    );
    [d_k, d_v]
}
