//! Attention of one new token a sequence over the blocks of its sequence.

use super::{
    BLOCK, Contents, Heads, Kind, assert_near, cases, contents, numbers, on_gpus, pool, precisions, rounded, stored,
    values,
};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{
    self, BlockTables, JoinedHeads, KvPool, PagedAttentionShape, RotaryAngles, SequenceBlocks, SharedBlocks,
    SlotMapping,
};
use firebrick_backends::memory::read;

on_gpus!(
    decoding_writes_the_new_token_and_reads_the_blocks_of_its_sequence_alone,
    a_cube_has_some_of_many_query_heads_and_a_unit_several_of_many_dimensions,
    the_columns_of_a_few_long_rows_are_divided_among_cubes,
    joined_rows_with_biases_are_attended_to_as_separate_ones,
    a_pool_that_nobody_else_holds_is_written_where_it_is,
    sinks_join_the_softmax_of_rows_short_and_long,
);

/// What the step has of every row, as the device stores it and as numbers, and where the rows' tokens are.
struct Step {
    kind: Kind,
    heads: Heads,
    tensors: [Tensor<2>; 3],
    numbers: [Vec<f64>; 3],
    angles: RotaryAngles,
    turns: [Vec<f64>; 2],
    pool: KvPool,
    /// Tokens of each row, 0 for one in no sequence.
    tokens: Vec<usize>,
    shared: Vec<SharedBlocks>,
    /// Blocks of each row.
    blocks: Vec<Vec<u32>>,
    dtype: DType,
    device: Device,
    /// A number for each query head, as the device has it and as numbers.
    sinks: Option<(Tensor<2>, Vec<f64>)>,
}

impl Step {
    fn new(kind: Kind, heads: Heads, tokens: Vec<usize>, dtype: DType, device: &Device) -> Self {
        let Heads { kv, group, dim } = heads;
        let rows = tokens.len();
        let own = |heads: usize, salt| {
            let n = rows * heads * dim;
            stored(numbers(n, salt, 1.5), [rows, heads * dim], dtype, device)
        };
        let ((q, qs), (k, ks), (v, vs)) = (own(kv * group, 31), own(kv, 32), own(kv, 33));
        let angles = numbers(rows * dim / 2, 34, 3.0);
        let turn = |f: fn(f64) -> f64| {
            let turned = angles.iter().map(|&a| f(a)).collect();
            stored(turned, [rows, 1, dim / 2], DType::F32, device)
        };
        let ((cos, cosines), (sin, sines)) = (turn(f64::cos), turn(f64::sin));
        let (shared, blocks, pool_blocks) = scattered(&tokens);
        Self {
            kind,
            heads,
            tensors: [q, k, v],
            numbers: [qs, ks, vs],
            angles: RotaryAngles::new(&cos, &sin),
            turns: [cosines, sines],
            pool: pool(kind, heads, pool_blocks, dtype, device),
            tokens,
            shared,
            blocks,
            dtype,
            device: device.clone(),
            sinks: None,
        }
    }

    fn with_sinks(mut self) -> Self {
        let width = self.heads.kv * self.heads.group;
        let own = numbers(width, 35, 3.0);
        self.sinks = Some(stored(own, [1, width], self.dtype, &self.device));
        self
    }

    /// A head of a row, turned and rounded as it is stored.
    fn turned(&self, x: &[f64], row: usize) -> Vec<f64> {
        let half = self.heads.dim / 2;
        let mut turned = vec![0.0; 2 * half];
        for i in 0..half {
            let [c, s] = self.turns.each_ref().map(|t| t[row * half + i]);
            turned[i] = x[i] * c - x[i + half] * s;
            turned[i + half] = x[i + half] * c + x[i] * s;
        }
        stored(turned, [2 * half], self.dtype, &self.device).1
    }

    fn slot(&self, row: usize, token: usize) -> usize {
        self.blocks[row][token / BLOCK] as usize * BLOCK + token % BLOCK
    }

