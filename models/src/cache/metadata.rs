//! The rows of one forward pass as the cache sees them (vLLM's attention metadata): slots of their keys and values, and
//! the slots that they attend to.

use super::{BlockTable, KvCache, LayerGroup};
use crate::arch::Arch;
use crate::attention::{Grouping, SequenceLayout};
use crate::ranges::consecutive;
use crate::rope::{LayerAngles, RotaryEmbeddings};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{
    self, BlockTables, Operation, PrefixGroups, PrefixTree, RotaryAngles, SequenceBlocks, SequenceRows, SharedBlocks,
    SlotMapping, StateRows,
};
use firebrick_spec::BLOCK_SIZE;
use std::ops::Range;

/// Queries of a sequence that are scored at a time in tensor operations: their scores are `[heads, QUERIES, keys]`.
pub(super) const QUERIES: usize = 256;

/// Padding of prompts that are scored in one tensor operation, as a share of their rows.
const PADDING: f64 = 0.25;

/// One forward pass over a cache. Made once, used by every layer.
#[derive(Debug)]
pub struct AttentionMetadata {
    /// Rotary embeddings of the position of every row in its sequence.
    pub(crate) rotary: RotaryEmbeddings,
    /// `rotary` for a kernel that rotates queries and keys itself, where one attends.
    angles: Option<LayerAngles>,
    /// The slot of every row's route, where routes are kept.
    pub(crate) route_slots: Option<Vec<Option<u32>>>,
    /// For each group of layers.
    pub(super) groups: Vec<GroupMetadata>,
    /// For layers of linear attention, where there are any.
    delta: Option<SequenceRows>,
}

/// One forward pass in layers that see as much of the sequences.
#[derive(Debug)]
pub(super) enum GroupMetadata {
    /// One token of each sequence, by a kernel.
    Decode(BlockTables),
    /// One token of each sequence, in tensor operations.
    Gathered(Gathered),
    /// Some tokens of each sequence.
    Prefill(PrefillMetadata),
}

/// One token of each sequence in one layer, for a kernel that rotates queries and keys too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decode<'a> {
    pub tables: &'a BlockTables,
    pub angles: &'a RotaryAngles,
}

/// Keys and values of all rows, padded to the longest sequence.
#[derive(Debug)]
pub(super) struct Gathered {
    /// Rows that are in a sequence.
    pub rows: Vec<i32>,
    /// The slots of their new tokens.
    pub new: SlotMapping,
    /// Slots that each row sees, `[rows · longest]`.
    pub seen: SlotMapping,
    pub longest: usize,
    /// True for padding, `[rows, 1, 1, longest]`.
    pub hidden: Tensor<4, Bool>,
}

/// Some tokens of each sequence; those that begin come first.
#[derive(Debug)]
pub(super) struct PrefillMetadata {
    /// The slot of every row.
    pub slots: SlotMapping,
    /// Rows of sequences that begin with this forward pass, or whose earlier tokens take part as rows before all
    /// others.
    pub joint: JointRows,
    /// Rows whose earlier tokens are gathered for them alone.
    pub apart: Vec<ContinuedRows>,
}

/// Rows of several sequences in one attention call.
#[derive(Debug)]
pub(super) enum JointRows {
    /// By a kernel. The slots of `context` are rows before those of the forward pass.
    Kernel { context: SlotMapping, groups: PrefixGroups },
    /// In tensor operations: the first rows of the forward pass.
    Padded { rows: usize, layout: SequenceLayout },
}

/// Rows of a sequence that began earlier.
#[derive(Debug)]
pub(super) struct ContinuedRows {
    /// Rows of the forward pass.
    pub rows: Range<usize>,
    /// The slots of the earlier tokens that they see.
    pub context: SlotMapping,
}

/// Tokens of a sequence, which its table has blocks for.
#[derive(Clone, Debug)]
pub struct Chunk<'a> {
    /// The sequence.
    pub table: &'a BlockTable,
    /// The tokens that are run.
    pub tokens: Range<usize>,
}

