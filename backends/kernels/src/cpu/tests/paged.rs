//! Attention over a pool, against its formula in f64.

use super::kv_pool::{addresses, contents};
use super::numbers;
use crate::{
    BlockTables, KvPool, PagedAttentionShape, RotaryAngles, SequenceBlocks, SharedBlocks, SlotMapping, gather_kv,
    paged_attention, write_kv,
};
use burn::tensor::{DType, Device, Tensor};
use firebrick_spec::BLOCK_SIZE;

/// A pool's type: a float type, or 8 bits for queries in a float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Float(DType),
    Int8(DType),
}

impl Type {
    fn queries(self) -> DType {
        match self {
            Self::Float(dtype) | Self::Int8(dtype) => dtype,
        }
    }
}

/// Sequences: blocks of each prefix, and tokens of its members after it.
type Groups = &'static [(usize, &'static [usize])];

#[derive(Clone, Copy, Debug)]
struct Case {
    groups: Groups,
    /// Query heads, key heads, and numbers of a head.
    heads: [usize; 3],
    window: Option<usize>,
    softcap: Option<f64>,
    sinks: bool,
}

/// Inputs of a step: block tables, a pool of numbers, `q`, `k`, `v`, and the rotary angles' cosines and sines.
struct Inputs {
    groups: Vec<SharedBlocks>,
    tables: BlockTables,
    pool: KvPool,
    qkv: [Tensor<2>; 3],
    angles: RotaryAngles,
    sinks: Option<Tensor<2>>,
}

const SCALE: f64 = 0.3;

/// Blocks of a pool: a prime number, so that every step is a permutation.
const BLOCKS: usize = 211;

/// Tables whose neighbouring blocks are `step` apart in the pool. The first two rows are in no sequence.
fn tables(groups: Groups, step: usize) -> (Vec<SharedBlocks>, usize) {
    let mut next = 0;
    let mut blocks = |count: usize| -> Vec<u32> {
        let ids = (next..next + count).map(|i| (i * step + 5) % BLOCKS);
        next += count;
        ids.map(|id| id as u32).collect()
    };
    let count: usize = groups.iter().map(|(_, member)| member.len()).sum();
    let mut row = count + 2;
    let groups = groups.iter().map(|&(prefix, members)| SharedBlocks {
        first: 0,
        blocks: blocks(prefix),
        members: members
            .iter()
            .map(|&tokens| {
                row -= 1;
                SequenceBlocks { row, blocks: blocks(tokens.div_ceil(BLOCK_SIZE)), tokens }
            })
            .collect(),
    });
    (groups.collect(), count + 2)
}

/// Inputs of a case. A token's keys and values do not depend on where its block is.
fn inputs(case: &Case, dtype: Type, step: usize) -> Inputs {
    let device = Device::flex();
    let [heads, kv, dim] = case.heads;
    let (groups, rows) = tables(case.groups, step);
    let pool = match dtype {
        Type::Float(dtype) => KvPool::float(kv, BLOCKS, dim, dtype, &device),
        Type::Int8(_) => KvPool::int8(kv, BLOCKS, dim, &device),
    };
    let dtype = dtype.queries();
    let blocks = groups.iter().flat_map(|group| {
        let member = group.members.iter().flat_map(|member| &member.blocks);
        group.blocks.iter().chain(member)
    });
    let slots = blocks.flat_map(|&b| b * BLOCK_SIZE as u32..(b + 1) * BLOCK_SIZE as u32);
    let slots = SlotMapping::new(slots.collect(), &device);
    let [k, v] = [41, 42].map(|salt| numbers([slots.len(), kv, dim], salt).cast(dtype) * 2.0);
    let angle = numbers([rows, 1, dim / 2], 7) * 3.0;
    Inputs {
        tables: BlockTables::new(groups.clone(), rows, &device),
        groups,
        pool: write_kv(pool, [&k, &v], &slots),
        qkv: [heads, kv, kv].map(|n| numbers([rows, n * dim], 16 + n as u32).cast(dtype) * 2.0),
        angles: RotaryAngles::new(&angle.clone().cos().cast(dtype), &angle.sin().cast(dtype)),
        sinks: case.sinks.then(|| numbers([1, heads], 19).cast(dtype) * 3.0),
    }
}

impl Inputs {
    fn run(&self, case: &Case, pool: KvPool) -> (Tensor<2>, KvPool) {
        let shape = PagedAttentionShape {
            tables: &self.tables,
            angles: &self.angles,
            window: case.window,
            scale: SCALE,
            softcap: case.softcap,
            sinks: self.sinks.as_ref(),
        };
        paged_attention(self.qkv.clone(), pool, &shape)
    }
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().into_data().iter::<f64>().collect()
}