    /// What the pool has of a token.
    fn at<'a>(&self, x: &'a [f64], head: usize, slot: usize) -> &'a [f64] {
        let dim = self.heads.dim;
        &x[(head * self.pool.slots() + slot) * dim..][..dim]
    }

    /// The new keys and values of a head of a row, as they are stored.
    fn new_token(&self, row: usize, head: usize) -> [Vec<f64>; 2] {
        let Heads { kv, dim, .. } = self.heads;
        let own = |x: &[f64]| x[(row * kv + head) * dim..][..dim].to_vec();
        let [_, ks, vs] = &self.numbers;
        let new = [self.turned(&own(ks), row), own(vs)];
        match self.kind {
            Kind::Float => new,
            Kind::Int8 => new.map(|x| rounded(&x)),
        }
    }

    /// Mixed values, given the pool with the new tokens.
    fn mixed(&self, [keys, values]: &Contents, window: Option<usize>, scale: f64, softcap: Option<f64>) -> Vec<f64> {
        let Heads { kv, group, dim } = self.heads;
        let mut mixed = vec![0.0; self.tokens.len() * kv * group * dim];
        for (row, &tokens) in self.tokens.iter().enumerate() {
            let first = tokens - window.unwrap_or(tokens).min(tokens);
            for place in row * kv * group..(row + 1) * kv * group {
                let head = place / group % kv;
                let q = self.turned(&self.numbers[0][place * dim..][..dim], row);
                let score = |token: usize| {
                    let key = self.at(keys, head, self.slot(row, token));
                    let s = q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * scale;
                    softcap.map_or(s, |cap| cap * (s / cap).tanh())
                };
                let weights: Vec<f64> = (first..tokens).map(|token| score(token).exp()).collect();
                let sinks = self.sinks.as_ref();
                let sink = sinks.map_or(0.0, |(_, own)| own[place % (kv * group)].exp());
                let total: f64 = weights.iter().sum::<f64>() + sink;
                for (token, w) in (first..tokens).zip(weights) {
                    let value = self.at(values, head, self.slot(row, token));
                    for (d, v) in value.iter().enumerate() {
                        mixed[place * dim + d] += w / total * v;
                    }
                }
            }
        }
        mixed
    }
}

/// Blocks of rows with so many tokens, out of order: the third and the fourth row share what they can. Also the blocks
/// of a pool that has more than those.
fn scattered(tokens: &[usize]) -> (Vec<SharedBlocks>, Vec<Vec<u32>>, usize) {
    let most: usize = tokens.iter().map(|t| t.div_ceil(BLOCK)).sum();
    let count = (most + 2).next_power_of_two();
    // an odd factor permutes the numbers below a power of two
    let mut free = (0..count).map(|i| ((i * 5 + 3) % count) as u32);
    let mut take = |n: usize| -> Vec<u32> { free.by_ref().take(n).collect() };
    let mut blocks = vec![Vec::new(); tokens.len()];
    let mut shared = Vec::new();
    let mut row = 0;
    while row < tokens.len() {
        let rows = if row == 2 && tokens.len() > 3 { 2 } else { 1 };
        let group = row..row + rows;
        row += rows;
        let shortest = tokens[group.clone()].iter().min().copied().unwrap_or(0);
        if shortest == 0 {
            continue;
        }
        let full = if rows > 1 { (shortest - 1) / BLOCK } else { 0 };
        let prefix = take(full);
        let members = group.map(|row| {
            let own = take(tokens[row].div_ceil(BLOCK) - full);
            blocks[row] = [prefix.clone(), own.clone()].concat();
            SequenceBlocks { row, blocks: own, tokens: tokens[row] - full * BLOCK }
        });
        let members = members.collect();
        shared.push(SharedBlocks { first: 0, blocks: prefix, members });
    }
    (shared, blocks, count)
}

/// Tokens of rows: the first is in no sequence, the second has its new token alone, the last has all that there are.
fn lengths(rows: usize, longest: usize) -> Vec<usize> {
    (0..rows)
        .map(|row| match row {
            0 if rows > 1 => 0,
            row if row + 1 == rows => longest,
            1 => 1,
            row => (row * 37) % longest + 1,
        })
        .collect()
}

fn hold(
    kind: Kind,
    heads: Heads,
    tokens: &[usize],
    window: Option<usize>,
    softcap: Option<f64>,
    (dtype, tolerance): (DType, f64),
    device: &Device,
) {
    let step = Step::new(kind, heads, tokens.to_vec(), dtype, device);
    hold_step(&step, window, softcap, tolerance);
}