impl AttentionMetadata {
    /// Tables and angles of a layer of a group, where a kernel attends.
    pub(super) fn decoded(&self, group: usize, layer: usize) -> Option<Decode<'_>> {
        match (&self.groups[group], &self.angles) {
            (GroupMetadata::Decode(tables), Some(angles)) => Some(Decode { tables, angles: angles.layer(layer) }),
            _ => None,
        }
    }

    /// The sequences as linear attention takes them; asked in architectures that have it.
    pub(crate) fn delta(&self) -> &SequenceRows {
        self.delta.as_ref().unwrap_or_else(|| unreachable!("laid out if there are such layers"))
    }
}

impl KvCache {
    /// A forward pass of the last token of each sequence. A row without a sequence gets zeros, and writes nothing.
    pub fn decode(&self, arch: &Arch, tables: &[Option<&BlockTable>]) -> AttentionMetadata {
        let position = |table: Option<&BlockTable>| table.map_or(0, |t| t.tokens - 1) as u32;
        let device = &self.device;
        let available = kernels::available(Operation::DecodeAttention, device);
        // the CPU's kernel has no half precision
        let fused = available && !(is_cpu(device) && arch.precision.is_half());
        let positions: Vec<u32> = tables.iter().copied().map(position).collect();
        let rotary = RotaryEmbeddings::new(arch, &positions, device);
        let group = |(index, group): (usize, &LayerGroup)| {
            if fused {
                let shared = group.shared_blocks(index, tables);
                GroupMetadata::Decode(BlockTables::new(shared, tables.len(), device))
            } else {
                GroupMetadata::Gathered(group.gathered(index, tables, device))
            }
        };
        AttentionMetadata {
            groups: self.groups.iter().enumerate().map(group).collect(),
            angles: fused.then(|| rotary.angles()),
            rotary,
            route_slots: self.routes.is_some().then(|| {
                let slot = |table: &BlockTable| self.slots_of(table, table.tokens - 1..table.tokens)[0];
                tables.iter().map(|table| table.map(slot)).collect()
            }),
            delta: self.delta(arch, || {
                let rows = tables.iter().enumerate();
                let members = rows.filter_map(|(row, table)| Some((row..row + 1, (*table)?)));
                members.map(|(rows, table)| (rows, table, table.tokens - 1)).collect()
            }),
        }
    }

