//! What the rows of one forward pass are to the cache (vLLM's attention metadata): where their keys and values go, and
//! which they see.

use super::{BlockTable, KvCache, LayerGroup};
use crate::arch::Arch;
use crate::attention::{Grouping, SequenceLayout};
use crate::rope::{LayerAngles, RotaryEmbeddings};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{
    self, BlockTables, Operation, PrefixGroup, PrefixGroups, RotaryAngles, SequenceBlocks, SequenceRows, SharedBlocks,
    SlotMapping, StateRows,
};
use firebrick_spec::BLOCK_SIZE;
use std::ops::Range;

/// Queries of a sequence that are scored together in tensor operations: their scores are `[heads, QUERIES, keys]`.
pub(super) const QUERIES: usize = 256;

/// Padding of prompts that are scored together in tensor operations, as a share of their rows.
const PADDING: f64 = 0.25;

/// One forward pass over a cache. Made once, used by every layer.
#[derive(Debug)]
pub struct AttentionMetadata {
    /// Of the position of every row in its sequence.
    rotary: RotaryEmbeddings,
    /// The same for a kernel that rotates queries and keys on its own, where one attends.
    angles: Option<LayerAngles>,
    rows: usize,
    /// The slot of every row's route, where routes are kept.
    route_slots: Option<Vec<Option<u32>>>,
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
    /// What each of all rows sees, `[rows · longest]`.
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
    pub together: Together,
    /// Rows whose earlier tokens are gathered for them alone.
    pub apart: Vec<Continued>,
}

/// How rows are attended to together.
#[derive(Debug)]
pub(super) enum Together {
    /// By a kernel. The slots of `context` are rows before those of the forward pass.
    Kernel { context: SlotMapping, groups: PrefixGroups },
    /// In tensor operations: the first rows of the forward pass.
    Padded { rows: usize, layout: SequenceLayout },
}

/// Rows of a sequence that began earlier.
#[derive(Debug)]
pub(super) struct Continued {
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
    /// Rows of the forward pass.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// What a layer of a group runs with whose tokens a kernel attends with.
    pub(super) fn decoded(&self, group: usize, layer: usize) -> Option<Decode<'_>> {
        match (&self.groups[group], &self.angles) {
            (GroupMetadata::Decode(tables), Some(angles)) => Some(Decode { tables, angles: angles.of(layer) }),
            _ => None,
        }
    }

    /// The slot of every row's route, where routes are kept.
    pub(crate) fn route_slots(&self) -> Option<&[Option<u32>]> {
        self.route_slots.as_deref()
    }

    pub(crate) fn rotary(&self) -> &RotaryEmbeddings {
        &self.rotary
    }

    /// The sequences as linear attention takes them; asked in architectures that have it.
    pub(crate) fn delta(&self) -> &SequenceRows {
        let own = self.delta.as_ref();
        own.unwrap_or_else(|| unreachable!("laid out if there are such layers"))
    }
}

