//! A paged KV cache (`PagedAttention`, arXiv:2309.06180): attention of one new token per sequence over the tokens in
//! its blocks, in one pass with online softmax, and what else reads and writes blocks (`cache`).
//!
//! A cube has some query heads of one key head of one row. It rotates them and the new key, writes that and the new
//! value to the pool, and iterates over tiles of columns: [`tile::LANES`] units share a key and multiply it with every
//! query, then each unit has some dimensions of the values. Keys and values are read once per cube, coalesced
//! (`columns`). Where such cubes do not fill the GPU and rows are long, the columns of a row are divided among several
//! cubes (`kernels`).
//!
//! On NVIDIA's tensor cores, other kernels take half precision (`flash_decode`).
//!
//! A kernel is written once, over how a pool stores numbers (`storage`: in a float type, or in codes of 8 bits) and
//! where queries and new tokens are (`source`: in three tensors, or in one with their biases beside it). Codes are
//! widened in registers. A key's scale multiplies its product with a query, a value's scale its weight.

mod cache;
mod codes;
mod columns;
mod flash_decode;
mod in_order;
mod kernels;
mod place;
mod pool;
mod source;
mod storage;
mod tile;

pub(crate) use cache::{copy_blocks, gather_kv, write_kv};

use super::attention;
use super::prelude::*;
use crate::exact::is_exact;
use crate::paged::{KvPool, MIN_SPLIT_TOKENS, PagedAttentionShape};
use crate::shapes::JoinedHeads;
use burn::tensor::Device;
use codes::CODES;
use kernels::{append, attend, attend_parts, combine_parts, part_elements};
use place::{Layout, Sizes};
use pool::CubePool;
use source::{Joined, JoinedLaunch, Separate, SeparateLaunch, Source};
use storage::{FloatPool, Int8Pool, Storage};
use tile::{HEADS, QUERIES};

/// The least columns of a part: enough to pay for two more launches.
const PART: usize = 128;

/// The new tokens; see [`Separate`] and [`Joined`].
enum NewTokens {
    Separate { k: CubeTensor, v: CubeTensor },
    Joined { qkv: CubeTensor, bias: Option<CubeTensor> },
}

/// The type of queries, as kernels are launched.
type F = attend::F;

/// The arguments that launches share.
struct LaunchParams<'a> {
    new: NewTokens,
    out: CubeTensor,
    angles: CubeTensor,
    table: CubeTensor,
    pool: &'a CubePool,
    layout: Layout,
    sizes: Sizes,
    /// Sinks of the query heads, f32.
    sinks: Option<CubeTensor>,
}

/// Kernels that read the new tokens.
#[derive(Clone, Copy)]
enum Step {
    /// For all columns of a row.
    Attend,
    /// The first of those that divide the columns.
    Append,
}

/// Returns true if the kernels take tensors of these types beside the first one, with tables of a GPU.
fn knows(first: &Tensor<2>, others: &[DType], pool: &KvPool, shape: &PagedAttentionShape<'_>) -> bool {
    let stored = match pool {
        KvPool::Float { keys, values } => [keys.dtype(), values.dtype()],
        KvPool::Int8 { .. } => [first.dtype(); 2],
    };
    let tables = shape.tables.on_device.is_some() && shape.angles.on_device.is_some();
    let mut dtypes = others.iter().chain(&stored);
    tables && supports(Operation::DecodeAttention, first) && dtypes.all(|&dtype| dtype == first.dtype())
}

/// Returns true if the kernels take these tensors.
pub(crate) fn takes([q, k, v]: &[Tensor<2>; 3], pool: &KvPool, shape: &PagedAttentionShape<'_>) -> bool {
    knows(q, &[k.dtype(), v.dtype()], pool, shape)
}

/// Returns true if the kernels take these tensors, joined.
pub(crate) fn takes_joined(
    qkv: &Tensor<2>,
    bias: Option<&Tensor<2>>,
    heads: JoinedHeads,
    pool: &KvPool,
    shape: &PagedAttentionShape<'_>,
) -> bool {
    let biases: Vec<DType> = bias.iter().map(|bias| bias.dtype()).collect();
    knows(qkv, &biases, pool, shape) && qkv.dims()[1] == heads.width()
}