    /// A forward pass of some tokens of each sequence, one chunk behind the other. Chunks that begin a sequence come
    /// first.
    pub fn prefill(&self, arch: &Arch, chunks: &[Chunk<'_>]) -> AttentionMetadata {
        let positions = chunks.iter().flat_map(|chunk| chunk.tokens.clone());
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let group = |(index, group): (usize, &LayerGroup)| {
            GroupMetadata::Prefill(group.prefill(index, arch, chunks, &self.device))
        };
        AttentionMetadata {
            rotary: RotaryEmbeddings::new(arch, &positions, &self.device),
            angles: None,
            route_slots: self.routes.is_some().then(|| {
                let slots = |chunk: &Chunk<'_>| self.slots_of(chunk.table, chunk.tokens.clone());
                chunks.iter().flat_map(slots).map(Some).collect()
            }),
            groups: self.groups.iter().enumerate().map(group).collect(),
            delta: self.delta(arch, || {
                let rows = consecutive(chunks.iter().map(|chunk| chunk.tokens.len()));
                chunks.iter().zip(rows).map(|(chunk, rows)| (rows, chunk.table, chunk.tokens.start)).collect()
            }),
        }
    }

    /// The layout for linear attention: the rows of each sequence, its table, and its first token in the forward pass.
    fn delta<'a>(
        &self,
        arch: &Arch,
        sequences: impl FnOnce() -> Vec<(Range<usize>, &'a BlockTable, usize)>,
    ) -> Option<SequenceRows> {
        arch.delta_net?;
        let state_rows = |(rows, table, first): (Range<usize>, &BlockTable, usize)| StateRows {
            rows,
            slot: table.state.unwrap_or_default() as usize,
            begins: first == 0,
        };
        let sequences = sequences().into_iter().map(state_rows).collect();
        Some(SequenceRows::new(sequences, &self.device))
    }
}

impl LayerGroup {
    /// The sequences, grouped by the first blocks that they share. The block before a shared one is shared too, so that
    /// the last shared block identifies the prefix.
    pub(super) fn shared_blocks(&self, index: usize, tables: &[Option<&BlockTable>]) -> Vec<SharedBlocks> {
        let mut groups: Vec<(Option<u32>, SharedBlocks)> = Vec::new();
        for (row, table) in tables.iter().enumerate() {
            let Some(table) = table else { continue };
            let table_group = &table.groups[index];
            // a block that is not full is shared only with a pending copy of it
            let full = table_group.shared.min(table.tokens / BLOCK_SIZE);
            let leading = full.saturating_sub(table_group.first);
            let shared = (0..leading.min(table_group.blocks.len()))
                .rev()
                .find(|&i| self.pool.references(table_group.blocks[i]) > 1)
                .map_or(0, |last| last + 1);
            let last = shared.checked_sub(1).map(|last| table_group.blocks[last]);
            let member = SequenceBlocks {
                row,
                blocks: table_group.blocks[shared..].to_vec(),
                tokens: table.tokens - (table_group.first + shared) * BLOCK_SIZE,
            };
            let same = |(other, _): &&mut (Option<u32>, SharedBlocks)| last.is_some() && *other == last;
            match groups.iter_mut().rev().find(same) {
                Some((_, group)) => {
                    // the others' windows may reach further back
                    if table_group.first < group.first {
                        group.blocks = table_group.blocks[..shared].to_vec();
                        group.first = table_group.first;
                    }
                    group.members.push(member);
                }
                None => {
                    let blocks = table_group.blocks[..shared].to_vec();
                    let members = vec![member];
                    groups.push((last, SharedBlocks { first: table_group.first, blocks, members }));
                }
            }
        }
        groups.into_iter().map(|(_, group)| merge_unshared(group)).collect()
    }

    /// The tokens that token `token` of a sequence sees, up to and including itself.
    fn visible(&self, token: usize) -> Range<usize> {
        let window = self.window.unwrap_or(usize::MAX);
        (token + 1).saturating_sub(window)..token + 1
    }

    fn gathered(&self, index: usize, tables: &[Option<&BlockTable>], device: &Device) -> Gathered {
        let seen: Vec<Vec<u32>> = tables
            .iter()
            .map(|table| {
                let slots = |t: &&BlockTable| {
                    let visible = self.visible(t.tokens - 1);
                    t.groups[index].slots(visible).collect()
                };
                table.as_ref().map(slots).unwrap_or_default()
            })
            .collect();
        let longest = seen.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let (mut padded_slots, mut hidden) = (Vec::new(), Vec::new());
        for slots in &seen {
            let padding = longest - slots.len();
            padded_slots.extend(slots.iter().copied().chain(std::iter::repeat_n(0, padding)));
            hidden.extend((0..longest).map(|i| i >= slots.len()));
        }
        let new = seen.iter().filter_map(|slots| slots.last().copied());
        let rows = (0..).zip(&seen).filter(|(_, slots)| !slots.is_empty());
        let shape = [tables.len(), 1, 1, longest];
        Gathered {
            rows: rows.map(|(row, _)| row).collect(),
            new: SlotMapping::new(new.collect(), device),
            seen: SlotMapping::new(padded_slots, device),
            longest,
            hidden: Tensor::from_data(TensorData::new(hidden, shape), device),
        }
    }

