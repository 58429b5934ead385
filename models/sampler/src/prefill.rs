//! Sequences that wait for prefill, and chunked prefill: a few prompts at a time, in forward passes of a bounded number of tokens, each prompt once for all
//! of its samples.
//!
//! States of linear attention are there where a forward pass ends. So that prompts that begin alike share them, the
//! first of these ends a chunk at the last whole block that it has in common with others, and they begin with the next
//! forward pass.

use super::engine_args::EngineArgs;
use super::request::GenerationRequest;
use super::sequence::{Sequence, SequenceGroup};
use burn::tensor::{Int, Tensor, TensorData};
use firebrick_models::cache::{BLOCK_SIZE, BlockTable, Boundary, Chunk, KvCache};
use std::collections::{BTreeMap, VecDeque};

/// Preempted sequences, then prompts that have not been prefilled.
#[derive(Debug)]
pub(super) struct WaitingQueue<'a> {
    pub requests: &'a [GenerationRequest],
    /// Samples of each prompt.
    n: usize,
    next: usize,
    returned: BTreeMap<(usize, usize), SequenceGroup>,
}

impl<'a> WaitingQueue<'a> {
    pub fn new(requests: &'a [GenerationRequest], n: usize) -> Self {
        let next = if n == 0 { requests.len() } else { 0 };
        Self { requests, n, next, returned: BTreeMap::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.returned.is_empty() && self.next == self.requests.len()
    }

    /// Number of sequences that wait.
    pub fn sequences(&self) -> usize {
        let returned: usize = self.returned.values().map(|group| group.members.len()).sum();
        returned + (self.requests.len() - self.next) * self.n
    }

    /// Tokens of the next group.
    pub fn front(&self) -> Option<usize> {
        match self.returned.values().next() {
            Some(group) => Some(group.tokens.len()),
            None => self.requests.get(self.next).map(|r| r.tokens.len()),
        }
    }

    pub fn pop(&mut self) -> Option<SequenceGroup> {
        if let Some((_, group)) = self.returned.pop_first() {
            return Some(group);
        }
        let request = self.next;
        let tokens = self.requests.get(request)?.tokens.clone();
        self.next += 1;
        let member = |sample| Sequence::new(self.requests, request, sample);
        Some(SequenceGroup { tokens, members: (0..self.n).map(member).collect(), recomputed: false })
    }

    /// A preempted sequence waits again, with the tokens it has sampled.
    pub fn put_back(&mut self, sequence: Sequence) {
        self.wait(sequence, true);
    }

    /// A sequence waits for its next turn.
    pub fn push_continued(&mut self, sequence: Sequence) {
        self.wait(sequence, false);
    }

    fn wait(&mut self, sequence: Sequence, recomputed: bool) {
        let prompt = &self.requests[sequence.sample.request].tokens;
        let tokens = [prompt.as_slice(), &sequence.sample.tokens].concat();
        self.insert(SequenceGroup { tokens, members: vec![sequence], recomputed });
    }

    /// Sequences that have not been decoded wait again, for the prefill of their common prompt.
    pub fn put_back_together(&mut self, tokens: Vec<u32>, mut members: Vec<Sequence>) {
        let prompt = self.requests[members[0].sample.request].tokens.len();
        if tokens.len() > prompt {
            return members.into_iter().for_each(|m| self.put_back(m));
        }
        members.iter_mut().for_each(Sequence::restart);
        self.insert(SequenceGroup { tokens, members, recomputed: true });
    }

    fn insert(&mut self, group: SequenceGroup) {
        let before = self.returned.insert(group.members[0].arrival(), group);
        assert!(before.is_none(), "a sequence waits once");
    }
}

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
    /// End of a chunk, for others that begin alike.
    split: Option<usize>,
}

/// A chunk of a group's tokens.
#[derive(Clone, Copy, Debug)]
struct ScheduledChunk {
    /// Index of the group.
    group: usize,
    from: usize,
    to: usize,
}

/// A prefilled group, and those of its sequences that are not being decoded yet.
#[derive(Debug)]
pub(super) struct PrefilledGroup {
    pub table: BlockTable,
    pub tokens: Vec<u32>,
    pub members: VecDeque<Sequence>,
    /// True if its tokens were prefilled before.
    pub recomputed: bool,
    pub found: usize,
}

/// Result of a forward pass over prompts.
#[derive(Debug)]
pub(super) enum Prefilled {
    /// The pool had no block for any prompt.
    NoBlocks,
    /// The groups whose last token has run, and their last hidden states, `[groups, hidden]`.
    Ran(Vec<PrefilledGroup>, Option<Tensor<2>>),
}

impl Prefill {
    pub fn new(groups: Vec<SequenceGroup>) -> Self {
        let partial = |group| PartialGroup { group, table: None, found: 0, split: None };
        Self { groups: groups.into_iter().map(partial).collect() }
    }

    /// True if all groups are prefilled.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Slots of last blocks that hold no token.
    pub fn unused_slots(&self) -> usize {
        self.groups.iter().flat_map(|partial| &partial.table).map(BlockTable::unused_slots).sum()
    }