fn hold_step(step: &Step, window: Option<usize>, softcap: Option<f64>, tolerance: f64) {
    let &Step { kind, heads, dtype, ref tokens, ref device, .. } = step;
    let tables = BlockTables::new(step.shared.clone(), tokens.len(), device);
    let shape = PagedAttentionShape {
        tables: &tables,
        angles: &step.angles,
        window,
        scale: 0.4,
        softcap,
        sinks: step.sinks.as_ref().map(|(own, _)| own),
    };
    let held = step.pool.clone();
    let before = contents(&held);
    let (mixed, pool) = kernels::paged_attention(step.tensors.clone(), held, &shape);
    let after = contents(&pool);
    let what = format!("{kind:?}, {heads:?} in {dtype:?}, window {window:?}, cap {softcap:?}");
    // the new tokens, and all others as they were
    let mut expected = before.clone();
    let (mut found_new, mut expected_new) = (Vec::new(), Vec::new());
    for (row, &tokens) in tokens.iter().enumerate().filter(|(_, t)| **t > 0) {
        for head in 0..heads.kv {
            let slot = step.slot(row, tokens - 1);
            for (i, new) in step.new_token(row, head).into_iter().enumerate() {
                let found = step.at(&after[i], head, slot);
                found_new.extend_from_slice(found);
                expected_new.extend(new);
                let at = (head * step.pool.slots() + slot) * heads.dim;
                expected[i][at..][..heads.dim].copy_from_slice(found);
            }
        }
    }
    // a code may be the next one where the number is halfway between two
    let rounding = match kind {
        Kind::Float => tolerance,
        Kind::Int8 => tolerance.max(2e-3),
    };
    let label = format!("{what}: the new tokens");
    assert_near(&label, &found_new, &expected_new, rounding);
    assert_eq!(after, expected, "{what}: other slots");
    let expected = step.mixed(&after, window, 0.4, softcap);
    assert_near(&what, &values(mixed), &expected, tolerance);
    let label = "queries that others hold";
    assert_near(label, &values(step.tensors[0].clone()), &step.numbers[0], 0.0);
    assert_eq!(contents(&step.pool), before, "a pool that others hold");
}

fn decoding_writes_the_new_token_and_reads_the_blocks_of_its_sequence_alone(device: &Device) {
    for precision in precisions(device) {
        for (kind, group, dim, softcap) in [
            (Kind::Float, 1, 34, None),
            (Kind::Float, 3, 10, Some(2.0)),
            (Kind::Int8, 1, 36, Some(2.0)),
            (Kind::Int8, 3, 12, None),
        ] {
            let sizes = (1_usize..6, 1_usize..4, 1_usize..150, 0_usize..100);
            cases(sizes, |(rows, kv, longest, window)| {
                let heads = Heads { kv, group, dim };
                let window = Some(window).filter(|&w| w > 0);
                let tokens = lengths(rows, longest);
                hold(kind, heads, &tokens, window, softcap, precision, device);
            });
        }
    }
}

fn a_cube_has_some_of_many_query_heads_and_a_unit_several_of_many_dimensions(device: &Device) {
    for (kind, group, dim) in
        [(Kind::Float, 11, 6), (Kind::Float, 5, 300), (Kind::Float, 7, 128), (Kind::Int8, 11, 8), (Kind::Int8, 5, 300)]
    {
        let heads = Heads { kv: 2, group, dim };
        for window in [None, Some(70)] {
            let precision = (DType::F32, 1e-5);
            hold(kind, heads, &[0, 1, 211], window, None, precision, device);
        }
    }
}

fn the_columns_of_a_few_long_rows_are_divided_among_cubes(device: &Device) {
    for precision in precisions(device) {
        for (kind, group, dim) in [(Kind::Float, 2, 128), (Kind::Float, 9, 34), (Kind::Int8, 9, 36)] {
            let heads = Heads { kv: 2, group, dim };
            for tokens in [vec![1024], vec![1025], vec![0, 700, 1500]] {
                hold(kind, heads, &tokens, None, None, precision, device);
                hold(kind, heads, &tokens, Some(1111), Some(2.0), precision, device);
            }
        }
    }
}

fn sinks_join_the_softmax_of_rows_short_and_long(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for (kind, group, dim) in [(Kind::Float, 3, 34), (Kind::Int8, 8, 64)] {
            let heads = Heads { kv: 2, group, dim };
            for tokens in [vec![0, 1, 70, 33], vec![0, 700, 1500]] {
                let step = Step::new(kind, heads, tokens, dtype, device).with_sinks();
                hold_step(&step, None, None, tolerance);
                hold_step(&step, Some(40), Some(2.0), tolerance);
            }
        }
    }
}