/// See [`crate::paged_attention`].
pub(crate) fn paged_attention(
    [q, k, v]: [Tensor<2>; 3],
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> (Tensor<2>, KvPool) {
    decode_attention(pool, shape, || {
        let new = NewTokens::Separate { k: detached(k), v: detached(v) };
        (into_writable(detached(q)), new)
    })
}

/// See [`crate::paged_attention_joined`].
pub(crate) fn paged_attention_joined(
    qkv: &Tensor<2>,
    bias: Option<&Tensor<2>>,
    heads: JoinedHeads,
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> (Tensor<2>, KvPool) {
    decode_attention(pool, shape, || {
        let qkv = detached(qkv.clone());
        let [rows, _] = dims(&qkv);
        let out = empty(&qkv, [rows, heads.queries * heads.dim], qkv.dtype);
        let bias = bias.map(|bias| detached(bias.clone()));
        (out, NewTokens::Joined { qkv, bias })
    })
}

/// Attention of new tokens, which come with the buffer of the output.
fn decode_attention(
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
    new: impl FnOnce() -> (CubeTensor, NewTokens),
) -> (Tensor<2>, KvPool) {
    let (Some(tables), Some(angles)) = (&shape.tables.on_device, &shape.angles.on_device) else {
        unreachable!("tables of a GPU");
    };
    let _span = span("decode attention", 0.0);
    let (out, new) = new();
    let [rows, width] = dims(&out);
    let pool = CubePool::open_writable(pool);
    let [kv, slots, elements] = dims(&pool.keys);
    let dim = if pool.scales.is_some() { elements * CODES } else { elements };
    let group = width / dim / kv;
    let joined = matches!(new, NewTokens::Joined { .. });
    let on_tensor_cores = joined && flash_decode::takes(&pool, group, dim);
    let heads = if on_tensor_cores { group } else { group.min(HEADS).min((QUERIES / dim).max(1)) };
    let window = shape.window.unwrap_or(usize::MAX);
    let params = LaunchParams {
        new,
        out,
        angles: detached(angles.clone()),
        table: integers(&tables.table),
        pool: &pool,
        layout: Layout {
            rows,
            stride: tables.stride,
            kv,
            group,
            chunks: group.div_ceil(heads),
            slots,
            window: window.min(tables.most),
            scale: shape.scale as f32,
            cap: shape.softcap.unwrap_or(1.0) as f32,
        },
        sizes: Sizes { heads, dim, capped: shape.softcap.is_some() },
        sinks: shape.sinks.map(|sinks| detached(sinks.clone().cast(DType::F32))),
    };
    let tasks = rows * kv * params.layout.chunks;
    let parts = parts(&params.out, tasks, window.min(tables.longest));
    let flash =
        flash_decode::Params { table: &params.table, pool: params.pool, layout: &params.layout, sizes: params.sizes };
    if is_exact() {
        assert!(pool.scales.is_none(), "no exact decoding with a cache in 8 bits");
        params.step(Step::Append, rows * kv);
        let out = if flash_decode::takes_in_order(&pool.keys, group, dim) {
            let out = empty(&params.out, [rows, width], params.out.dtype);
            flash.attend_in_order(&params.out, params.sinks.as_ref(), &out);
            Cube::tensor(out)
        } else {
            params.attend_in_order(group)
        };
        return (out, pool.close());
    }
    if let (true, 1, NewTokens::Joined { qkv, bias }) = (on_tensor_cores, parts, &params.new) {
        flash.attend(qkv, bias.as_ref(), &params.angles, params.sinks.as_ref(), &params.out);
    // sinks join where parts are combined: the other kernels have no buffer left for them
    } else if parts > 1 || params.sinks.is_some() {
        params.split_kv(tasks, parts, on_tensor_cores.then_some(&flash));
    } else {
        params.step(Step::Attend, tasks);
    }
    let out = Cube::tensor(params.out);
    (out, pool.close())
}

/// See [`crate::is_exact_on`].
pub(crate) fn is_exact_on(device: &Device, [group, dim]: [usize; 2]) -> bool {
    let kernels = [Operation::DecodeAttention, Operation::LongAttention, Operation::Scores, Operation::Draw];
    let heads = group <= in_order::MAX_GROUP && dim <= in_order::MAX_DIM;
    heads && kernels.into_iter().all(|operation| available(operation, device))
}

/// Returns true if exact decoding takes the kernel of the tensor cores, with heads like these queries' in groups of `group`.
pub(super) fn flash_decodes_in_order(q: &CubeTensor, group: usize) -> bool {
    let [.., dim] = dims::<3>(q);
    flash_decode::takes_in_order(q, group, dim)
}

/// Parts into which the columns of a row are divided, so that cubes fill the GPU.
fn parts(like: &CubeTensor, tasks: usize, longest: usize) -> usize {
    if longest < MIN_SPLIT_TOKENS || tasks == 0 {
        1
    } else {
        cubes_to_fill(like).div_ceil(tasks).clamp(1, longest / PART)
    }
}

impl LaunchParams<'_> {
    /// One launch, with a cube for each task.
    fn step(&self, step: Step, tasks: usize) {
        match &self.new {
            NewTokens::Separate { k, v } => {
                self.step_from::<Separate<F>>(step, tasks, SeparateLaunch::new(buffer(k), buffer(v)));
            }
            NewTokens::Joined { qkv, bias } => {
                // where there is no bias, a buffer has to be bound
                let read = bias.as_ref().unwrap_or(qkv);
                let source = JoinedLaunch::new(buffer(qkv), buffer(read), bias.is_some());
                self.step_from::<Joined<F>>(step, tasks, source);
            }
        }
    }

    fn step_from<S: Source<F>>(&self, step: Step, tasks: usize, source: S::RuntimeArg) {
        match &self.pool.scales {
            None => self.step_of::<FloatPool<F>, S>(step, tasks, source, self.pool.floats()),
            Some(scales) => self.step_of::<Int8Pool, S>(step, tasks, source, self.pool.codes(scales)),
        }
    }

    fn step_of<P: Storage, S: Source<F>>(&self, step: Step, tasks: usize, source: S::RuntimeArg, pool: P::RuntimeArg) {
        let Self { angles, table, out, sizes, .. } = self;
        let grid = Grid::cubes([&self.pool.keys, out], tasks);
        let (layout, dtype) = (self.layout.argument(), elem(out));
        match step {
            Step::Attend => {
                launch!(attend::<P, S>, grid, [angles, table, out], source, pool, tasks, layout, *sizes, dtype);
            }
            Step::Append => {
                launch!(append::<P, S>, grid, [angles, table, out], source, pool, tasks, layout, *sizes, dtype);
            }
        }
    }

    /// Attention of rotated queries to the tokens in the pool, the new ones among them, in the order of sums of
    /// the forward pass of training.
    fn attend_in_order(&self, group: usize) -> Tensor<2> {
        let (q, CubePool { keys, values, .. }) = (&self.out, self.pool);
        let (tasks, Sizes { dim, capped, .. }) = (self.layout.rows * self.layout.kv, self.sizes);
        let out = empty(q, [self.layout.rows, self.layout.kv * group, dim], q.dtype);
        let lse = empty(q, [self.layout.rows, self.layout.kv * group], DType::F32);
        let (grid, layout) = (Grid::cubes([keys, q], tasks), self.layout.argument());
        let sizes = attention::Sizes { dim, capped };
        let own = in_order::rows_of_unit(group);
        launch!(
            in_order::attend_in_order,
            grid,
            [q, keys, values, &self.table, &out, &lse],
            tasks,
            layout,
            own,
            sizes,
            elem(q)
        );
        let [out, _] = match &self.sinks {
            Some(sinks) => attention::join_sinks(out, lse, Cube::tensor(sinks.clone())),
            None => [out, lse],
        };
        let out: Tensor<3> = Cube::tensor(out);
        out.flatten(1, 2)
    }

    /// Three launches, with `parts` cubes for the columns of a row.
    fn split_kv(&self, tasks: usize, parts: usize, flash: Option<&flash_decode::Params<'_>>) {
        self.step(Step::Append, self.layout.rows * self.layout.kv);
        let q = &self.out;
        let parted = empty(q, [tasks * parts * part_elements(self.sizes)], DType::F32);
        match (flash, &self.pool.scales) {
            (Some(flash), _) => flash.attend_parts(q, &parted, parts),
            (None, None) => self.attend_parts::<FloatPool<F>>(&parted, self.pool.floats(), tasks, parts),
            (None, Some(scales)) => self.attend_parts::<Int8Pool>(&parted, self.pool.codes(scales), tasks, parts),
        }
        let grid = Grid::elements([&self.pool.keys, q], q.shape().num_elements());
        // any f32 buffer stands in where there are none
        let (sunk, sinks) = (self.sinks.is_some(), self.sinks.as_ref().unwrap_or(&parted));
        let layout = self.layout.argument();
        launch!(combine_parts, grid, [&parted, &self.table, sinks, q], parts, layout, sunk, self.sizes, elem(q));
    }

    fn attend_parts<P: Storage>(&self, parted: &CubeTensor, pool: P::RuntimeArg, tasks: usize, parts: usize) {
        let q = &self.out;
        let grid = Grid::cubes([&self.pool.keys, q], tasks * parts);
        let layout = self.layout.argument();
        launch!(attend_parts::<P>, grid, [q, &self.table, parted], pool, tasks, parts, layout, self.sizes, elem(q));
    }
}