fn slots(prefix: &[u32], member: &SequenceBlocks) -> Vec<u32> {
    let tokens = prefix.len() * BLOCK_SIZE + member.tokens;
    let blocks = prefix.iter().chain(&member.blocks);
    let slots = blocks.flat_map(|&b| b * BLOCK_SIZE as u32..(b + 1) * BLOCK_SIZE as u32);
    slots.take(tokens).collect()
}

/// A row's heads of `dim` numbers, rotated by its angles.
fn rotated(x: &[f64], inputs: &Inputs, row: usize, dim: usize) -> Vec<f64> {
    let angles = inputs.angles.on_cpu.as_ref().expect("of the CPU");
    let [cos, sin] = angles.each_ref().map(values);
    let angles = row * dim / 2;
    let mut out = x.to_vec();
    for head in out.chunks_mut(dim) {
        for i in 0..dim / 2 {
            let (a, b) = (head[i], head[i + dim / 2]);
            let (cos, sin) = (cos[angles + i], sin[angles + i]);
            head[i] = a * cos - b * sin;
            head[i + dim / 2] = b * cos + a * sin;
        }
    }
    out
}

/// Attention of one query over keys and values, `[tokens, dim]`, the last of them the query's own, and of a sink.
fn attention(case: &Case, q: &[f64], keys: &[f64], values: &[f64], sink: Option<f64>) -> Vec<f64> {
    let dim = q.len();
    let first = match case.window {
        Some(window) => (keys.len() / dim).saturating_sub(window),
        None => 0,
    };
    let scores = keys.chunks(dim).skip(first).map(|key| {
        let score: f64 = key.iter().zip(q).map(|(a, b)| a * b).sum::<f64>() * SCALE;
        case.softcap.map_or(score, |cap| (score / cap).tanh() * cap)
    });
    let scores: Vec<f64> = scores.collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
    let sink = sink.map_or(0.0, |sink| (sink - most).exp());
    let total: f64 = weights.iter().sum::<f64>() + sink;
    let mut out = vec![0.0; dim];
    for (value, weight) in values.chunks(dim).skip(first).zip(weights) {
        for (out, x) in out.iter_mut().zip(value) {
            *out += weight / total * x;
        }
    }
    out
}

/// Fails where numbers are more than `bound` of the expected ones' size apart, in relative L2.
#[track_caller]
fn assert_close(what: &str, actual: &[f64], expected: &[f64], bound: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut actual.iter().zip(expected).map(|(a, b)| a - b));
    let size = norm(&mut expected.iter().copied());
    assert!(apart <= bound * size, "{what}: {:e} apart", apart / size);
}

const CASES: [Case; 9] = {
    const fn case(groups: Groups, heads: [usize; 3], window: Option<usize>, softcap: Option<f64>) -> Case {
        Case { groups, heads, window, softcap, sinks: false }
    }
    [
        case(&[(0, &[1])], [1, 1, 4], None, None),
        case(&[(0, &[16, 17]), (2, &[5])], [4, 2, 8], None, None),
        // more members than a task has, and prefixes of one member and of none
        case(
            &[(4, &[70, 1, 33, 16, 90, 5, 8, 20, 64, 3, 48]), (1, &[40]), (3, &[]), (0, &[200])],
            [8, 4, 32],
            None,
            None,
        ),
        case(&[(2, &[7, 40, 1]), (0, &[100])], [6, 2, 36], Some(20), None),
        // windows that begin in a block of a prefix, for some members, and in their own
        case(&[(3, &[2, 9, 60, 30])], [4, 1, 16], Some(41), Some(2.0)),
        case(&[(1, &[50, 35]), (0, &[3])], [3, 3, 12], Some(1), None),
        case(&[(2, &[30, 8]), (0, &[77])], [14, 2, 64], None, Some(1.5)),
        case(&[(5, &[100, 31, 16])], [5, 1, 48], Some(90), None),
        case(&[(2, &[8, 90]), (0, &[300, 17])], [12, 2, 128], None, None),
    ]
};