    fn prefill(&self, index: usize, arch: &Arch, chunks: &[Chunk<'_>], device: &Device) -> PrefillMetadata {
        let slots = chunks.iter().flat_map(|chunk| chunk.table.groups[index].slots(chunk.tokens.clone()));
        let slots = SlotMapping::new(slots.collect(), device);
        let context = |chunk: &Chunk<'_>| {
            // from a whole block on, so that kernels add numbers up in the order of decoding
            let first = self.visible(chunk.tokens.start).start / BLOCK_SIZE * BLOCK_SIZE;
            let slots = chunk.table.groups[index].slots(first..chunk.tokens.start);
            Context { first, slots: slots.collect() }
        };
        let rows: Vec<Range<usize>> = consecutive(chunks.iter().map(|chunk| chunk.tokens.len())).collect();
        if kernels::available(Operation::Attention, device) {
            let contexts = chunks.iter().map(context).zip(rows);
            let (joint, apart) = by_kernel(contexts.collect(), device);
            return PrefillMetadata { slots, joint, apart };
        }
        let begin = chunks.iter().take_while(|c| c.tokens.start == 0).count();
        let lengths: Vec<usize> = rows[..begin].iter().map(Range::len).collect();
        let grouping = Grouping { waste: PADDING, queries: 0 };
        let layout = SequenceLayout::packed(&lengths, grouping, device);
        let apart = chunks[begin..].iter().zip(&rows[begin..]);
        PrefillMetadata {
            slots,
            joint: JointRows::Padded {
                rows: lengths.iter().sum(),
                layout: layout.prepared(&arch.windows, QUERIES, device),
            },
            apart: apart
                .map(|(chunk, rows)| ContinuedRows {
                    rows: rows.clone(),
                    context: SlotMapping::new(context(chunk).slots, device),
                })
                .collect(),
        }
    }
}

/// Moves the shared blocks of a group with one member to that member.
fn merge_unshared(mut group: SharedBlocks) -> SharedBlocks {
    if let [member] = &mut group.members[..] {
        member.tokens += group.blocks.len() * BLOCK_SIZE;
        member.blocks = group.blocks.drain(..).chain(member.blocks.drain(..)).collect();
    }
    group
}

/// The earlier tokens that rows see.
#[derive(Debug, PartialEq, Eq)]
struct Context {
    /// The position of the first.
    first: usize,
    slots: Vec<u32>,
}

/// Rows grouped by the earlier tokens that they see. On GPUs a kernel attends over whole sequences, so it computes these
/// tokens' rows again (of attention alone): sequences with many of them are left to tensor operations.
fn by_kernel(chunks: Vec<(Context, Range<usize>)>, device: &Device) -> (JointRows, Vec<ContinuedRows>) {
    let mut groups: Vec<(Context, Vec<Range<usize>>)> = Vec::new();
    let mut apart = Vec::new();
    for (context, rows) in chunks {
        let seen = &context.slots;
        if !is_cpu(device) && seen.len() > QUERIES.max(rows.len()) {
            apart.push(ContinuedRows { rows, context: SlotMapping::new(context.slots, device) });
            continue;
        }
        let same = groups.iter_mut().rev().find(|(other, _)| !seen.is_empty() && *other == context);
        match same {
            Some((_, members)) => members.push(rows),
            None => groups.push((context, vec![rows])),
        }
    }
    let before: usize = groups.iter().map(|(context, _)| context.slots.len()).sum();
    let prefixes = consecutive(groups.iter().map(|(context, _)| context.slots.len()));
    let trees = groups.iter().zip(prefixes).map(|((context, members), prefix)| {
        let shift = |rows: &Range<usize>| rows.start + before..rows.end + before;
        PrefixTree::of_context(context.first, prefix, members.iter().map(shift))
    });
    let trees = trees.collect();
    let context = groups.into_iter().flat_map(|(context, _)| context.slots);
    let joint = JointRows::Kernel {
        context: SlotMapping::new(context.collect(), device),
        groups: PrefixGroups::new(trees, device),
    };
    (joint, apart)
}