    /// Gives all blocks back.
    pub fn into_groups(self, cache: &mut KvCache) -> Vec<SequenceGroup> {
        let free = |partial: PartialGroup| {
            if let Some(table) = partial.table {
                cache.free(table);
            }
            partial.group
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
        chunks.sort_by_key(|chunk| chunk.from > 0);
        let (mut ids, mut last, mut row) = (Vec::new(), Vec::new(), 0);
        for &ScheduledChunk { group, from, to } in &chunks {
            let tokens = &self.groups[group].group.tokens;
            ids.extend(tokens[from..to].iter().map(|&token| token as i32));
            row += to - from;
            if to == tokens.len() {
                last.push((group, row as i32 - 1));
            }
        }
        let parts: Vec<Chunk<'_>> = chunks
            .iter()
            .filter_map(|chunk| {
                let table = self.groups[chunk.group].table.as_ref()?;
                let tokens = chunk.from..chunk.to;
                Some(Chunk { table, tokens })
            })
            .collect();
        let metadata = decoder.in_exact(|| cache.prefill(decoder.arch(), &parts));
        let device = decoder.device();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [row]), device);
        let hidden = decoder.in_thread_pool(|| decoder.hidden_cached(ids, &metadata, cache));
        args.memory_probe.call();
        self.save_states(cache, &chunks);
        for partial in &mut self.groups {
            if let Some(table) = &mut partial.table {
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

    /// The chunks of the next forward pass. Their blocks are allocated.
    fn schedule(&mut self, cache: &mut KvCache, most: usize) -> Vec<ScheduledChunk> {
        let (mut chunks, mut left) = (Vec::new(), most);
        for group in 0..self.groups.len() {
            if left == 0 {
                break;
            }
            if self.groups[group].table.is_none() {
                if self.awaits_states(group, &chunks, cache) {
                    continue;
                }
                self.begin(group, cache);
            }
            let partial = &mut self.groups[group];
            let Some(table) = &mut partial.table else {
                unreachable!("it has begun");
            };
            let (tokens, from) = (&partial.group.tokens, table.tokens());
            let to = partial.split.filter(|&split| split > from).unwrap_or(tokens.len()).min(from + left);
            if !cache.append(table, to - from) {
                break;
            }
            // the prompts after it in this forward pass already share these blocks: a layer writes before it reads
            cache.keep_prefix(table, &tokens[..to]);
            left -= to - from;
            chunks.push(ScheduledChunk { group, from, to });
        }
        chunks
    }

    /// Begins a group with what the cache has of it.
    fn begin(&mut self, group: usize, cache: &mut KvCache) {
        let prompt = &self.groups[group].group;
        let split = if prompt.is_prompt() && cache.may_share_states() {
            let others = self.groups.iter().skip(group + 1).filter(|other| other.table.is_none());
            let common = others.map(|other| common_blocks(&prompt.tokens, &other.group.tokens)).max().unwrap_or(0);
            Some(common.max(cache.kept_tokens(&prompt.tokens)))
        } else {
            None
        };
        let partial = &mut self.groups[group];
        let table = cache.begin(&partial.group.tokens);
        partial.found = table.tokens();
        partial.split = split.filter(|&split| split > partial.found);
        partial.table = Some(table);
    }

    /// True if a group waits for the next forward pass, since a chunk of this one leaves states that it can begin with.
    fn awaits_states(&self, group: usize, chunks: &[ScheduledChunk], cache: &KvCache) -> bool {
        let tokens = &self.groups[group].group.tokens;
        let ends = chunks.iter().filter_map(|chunk| {
            let other = &self.groups[chunk.group];
            let split = other.split.filter(|&split| split == chunk.to)?;
            let common = common_blocks(&other.group.tokens, tokens);
            (split <= common).then_some(split)
        });
        ends.max().is_some_and(|end| end > cache.found_tokens(tokens))
    }

    /// Keeps the states at the ends of prompts that have run, and where prompts part, for others. The latter are used
    /// sooner: they come last, so that they stay longer.
    fn save_states(&mut self, cache: &mut KvCache, chunks: &[ScheduledChunk]) {
        for at in [Boundary::Prompt, Boundary::Shared] {
            for &ScheduledChunk { group, to, .. } in chunks {
                let PartialGroup { group, table, split, .. } = &mut self.groups[group];
                let ends = if at == Boundary::Shared {
                    *split == Some(to)
                } else {
                    to == group.tokens.len() && group.is_prompt()
                };
                if let Some(table) = table.as_mut().filter(|_| ends) {
                    cache.save_states(table, &group.tokens[..to], at);
                }
            }
        }
    }

    /// Removes the groups at these indices, in their order.
    fn take(&mut self, indices: &[(usize, i32)]) -> Vec<PrefilledGroup> {
        let mut done = Vec::with_capacity(indices.len());
        for &(index, _) in indices.iter().rev() {
            let Some(PartialGroup { group, table: Some(table), found, .. }) = self.groups.remove(index) else {
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

/// Tokens of the whole blocks that two prompts begin with, the last token of each left out.
fn common_blocks(a: &[u32], b: &[u32]) -> usize {
    let most = a.len().min(b.len()).saturating_sub(1);
    let same = a.iter().zip(b).take(most).take_while(|(a, b)| a == b);
    same.count() / BLOCK_SIZE * BLOCK_SIZE
}