fn hold_joined(step: &Step, biased: bool, (window, softcap): (Option<usize>, Option<f64>), tolerance: f64) {
    let &Step { kind, heads, dtype, ref tokens, ref device, .. } = step;
    let Heads { kv, group, dim } = heads;
    let bias = |salt, width: usize| {
        let (bias, _) = stored(numbers(width, salt, 1.0), [1, width], dtype, device);
        bias
    };
    let biases = [bias(51, kv * group * dim), bias(52, kv * dim), bias(53, kv * dim)];
    let mut separate = step.tensors.clone();
    if biased {
        for (tensor, bias) in separate.iter_mut().zip(&biases) {
            *tensor = tensor.clone() + bias.clone();
        }
    }
    let tables = BlockTables::new(step.shared.clone(), tokens.len(), device);
    let shape = PagedAttentionShape {
        tables: &tables,
        angles: &step.angles,
        window,
        scale: 0.4,
        softcap,
        sinks: step.sinks.as_ref().map(|(sinks, _)| sinks),
    };
    let (expected, expected_pool) = kernels::paged_attention(separate, step.pool.clone(), &shape);
    let qkv = Tensor::cat(step.tensors.to_vec(), 1);
    let bias = biased.then(|| Tensor::cat(biases.to_vec(), 1));
    let joined = JoinedHeads { queries: kv * group, keys: kv, dim };
    let (found, pool) = kernels::paged_attention_joined(&qkv, bias.as_ref(), joined, step.pool.clone(), &shape);
    let what = format!("{kind:?}, {heads:?} in {dtype:?}, biased {biased}, window {window:?}, cap {softcap:?}");
    assert_near(&what, &values(found), &values(expected), tolerance);
    // a code may be the next one where the number is halfway between two
    let rounding = match kind {
        Kind::Float => tolerance,
        Kind::Int8 => tolerance.max(2e-3),
    };
    for (found, expected) in contents(&pool).iter().zip(&contents(&expected_pool)) {
        assert_near(&what, found, expected, rounding);
    }
}

fn joined_rows_with_biases_are_attended_to_as_separate_ones(device: &Device) {
    for precision in precisions(device) {
        for (kind, group, dim) in [(Kind::Float, 3, 10), (Kind::Float, 9, 34), (Kind::Int8, 3, 12)] {
            let heads = Heads { kv: 2, group, dim };
            // whole rows, and rows that are divided among cubes, with holes among them
            for tokens in [vec![0, 1, 37, 40, 100], vec![0, 700, 1500]] {
                for biased in [false, true] {
                    let step = Step::new(kind, heads, tokens.clone(), precision.0, device);
                    hold_joined(&step, biased, (None, None), precision.1);
                }
            }
        }
    }
    // heads of which tensor cores make matrices, in half precision
    for precision in precisions(device).into_iter().filter(|(dtype, _)| *dtype != DType::F32) {
        for (group, dim, window, softcap) in
            [(7, 64, None, None), (2, 96, Some(21), Some(2.0)), (16, 128, Some(300), None), (4, 256, None, Some(1.5))]
        {
            let heads = Heads { kv: 2, group, dim };
            for (tokens, biased) in [(vec![0, 1, 16, 37, 100], true), (vec![0, 700, 1500], false)] {
                let step = Step::new(Kind::Float, heads, tokens, precision.0, device);
                hold_joined(&step, biased, (window, softcap), precision.1);
                hold_joined(&step.with_sinks(), biased, (window, softcap), precision.1);
            }
        }
    }
}

/// Bytes by which the backend's pools grow while a few tokens are decoded, written and copied, and those of the cache.
fn grown(kind: Kind, device: &Device) -> [u64; 2] {
    let heads = Heads { kv: 2, group: 2, dim: 64 };
    let step = Step::new(kind, heads, vec![4000, 30, 2000], DType::F32, device);
    let tables = BlockTables::new(step.shared.clone(), 3, device);
    let shape = PagedAttentionShape {
        tables: &tables,
        angles: &step.angles,
        window: Some(500),
        scale: 1.0,
        softcap: None,
        sinks: None,
    };
    let mut pool = step.pool;
    let numbers = pool.slots() * heads.kv * heads.dim * 2;
    let bytes = match kind {
        Kind::Float => numbers * 4,
        Kind::Int8 => numbers,
    };
    let new = Tensor::ones([1, heads.kv, heads.dim], (device, DType::F32));
    let slots = SlotMapping::new(vec![17], device);
    let before = read(device).reserved_bytes;
    for _ in 0..3 {
        let qkv = step.tensors.clone();
        pool = kernels::paged_attention(qkv, pool, &shape).1;
        pool = kernels::write_kv(pool, [&new, &new], &slots);
        pool = kernels::copy_blocks(pool, &[(1, 2)]);
    }
    [read(device).reserved_bytes - before, bytes as u64]
}

fn a_pool_that_nobody_else_holds_is_written_where_it_is(device: &Device) {
    for kind in [Kind::Float, Kind::Int8] {
        // a thread has pools of its own
        let grown = std::thread::scope(|scope| scope.spawn(|| grown(kind, device)).join());
        let [grown, cache] = grown.expect("a thread that ends well");
        assert!(grown < cache / 2, "{kind:?}: {grown} bytes of {cache}");
    }
}
