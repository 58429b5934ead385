//! Attention over a pool of blocks, in the type of the run and in 8 bits, and over columns: of completions of shared prompts, and of
//! sequences of their own. A step has layers, and its caches together are larger than a processor's.

use super::{Bench, Case, group};
use burn::tensor::{DType, Tensor};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use firebrick::backends::kernels::{
    self, BlockTables, DecodeShape, Decoded, Kin, KvPool, Operation, PagedAttentionShape,
    SequenceBlocks, SharedBlocks, SlotMapping,
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
    Step {
        name: "8 completions a prompt",
        rows: 64,
        together: 8,
        prompt: 64,
        tokens: [1, 256],
        heads: [8, 4, 32],
    },
    Step {
        name: "8 completions a prompt, 14 heads",
        rows: 64,
        together: 8,
        prompt: 64,
        tokens: [1, 256],
        heads: [14, 2, 64],
    },
    Step {
        name: "sequences of their own",
        rows: 64,
        together: 1,
        prompt: 0,
        tokens: [64, 320],
        heads: [8, 4, 32],
    },
    Step {
        name: "1024 tokens",
        rows: 16,
        together: 1,
        prompt: 0,
        tokens: [1024, 1024],
        heads: [8, 4, 32],
    },
    Step {
        name: "1024 tokens, 14 heads",
        rows: 16,
        together: 1,
        prompt: 0,
        tokens: [1024, 1024],
        heads: [14, 2, 64],
    },
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
                blocks: take(self.prompt),
                members: (rows..rows + self.together)
                    .map(|row| SequenceBlocks {
                        row,
                        blocks: take(lengths[row]),
                        tokens: lengths[row],
                    })
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
    /// Attention over paged caches, and over columns.
    pub(super) fn paged_attention(&self, c: &mut Criterion) {
        if !kernels::available(Operation::DecodeAttention, &self.device) {
            return;
        }
        let mut group = group(c, "paged_attention");
        for step in STEPS {
            let [heads, kv, dim] = step.heads;
            let qkv = [heads, kv, kv].map(|heads| self.normal([step.rows, heads * dim]));
            let angles =
                Tensor::<3>::ones([step.rows, 1, dim / 2], (&self.device, DType::F32)) * 0.1;
            self.columns(&mut group, step, &qkv, &angles);
            for (place, scattered) in [("", false), (", scattered", true)] {
                for (codes, int8) in [("", false), (" in 8 bits", true)] {
                    let name = format!("{}{place}{codes}", step.name);
                    self.paged(&mut group, &name, step, [scattered, int8], &qkv, &angles);
                }
            }
        }
    }

    fn columns(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        step: Step,
        qkv: &[Tensor<2>; 3],
        angles: &Tensor<3>,
    ) {
        let [_, kv, dim] = step.heads;
        let columns = step.prompt + step.tokens[1];
        let numbers = || {
            let all = self.normal([step.rows * kv * columns, dim]);
            all.reshape([step.rows, kv, columns, dim])
        };
        let caches: VecDeque<_> = (0..LAYERS).map(|_| [numbers(), numbers()]).collect();
        let lengths = step.lengths();
        let kin = (0..step.rows).step_by(step.together).map(|first| {
            let longest = lengths[first..first + step.together].iter().max();
            let start = columns - longest.unwrap_or(&0);
            Kin {
                prefix: (first, start - step.prompt..start),
                members: (first..first + step.together)
                    .map(|row| (row, columns - lengths[row]..columns))
                    .collect(),
            }
        });
        let decoded = Decoded::new(kin.collect(), step.rows, &self.device);
        let shape = DecodeShape {
            decoded: &decoded,
            angles: [angles, angles],
            window: None,
            scale: (dim as f64).sqrt().recip(),
            softcap: None,
        };
        let case = Case {
            kernel: &format!("{}, columns", step.name),
            bytes: 2.0 * self.bytes([step.read() * kv, dim]),
        };
        self.measure(group, &case, caches, |mut caches| {
            let cache = caches.pop_front()?;
            let (_, cache) = kernels::decode_attention(qkv.clone(), cache, &shape)?;
            caches.push_back(cache);
            Some(caches)
        });
    }

    fn paged(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        name: &str,
        step: Step,
        [scattered, int8]: [bool; 2],
        qkv: &[Tensor<2>; 3],
        angles: &Tensor<3>,
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
            angles: [angles, angles],
            window: None,
            scale: (dim as f64).sqrt().recip(),
            softcap: None,
        };
        let read = step.read() * kv;
        let bytes = if int8 {
            (read * (2 * dim + 4)) as f64
        } else {
            2.0 * self.bytes([read, dim])
        };
        let case = Case {
            kernel: name,
            bytes,
        };
        self.measure(group, &case, pools, |mut pools| {
            let pool = pools.pop_front()?;
            let (_, pool) = kernels::paged_attention(qkv.clone(), pool, &shape).ok()?;
            pools.push_back(pool);
            Some(pools)
        });
    }
}