#[test]
fn attention_over_a_pool_is_its_formula() {
    let types = [
        (Type::Float(DType::F32), 5e-6),
        (Type::Float(DType::F64), 1e-13),
        (Type::Int8(DType::F32), 5e-6),
        (Type::Int8(DType::F64), 1e-13),
    ];
    let with_sinks = CASES.map(|case| Case { sinks: true, ..case });
    for (case, (dtype, bound)) in CASES.iter().chain(&with_sinks).flat_map(|case| types.map(|dtype| (case, dtype))) {
        let inputs = inputs(case, dtype, 60);
        let [heads, kv, dim] = case.heads;
        let (actual, after) = inputs.run(case, inputs.pool.clone());
        let actual = values(&actual);
        let [q, k, v] = inputs.qkv.each_ref().map(values);
        let sinks = inputs.sinks.as_ref().map(values);
        let mut written = Vec::new();
        for group in &inputs.groups {
            for member in &group.members {
                let what = format!("{case:?}, {dtype:?}, row {}", member.row);
                let slots = slots(&group.blocks, member);
                let last = slots[slots.len() - 1];
                written.push(last);
                let of = |rows: &[f64], n: usize| rows[member.row * n..(member.row + 1) * n].to_vec();
                let new = [rotated(&of(&k, kv * dim), &inputs, member.row, dim), of(&v, kv * dim)];
                let mapping = |slots: &[u32]| SlotMapping::new(slots.to_vec(), &Device::flex());
                let stored = gather_kv(&after, &mapping(&[last]), DType::F64);
                for (stored, new) in stored.iter().map(values).zip(&new) {
                    match dtype {
                        Type::Float(_) => assert_close(&what, &stored, new, bound),
                        Type::Int8(_) => assert_rounded(&what, &stored, new, dim),
                    }
                }
                // as they are stored, the new ones too
                let read = gather_kv(&after, &mapping(&slots), DType::F64);
                let [keys, values] = read.each_ref().map(values);
                let q = rotated(&of(&q, heads * dim), &inputs, member.row, dim);
                for head in 0..heads {
                    let tokens = slots.len() * dim;
                    let place = head / (heads / kv) * tokens..(head / (heads / kv) + 1) * tokens;
                    let q = &q[head * dim..][..dim];
                    let sink = sinks.as_ref().map(|sinks| sinks[head]);
                    let (keys, values) = (&keys[place.clone()], &values[place]);
                    let expected = attention(case, q, keys, values, sink);
                    let actual = &actual[(member.row * heads + head) * dim..][..dim];
                    assert_close(&what, actual, &expected, bound);
                }
            }
        }
        assert!(actual[..2 * heads * dim].iter().all(|&x| x == 0.0), "rows in no sequence");
        for (before, after) in contents(&inputs.pool).iter().zip(contents(&after)) {
            let rows = before.chunks(dim).zip(after.chunks(dim)).enumerate();
            for (i, (before, after)) in rows {
                let slot = (i % (BLOCKS * BLOCK_SIZE)) as u32;
                assert!(before == after || written.contains(&slot), "slot {slot} changed");
            }
        }
    }
}

/// Fails where numbers are further from others than rounding to 8 bits takes them.
#[track_caller]
fn assert_rounded(what: &str, actual: &[f64], exact: &[f64], dim: usize) {
    for (actual, exact) in actual.chunks(dim).zip(exact.chunks(dim)) {
        let most = exact.iter().fold(0.0_f64, |a, b| a.max(b.abs()));
        // half a scale, which is rounded up by less than a 128th
        let bound = most / 127.0 * (1.0 + 1.0 / 128.0) * 0.5001;
        for (actual, exact) in actual.iter().zip(exact) {
            assert!((actual - exact).abs() <= bound, "{what}: {actual} of {exact}");
        }
    }
}

#[test]
fn attention_depends_neither_on_where_blocks_are_nor_on_threads() {
    for (case, dtype) in
        CASES.iter().flat_map(|case| [Type::Float(DType::F32), Type::Int8(DType::F32)].map(|dtype| (case, dtype)))
    {
        let alone = |threads: usize, step: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().expect("a pool of threads");
            let inputs = inputs(case, dtype, step);
            values(&pool.install(|| inputs.run(case, inputs.pool.clone())).0)
        };
        let first = alone(1, 1);
        assert_eq!(alone(3, 1), first, "threads, {case:?}, {dtype:?}");
        assert_eq!(alone(1, 60), first, "blocks, {case:?}, {dtype:?}");
        assert_eq!(alone(2, BLOCKS - 1), first, "blocks, {case:?}, {dtype:?}");
    }
}

#[test]
fn attention_writes_in_place_unless_the_pool_is_shared() {
    let case = CASES[2];
    for dtype in [Type::Float(DType::F32), Type::Int8(DType::F32)] {
        let mut inputs = inputs(&case, dtype, 60);
        let before = contents(&inputs.pool);
        let (_, after) = inputs.run(&case, inputs.pool.clone());
        assert_eq!(contents(&inputs.pool), before);
        assert_ne!(contents(&after), before);
        inputs.pool = after;
        let pool = std::mem::replace(&mut inputs.pool, KvPool::int8(1, 1, 4, &Device::flex()));
        let place = addresses(&pool);
        let (_, pool) = inputs.run(&case, pool);
        assert_eq!(addresses(&pool), place, "{dtype:?}");
    }
}

#[test]
fn a_pool_in_half_precision_has_no_kernel() {
    let case = CASES[1];
    for dtype in [DType::BF16, DType::F16] {
        let inputs = inputs(&case, Type::Float(dtype), 1);
        let shape = PagedAttentionShape {
            tables: &inputs.tables,
            angles: &inputs.angles,
            window: None,
            scale: SCALE,
            softcap: None,
            sinks: None,
        };
        assert!(!crate::cpu::paged::takes(&inputs.qkv, &inputs.pool, &shape), "{dtype:?}");
    }
}
