//! Chunked prefill: a few prompts at a time, in forward passes of a bounded number of tokens, each prompt once for all of its samples.

use super::engine_args::EngineArgs;
use super::sequence::{Sequence, SequenceGroup};
use crate::cache::{BlockTable, Chunk, KvCache};
use burn::tensor::{Int, Tensor, TensorData};
use std::collections::VecDeque;

/// Groups in prefill.
#[derive(Debug)]
pub(super) struct Prefill {
    groups: VecDeque<PartialGroup>,
}

/// A group of which some tokens have been run.
#[derive(Debug)]
struct PartialGroup {
    group: SequenceGroup,
    /// Its blocks, once its first chunk is scheduled.
    table: Option<BlockTable>,
    /// Tokens that were found in the cache.
    found: usize,
}

/// A prefilled group, and those of its sequences that are not being decoded yet.
#[derive(Debug)]
pub(super) struct PrefilledGroup {
    pub table: BlockTable,
    pub tokens: Vec<u32>,
    pub members: VecDeque<Sequence>,
    /// Whether its tokens were prefilled before, and how many of them the cache still had.
    pub recomputed: bool,
    pub found: usize,
}

/// What a forward pass over prompts did.
#[derive(Debug)]
pub(super) enum Prefilled {
    /// The pool had no block for any prompt.
    NoBlocks,
    /// The groups whose last token has run, and their last hidden states, `[groups, hidden]`.
    Ran(Vec<PrefilledGroup>, Option<Tensor<2>>),
}

impl Prefill {
    pub fn new(groups: Vec<SequenceGroup>) -> Self {
        let partial = |group| PartialGroup {
            group,
            table: None,
            found: 0,
        };
        Self {
            groups: groups.into_iter().map(partial).collect(),
        }
    }

    /// Whether all groups are prefilled.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Slots of last blocks that hold no token.
    pub fn unused_slots(&self) -> usize {
        let tables = self.groups.iter().flat_map(|own| &own.table);
        tables.map(BlockTable::unused_slots).sum()
    }

    /// Gives all blocks back.
    pub fn into_groups(self, cache: &mut KvCache) -> Vec<SequenceGroup> {
        let free = |own: PartialGroup| {
            if let Some(table) = own.table {
                cache.free(table);
            }
            own.group
        };
        self.groups.into_iter().map(free).collect()
    }

    /// Runs the next tokens, as many as one forward pass may have.
    pub fn run(&mut self, args: &EngineArgs<'_>, cache: &mut KvCache) -> Prefilled {
        let decoder = args.decoder;
        let mut chunks = self.schedule(cache, args.config.max_num_batched_tokens);
        if chunks.is_empty() {
            return Prefilled::NoBlocks;
        }
        // those that begin a sequence come first
        chunks.sort_by_key(|&(_, from, _)| from > 0);
        let (mut ids, mut last, mut row) = (Vec::new(), Vec::new(), 0);
        for &(index, from, to) in &chunks {
            let tokens = &self.groups[index].group.tokens;
            ids.extend(tokens[from..to].iter().map(|&token| token as i32));
            row += to - from;
            if to == tokens.len() {
                last.push((index, row as i32 - 1));
            }
        }
        let parts: Vec<Chunk<'_>> = chunks
            .iter()
            .filter_map(|&(index, from, to)| {
                let table = self.groups[index].table.as_ref()?;
                let tokens = from..to;
                Some(Chunk { table, tokens })
            })
            .collect();
        let metadata = cache.prefill(decoder.arch(), &parts);
        let device = decoder.device();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [row]), device);
        let hidden = decoder.in_its_pool(|| decoder.hidden_cached(ids, &metadata, cache));
        args.moments.tell();
        for own in &mut self.groups {
            if let Some(table) = &mut own.table {
                cache.trim(table);
            }
        }
        if last.is_empty() {
            return Prefilled::Ran(Vec::new(), None);
        }
        last.sort_unstable();
        let rows: Vec<i32> = last.iter().map(|&(_, row)| row).collect();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [last.len()]), device);
        let done = self.take(&last);
        Prefilled::Ran(done, Some(hidden.select(0, rows)))
    }

    /// The chunks of the next forward pass, as a group, its first token and the one after its last. Their blocks are allocated.
    fn schedule(&mut self, cache: &mut KvCache, most: usize) -> Vec<(usize, usize, usize)> {
        let (mut chunks, mut left) = (Vec::new(), most);
        for (index, own) in self.groups.iter_mut().enumerate() {
            if left == 0 {
                break;
            }
            let tokens = &own.group.tokens;
            let table = own.table.get_or_insert_with(|| {
                let table = cache.begin(tokens);
                own.found = table.tokens();
                table
            });
            let from = table.tokens();
            let to = tokens.len().min(from + left);
            if !cache.append(table, to - from) {
                break;
            }
            // the prompts after it in this forward pass already share these blocks: a layer writes before it reads
            cache.keep_prefix(table, &tokens[..to]);
            left -= to - from;
            chunks.push((index, from, to));
        }
        chunks
    }

    /// Removes the groups at these indices, in their order.
    fn take(&mut self, indices: &[(usize, i32)]) -> Vec<PrefilledGroup> {
        let mut done = Vec::with_capacity(indices.len());
        for &(index, _) in indices.iter().rev() {
            let Some(PartialGroup {
                group,
                table: Some(table),
                found,
            }) = self.groups.remove(index)
            else {
                unreachable!("its last token has run");
            };
            done.push(PrefilledGroup {
                table,
                tokens: group.tokens,
                members: group.members.into(),
                recomputed: group.recomputed,
                found,
            });
        }
        done.reverse();
        done
    }
}
