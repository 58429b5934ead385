//! The sequences of a forward pass, as attention kernels take them.

use super::shapes::int_tensor;
use burn::tensor::{Device, Int, Tensor};
use firebrick_device::device::is_cpu;
use std::ops::Range;
use std::sync::Arc;

/// Rows of a block on GPUs: queries, or in the backward pass keys.
pub(super) const BLOCK: usize = 64;

/// Fields of a block and of a span in their table.
pub(super) const BLOCK_FIELDS: usize = 5;
pub(super) const SPAN_FIELDS: usize = 3;

/// Sequences that share a prefix, and the rows of each after it. A sequence without a shared prefix has an empty one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixGroup {
    /// Rows of the shared prefix; each member's rows see them.
    pub prefix: Range<usize>,
    /// The rows of each member after the prefix.
    pub members: Vec<Range<usize>>,
}

/// The sequences of a forward pass: no row is in two ranges. Made once, used by every layer.
#[derive(Clone, Debug)]
pub struct PrefixGroups {
    pub(super) groups: Arc<[PrefixGroup]>,
    /// Their blocks, for GPU kernels.
    pub(super) blocks: Option<Blocks>,
}

impl PrefixGroups {
    /// Prepares sequences for a device.
    pub fn new(groups: Vec<PrefixGroup>, device: &Device) -> Self {
        let blocks = (!is_cpu(device)).then(|| Blocks::new(&groups, device));
        Self { groups: groups.into(), blocks }
    }
}

/// The tables of GPU kernels: blocks of queries with the spans of keys that they see, then blocks of keys with the
/// spans of queries that see them. A block has its first row, the row after its last, the position of the first, and
/// the range of its spans; a span has its first row, the row after its last, and the position of the first.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    /// Both kinds of blocks, and all spans.
    pub table: Tensor<1, Int>,
    /// The number of blocks of queries, and that of blocks of keys.
    pub count: usize,
    /// The number of rows that are in a sequence.
    pub rows: usize,
}

/// Rows, and the position of the first.
type Span = (Range<usize>, usize);

impl Blocks {
    fn new(groups: &[PrefixGroup], device: &Device) -> Self {
        let (mut seen, mut seeing, mut rows) = (Lists::default(), Lists::default(), 0);
        for PrefixGroup { prefix, members } in groups {
            let shared: Span = (prefix.clone(), 0);
            let mut spans = vec![shared.clone()];
            spans.extend(members.iter().map(|rows| (rows.clone(), prefix.len())));
            seen.add(&shared, &[&shared]);
            seeing.add(&shared, &spans.iter().collect::<Vec<_>>());
            for member in &spans[1..] {
                seen.add(member, &[&shared, member]);
                seeing.add(member, &[member]);
            }
            rows += spans.iter().map(|(rows, _)| rows.len()).sum::<usize>();
        }
        let count = seen.blocks.len() / BLOCK_FIELDS;
        seeing.shift(seen.spans.len() / SPAN_FIELDS);
        let table = [seen.blocks, seeing.blocks, seen.spans, seeing.spans].concat();
        Self { table: int_tensor(table, device), count, rows }
    }
}

#[derive(Default)]
struct Lists {
    blocks: Vec<i32>,
    spans: Vec<i32>,
}

impl Lists {
    /// Adds the blocks of some rows, all with the same spans.
    fn add(&mut self, (rows, position): &Span, spans: &[&Span]) {
        if rows.is_empty() {
            return;
        }
        let first = self.spans.len() / SPAN_FIELDS;
        for (rows, position) in spans {
            if !rows.is_empty() {
                self.spans.extend([rows.start as i32, rows.end as i32, *position as i32]);
            }
        }
        let end = self.spans.len() / SPAN_FIELDS;
        for start in rows.clone().step_by(BLOCK) {
            self.blocks.extend([
                start as i32,
                (start + BLOCK).min(rows.end) as i32,
                (position + start - rows.start) as i32,
                first as i32,
                end as i32,
            ]);
        }
    }

    /// Shifts the indices of spans, for others before them.
    fn shift(&mut self, spans: usize) {
        for block in self.blocks.chunks_mut(BLOCK_FIELDS) {
            block[3] += spans as i32;
            block[4] += spans as i32;
        }
    }
}