impl KvCache {
    /// A forward pass of the last token of each sequence. A row without a sequence gets zeros, and writes nothing.
    #[must_use]
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
            route_slots: self.keeps_routes().then(|| {
                let slot = |table: &BlockTable| self.slots_of(table, table.tokens - 1..table.tokens)[0];
                tables.iter().map(|table| table.map(slot)).collect()
            }),
            rows: positions.len(),
            delta: self.delta(arch, || {
                let rows = tables.iter().enumerate();
                let own = rows.filter_map(|(row, table)| Some((row..row + 1, (*table)?)));
                own.map(|(rows, table)| (rows, table, table.tokens - 1)).collect()
            }),
        }
    }

    /// A forward pass of some tokens of each sequence, one chunk behind the other. Chunks that begin a sequence come
    /// first.
    #[must_use]
    pub fn prefill(&self, arch: &Arch, chunks: &[Chunk<'_>]) -> AttentionMetadata {
        let positions = chunks.iter().flat_map(|chunk| chunk.tokens.clone());
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let group = |(index, group): (usize, &LayerGroup)| {
            GroupMetadata::Prefill(group.prefill(index, arch, chunks, &self.device))
        };
        AttentionMetadata {
            rotary: RotaryEmbeddings::new(arch, &positions, &self.device),
            angles: None,
            rows: positions.len(),
            route_slots: self.keeps_routes().then(|| {
                let slots = |chunk: &Chunk<'_>| self.slots_of(chunk.table, chunk.tokens.clone());
                chunks.iter().flat_map(slots).map(Some).collect()
            }),
            groups: self.groups.iter().enumerate().map(group).collect(),
            delta: self.delta(arch, || {
                let mut row = 0;
                let own = chunks.iter().map(|chunk| {
                    row += chunk.tokens.len();
                    (row - chunk.tokens.len()..row, chunk.table, chunk.tokens.start)
                });
                own.collect()
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
        let own = |(rows, table, first): (Range<usize>, &BlockTable, usize)| StateRows {
            rows,
            slot: table.state.unwrap_or_default() as usize,
            begins: first == 0,
        };
        let sequences = sequences().into_iter().map(own).collect();
        Some(SequenceRows::new(sequences, &self.device))
    }
}

impl LayerGroup {
    /// The sequences, those together that share their first blocks. The block before a shared one is shared too, so
    /// that the last shared block tells what a sequence shares.
    pub(super) fn shared_blocks(&self, index: usize, tables: &[Option<&BlockTable>]) -> Vec<SharedBlocks> {
        let mut found: Vec<(Option<u32>, usize, SharedBlocks)> = Vec::new();
        for (row, table) in tables.iter().enumerate() {
            let Some(table) = table else { continue };
            let own = &table.groups[index];
            let leading = own.shared.saturating_sub(own.first);
            let shared = (0..leading.min(own.blocks.len()))
                .rev()
                .find(|&i| self.pool.references(own.blocks[i]) > 1)
                .map_or(0, |last| last + 1);
            let last = shared.checked_sub(1).map(|last| own.blocks[last]);
            let member = SequenceBlocks {
                row,
                blocks: own.blocks[shared..].to_vec(),
                tokens: table.tokens - (own.first + shared) * BLOCK_SIZE,
            };
            let same = |(other, ..): &&mut (Option<u32>, usize, SharedBlocks)| last.is_some() && *other == last;
            match found.iter_mut().rev().find(same) {
                Some((_, first, group)) => {
                    // the others' windows may reach further back
                    if own.first < *first {
                        group.blocks = own.blocks[..shared].to_vec();
                        *first = own.first;
                    }
                    group.members.push(member);
                }
                None => {
                    let blocks = own.blocks[..shared].to_vec();
                    let members = vec![member];
                    found.push((last, own.first, SharedBlocks { blocks, members }));
                }
            }
        }
        found.into_iter().map(|(.., group)| alone(group)).collect()
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
        let (mut all, mut hidden) = (Vec::new(), Vec::new());
        for slots in &seen {
            let padding = longest - slots.len();
            all.extend(slots.iter().copied().chain(std::iter::repeat_n(0, padding)));
            hidden.extend((0..longest).map(|i| i >= slots.len()));
        }
        let new = seen.iter().filter_map(|slots| slots.last().copied());
        let rows = (0..).zip(&seen).filter(|(_, slots)| !slots.is_empty());
        let shape = [tables.len(), 1, 1, longest];
        Gathered {
            rows: rows.map(|(row, _)| row).collect(),
            new: SlotMapping::new(new.collect(), device),
            seen: SlotMapping::new(all, device),
            longest,
            hidden: Tensor::from_data(TensorData::new(hidden, shape), device),
        }
    }

    fn prefill(&self, index: usize, arch: &Arch, chunks: &[Chunk<'_>], device: &Device) -> PrefillMetadata {
        let slots = chunks.iter().flat_map(|chunk| chunk.table.groups[index].slots(chunk.tokens.clone()));
        let slots = SlotMapping::new(slots.collect(), device);
        let context = |chunk: &Chunk<'_>| {
            let seen = self.visible(chunk.tokens.start).start..chunk.tokens.start;
            chunk.table.groups[index].slots(seen).collect::<Vec<u32>>()
        };
        let mut row = 0;
        let rows = chunks.iter().map(|chunk| {
            row += chunk.tokens.len();
            row - chunk.tokens.len()..row
        });
        let rows: Vec<Range<usize>> = rows.collect();
        if kernels::available(Operation::Attention, device) {
            let contexts = chunks.iter().map(context).zip(rows);
            let (together, apart) = by_kernel(contexts.collect(), device);
            return PrefillMetadata { slots, together, apart };
        }
        let begin = chunks.iter().take_while(|c| c.tokens.start == 0).count();
        let lengths: Vec<usize> = rows[..begin].iter().map(Range::len).collect();
        let grouping = Grouping { waste: PADDING, queries: 0 };
        let layout = SequenceLayout::packed(&lengths, grouping, device);
        let apart = chunks[begin..].iter().zip(&rows[begin..]);
        PrefillMetadata {
            slots,
            together: Together::Padded {
                rows: lengths.iter().sum(),
                layout: layout.prepared(&arch.windows, QUERIES, device),
            },
            apart: apart
                .map(|(chunk, rows)| Continued {
                    rows: rows.clone(),
                    context: SlotMapping::new(context(chunk), device),
                })
                .collect(),
        }
    }
}

/// A sequence that is alone with its blocks shares nothing.
fn alone(mut group: SharedBlocks) -> SharedBlocks {
    if let [own] = &mut group.members[..] {
        own.tokens += group.blocks.len() * BLOCK_SIZE;
        own.blocks = group.blocks.drain(..).chain(own.blocks.drain(..)).collect();
    }
    group
}

/// Rows by the earlier tokens that they see. A kernel attends over whole sequences, so it computes these tokens' rows
/// again (of attention alone): sequences with many of them are left to tensor operations.
fn by_kernel(chunks: Vec<(Vec<u32>, Range<usize>)>, device: &Device) -> (Together, Vec<Continued>) {
    let mut groups: Vec<(Vec<u32>, Vec<Range<usize>>)> = Vec::new();
    let mut apart = Vec::new();
    for (context, rows) in chunks {
        if context.len() > QUERIES.max(rows.len()) {
            apart.push(Continued { rows, context: SlotMapping::new(context, device) });
            continue;
        }
        let same = groups.iter_mut().rev().find(|(other, _)| !context.is_empty() && *other == context);
        match same {
            Some((_, members)) => members.push(rows),
            None => groups.push((context, vec![rows])),
        }
    }
    let before: usize = groups.iter().map(|(context, _)| context.len()).sum();
    let mut next = 0;
    let all = groups.iter().map(|(context, members)| {
        let prefix = next..next + context.len();
        next = prefix.end;
        let shift = |rows: &Range<usize>| rows.start + before..rows.end + before;
        let members: Vec<Range<usize>> = members.iter().map(shift).collect();
        match (context.is_empty(), &members[..]) {
            (true, [own]) => PrefixGroup { prefix: own.start..own.start, members },
            _ => PrefixGroup { prefix, members },
        }
    });
    let all: Vec<PrefixGroup> = all.collect();
    let context = groups.into_iter().flat_map(|(context, _)| context);
    let together = Together::Kernel {
        context: SlotMapping::new(context.collect(), device),
        groups: PrefixGroups::new(all, device),
    };
    (together, apart)
}
