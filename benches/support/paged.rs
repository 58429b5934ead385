//! Attention over a pool of blocks, in the type of the run and in 8 bits: of completions of shared prompts, of
//! sequences of their own, and of the last few long ones of a step. A step has layers, and its caches together are
//! larger than a processor's.

use super::{Bench, Case, HEADS, group};
use burn::tensor::{DType, Tensor};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use firebrick::backends::kernels::{
    self, BlockTables, KvPool, Operation, PagedAttentionShape, RotaryAngles, SequenceBlocks, SharedBlocks, SlotMapping,
};
use firebrick::models::random::Stream;
use std::collections::VecDeque;

const BLOCK: usize = 16;

/// Caches that are read by turns.
const LAYERS: usize = 16;

/// Sequences of a step.
#[derive(Clone, Copy)]
struct Step {
    name: &'static str,
    rows: usize,
    /// Rows that share a prompt, and its tokens.
    together: usize,
    prompt: usize,
    /// The fewest and the most tokens of a completion.
    tokens: [usize; 2],
    /// Query heads, key heads, and dimensions.
    heads: [usize; 3],
}

const STEPS: [Step; 5] = [
    Step { name: "8 completions a prompt", rows: 64, together: 8, prompt: 64, tokens: [1, 256], heads: [8, 4, 32] },
    Step {
        name: "8 completions a prompt, 14 heads",
        rows: 64,
        together: 8,
        prompt: 64,
        tokens: [1, 256],
        heads: [14, 2, 64],
    },
    Step { name: "sequences of their own", rows: 64, together: 1, prompt: 0, tokens: [64, 320], heads: [8, 4, 32] },
    Step { name: "1024 tokens", rows: 16, together: 1, prompt: 0, tokens: [1024, 1024], heads: [8, 4, 32] },
    Step { name: "1024 tokens, 14 heads", rows: 16, together: 1, prompt: 0, tokens: [1024, 1024], heads: [14, 2, 64] },
];

impl Step {
    /// Own tokens of each row.
    fn lengths(&self) -> Vec<usize> {
        let mut random = Stream::new(3, 0);
        let [least, most] = self.tokens;
        let length = |_| least + random.below((most - least + 1) as u32) as usize;
        (0..self.rows).map(length).collect()
    }

    /// Tokens that a step reads at least.
    fn read(&self) -> usize {
        self.lengths().iter().sum::<usize>() + self.rows / self.together * self.prompt
    }

    /// Blocks that are neighbours in the pool, or scattered over it.
    fn blocks(&self, scattered: bool) -> (Vec<SharedBlocks>, usize) {
        let lengths = self.lengths();
        let (mut groups, mut next) = (Vec::new(), 0);
        let mut take = |tokens: usize| -> Vec<u32> {
            let count = tokens.div_ceil(BLOCK) as u32;
            next += count;
            (next - count..next).collect()
        };
        for rows in (0..self.rows).step_by(self.together) {
            groups.push(SharedBlocks {
                first: 0,
                blocks: take(self.prompt),
                members: (rows..rows + self.together)
                    .map(|row| SequenceBlocks { row, blocks: take(lengths[row]), tokens: lengths[row] })
                    .collect(),
            });
        }
        if scattered {
            // a shuffle of Fisher and Yates
            let mut random = Stream::new(4, 0);
            let mut place: Vec<u32> = (0..next).collect();
            for i in (1..next).rev() {
                place.swap(i as usize, random.below(i + 1) as usize);
            }
            for group in &mut groups {
                let own = group.members.iter_mut().flat_map(|own| &mut own.blocks);
                for block in group.blocks.iter_mut().chain(own) {
                    *block = place[*block as usize];
                }
            }
        }
        (groups, next as usize)
    }
}

impl Bench {
    /// Attention over paged caches.
    pub(super) fn paged_attention(&self, c: &mut Criterion) {
        if !kernels::available(Operation::DecodeAttention, &self.device) {
            return;
        }
        let mut group = group(c, "paged_attention");
        let [kv, heads, dim] = HEADS;
        let of_device = |name, [rows, tokens]: [usize; 2]| Step {
            name,
            rows,
            together: 1,
            prompt: 0,
            tokens: [tokens / 4, tokens],
            heads: [kv * heads, kv, dim],
        };
        let more = [of_device("many sequences", self.sizes.cache), of_device("few long sequences", self.sizes.last)];
        for step in STEPS.into_iter().chain(more) {
            let [heads, kv, dim] = step.heads;
            let qkv = [heads, kv, kv].map(|heads| self.normal([step.rows, heads * dim]));
            let angles = Tensor::<3>::ones([step.rows, 1, dim / 2], (&self.device, DType::F32)) * 0.1;
            let angles = RotaryAngles::new(&angles, &angles);
            for (place, scattered) in [("", false), (", scattered", true)] {
                for (codes, int8) in [("", false), (" in 8 bits", true)] {
                    let name = format!("{}{place}{codes}", step.name);
                    self.paged(&mut group, &name, step, [scattered, int8], &qkv, &angles);
                }
            }
        }
    }

    fn paged(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        name: &str,
        step: Step,
        [scattered, int8]: [bool; 2],
        qkv: &[Tensor<2>; 3],
        angles: &RotaryAngles,
    ) {
        let [_, kv, dim] = step.heads;
        let (sequences, blocks) = step.blocks(scattered);
        let tables = BlockTables::new(sequences, step.rows, &self.device);
        let all = blocks * BLOCK;
        let slots = SlotMapping::new((0..all as u32).collect(), &self.device);
        let numbers = || self.normal([all, kv * dim]).reshape([all, kv, dim]);
        let pools: VecDeque<_> = (0..LAYERS)
            .map(|_| {
                let pool = if int8 {
                    KvPool::int8(kv, blocks, dim, &self.device)
                } else {
                    KvPool::float(kv, blocks, dim, self.dtype, &self.device)
                };
                kernels::write_kv(pool, [&numbers(), &numbers()], &slots)
            })
            .collect();
        let shape = PagedAttentionShape {
            tables: &tables,
            angles,
            window: None,
            scale: (dim as f64).sqrt().recip(),
            softcap: None,
            sinks: None,
        };
        let read = step.read() * kv;
        let bytes = if int8 { (read * (2 * dim + 4)) as f64 } else { 2.0 * self.bytes([read, dim]) };
        let case = Case { kernel: name, bytes };
        self.measure(group, &case, pools, |mut pools| {
            let pool = pools.pop_front()?;
            let (_, pool) = kernels::paged_attention(qkv.clone(), pool, &shape);
            pools.push_back(pool);
            Some(pools)
        });
    }
}
