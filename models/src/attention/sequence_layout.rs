//! The layout of packed or padded rows: which rows belong to which sequence, which sequences share a padded attention
//! product, and the gathers to padded rows and back.

use crate::ranges::consecutive;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, Operation, PrefixGroups, PrefixRun, PrefixTree};
use std::ops::Range;

/// Which rows of a forward pass belong to which sequence, and which sequences are padded to one width for attention.
#[derive(Clone, Debug)]
pub struct SequenceLayout {
    /// Rows of each run: a sequence, a shared prefix, or what is behind one.
    lengths: Vec<usize>,
    /// The run before each in its sequences, by its smaller index.
    parents: Vec<Option<usize>>,
    pub(super) groups: Vec<Group>,
    /// Queries whose scores are computed at a time; 0 is all.
    chunk: usize,
    /// True if the rows are packed, without padding between sequences.
    packed: bool,
    masks: Vec<Mask>,
    /// The rows of each sequence, where a fused kernel attends.
    pub(super) fused: Option<PrefixGroups>,
}

/// Consecutive sequences in one attention product, padded to one width.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Rows of the forward pass.
    rows: Range<usize>,
    sequences: usize,
    pub width: usize,
    gather: Option<Gather>,
}

/// Indices for gathering packed rows into padded ones and back.
#[derive(Clone, Debug)]
struct Gather {
    /// The row of every padded place, `[sequences · width]`; the sequence's last row for padding.
    spread: Tensor<1, Int>,
    /// `spread` within the group's rows; the index after them for padding.
    spread_or_zero: Tensor<1, Int>,
    /// The padded place of every row, `[tokens]`.
    places: Tensor<1, Int>,
}

/// The causal mask with a sliding window, for any chunk: true at query i and column j where key `j − before`, counted
/// from the chunk's first query, is hidden.
#[derive(Clone, Debug)]
struct Mask {
    window: Option<usize>,
    before: usize,
    hidden: Tensor<2, Bool>,
}

/// Queries whose scores are computed together, and the keys that any of them sees, as columns of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueryChunk {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

/// Consecutive sequences that are padded to one width for attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedGroup {
    /// Indices of the sequences.
    pub sequences: Range<usize>,
    /// Tokens of the longest of them.
    pub width: usize,
}

/// Limits of a padded attention product over several sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouping {
    /// Most padding, as a share of the padded rows in [0, 1); at 0 only sequences of one length share a product.
    pub waste: f64,
    /// Most queries whose scores are in memory at a time; 0 is any number. A longer sequence is computed alone, in
    /// chunks.
    pub queries: usize,
}

impl Grouping {
    /// Groups of consecutive sequences, each as large as the limits allow.
    pub fn split(self, lengths: &[usize]) -> impl Iterator<Item = PaddedGroup> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let (mut width, mut tokens) = (*lengths.get(first)?, lengths[first]);
            let start = first;
            first += 1;
            while let Some(&next) = lengths.get(first) {
                let (wider, more) = (width.max(next), tokens + next);
                let rows = wider * (first + 1 - start);
                let padding = (rows - more) as f64;
                if padding > self.waste * rows as f64 || (self.queries > 0 && rows > self.queries) {
                    break;
                }
                (width, tokens, first) = (wider, more, first + 1);
            }
            Some(PaddedGroup { sequences: start..first, width })
        })
    }
}

impl SequenceLayout {
    /// Sequences of these lengths (in tokens), packed one behind the other.
    pub fn packed(lengths: &[usize], grouping: Grouping, device: &Device) -> Self {
        let mut this = Self::empty(lengths.to_vec(), true);
        let mut row = 0;
        for PaddedGroup { sequences, width } in grouping.split(lengths) {
            let members = &lengths[sequences];
            let rows = row..row + members.iter().sum::<usize>();
            let padded = width * members.len() > rows.len();
            row = rows.end;
            this.groups.push(Group {
                gather: padded.then(|| Gather::new(members, width, rows.start, device)),
                rows,
                sequences: members.len(),
                width,
            });
        }
        this
    }

    /// Runs of rows, packed one behind the other in depth-first order: a run's `parent` is the run before it in its
    /// sequences, by its smaller index. A fused kernel attends: a run's keys are those of its path from the root and its
    /// causal ones.
    #[must_use]
    pub fn shared_prefix(lengths: &[usize], parents: &[Option<usize>]) -> Self {
        Self { parents: parents.to_vec(), ..Self::empty(lengths.to_vec(), true) }
    }

    /// Sequences padded on the right to `width` rows each.
    pub fn padded(sequences: usize, width: usize) -> Self {
        let mut this = Self::empty(vec![width; sequences], false);
        this.groups.push(Group { rows: 0..sequences * width, sequences, width, gather: None });
        this
    }

    fn empty(lengths: Vec<usize>, packed: bool) -> Self {
        let parents = vec![None; lengths.len()];
        Self { lengths, parents, groups: Vec::new(), chunk: 0, packed, masks: Vec::new(), fused: None }
    }

    /// This layout with the masks of sliding windows `windows`, and scores of at most `chunk` queries at a time (0:
    /// all).
    #[must_use]
    pub fn prepared(mut self, windows: &[Option<usize>], chunk: usize, device: &Device) -> Self {
        self.chunk = chunk;
        let long = self.is_chunked(self.longest()) || self.shares_prefixes();
        if kernels::available(Operation::Attention, device)
            || (long && kernels::available(Operation::LongAttention, device))
        {
            self.fused = Some(self.prefix_groups(device));
            return self;
        }
        assert!(!self.shares_prefixes(), "no kernel attends to shared prefixes on this device");
        let longest = self.longest();
        for &window in windows {
            if self.masks.iter().all(|m| m.window != window) {
                self.masks.push(Mask::new(window, longest, chunk, device));
            }
        }
        self
    }

    /// The trees of runs, each with its rows.
    fn prefix_groups(&self, device: &Device) -> PrefixGroups {
        let runs: Vec<(Range<usize>, Option<usize>)> =
            consecutive(self.lengths.iter().copied()).zip(self.parents.iter().copied()).collect();
        let mut first = 0;
        let trees = runs.chunk_by(|_, (_, parent)| parent.is_some()).map(|tree| {
            let run = |(rows, parent): &(Range<usize>, Option<usize>)| PrefixRun {
                rows: rows.clone(),
                parent: parent.map(|parent| parent - first),
            };
            let runs = tree.iter().map(run).collect();
            first += tree.len();
            PrefixTree::new(runs)
        });
        PrefixGroups::new(trees.collect(), device)
    }

    /// Rows of each run: a sequence with its padding, a shared prefix, or what is behind one.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// For each run the one before it in its sequences, by its smaller index; `None` where sequences begin.
    pub fn parents(&self) -> &[Option<usize>] {
        &self.parents
    }

    /// Position of each run's first row in its sequences.
    fn first_positions(&self) -> Vec<usize> {
        let mut firsts: Vec<usize> = Vec::with_capacity(self.lengths.len());
        for parent in &self.parents {
            firsts.push(parent.map_or(0, |parent| firsts[parent] + self.lengths[parent]));
        }
        firsts
    }

    /// Rows of all sequences.
    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Rows that attention computes, its own padding included.
    pub fn attended(&self) -> usize {
        self.groups.iter().map(|g| g.sequences * g.width).sum()
    }

    /// Rows of the longest sequence.
    pub fn longest(&self) -> usize {
        self.first_positions().iter().zip(&self.lengths).map(|(first, rows)| first + rows).max().unwrap_or(0)
    }

    /// Returns true if runs have others as their prefix.
    pub fn shares_prefixes(&self) -> bool {
        self.parents.iter().any(Option::is_some)
    }

    /// Whether [`attend_backward`](super::attend_backward) has to compute the gradient: packed rows or chunked scores,
    /// without a fused kernel (which differentiates itself).
    pub fn recomputes(&self) -> bool {
        self.fused.is_none() && (self.packed || self.is_chunked(self.longest()))
    }

    /// Position of every row in its sequence, `[tokens]`.
    pub fn positions(&self) -> Vec<u32> {
        let runs = self.first_positions().into_iter().zip(&self.lengths);
        runs.flat_map(|(first, rows)| first as u32..(first + rows) as u32).collect()
    }

    fn is_chunked(&self, width: usize) -> bool {
        self.chunk > 0 && self.chunk < width
    }

    /// The chunks of a sequence, without keys after the chunk's last query or before its window.
    pub(super) fn chunks(&self, width: usize, window: Option<usize>) -> Vec<QueryChunk> {
        let size = if self.is_chunked(width) { self.chunk } else { width.max(1) };
        (0..width)
            .step_by(size)
            .map(|start| {
                let end = (start + size).min(width);
                let oldest = window.map_or(0, |w| (start + 1).saturating_sub(w));
                QueryChunk { queries: start..end, keys: oldest..end }
            })
            .collect()
    }

    /// The mask of a chunk, `[1, 1, queries, keys]`; `None` where every key is visible.
    pub(super) fn mask(&self, window: Option<usize>, chunk: &QueryChunk) -> Option<Tensor<4, Bool>> {
        let [queries, keys] = [chunk.queries.len(), chunk.keys.len()];
        let mask = self.masks.iter().find(|m| m.window == window)?;
        let before = chunk.queries.start - chunk.keys.start;
        let hidden = mask.hidden.clone().narrow(0, 0, queries).narrow(1, mask.before - before, keys);
        (keys > 1).then(|| hidden.reshape([1, 1, queries, keys]))
    }
}

impl Gather {
    fn new(lengths: &[usize], width: usize, first_row: usize, device: &Device) -> Self {
        let rows: usize = lengths.iter().sum();
        let (mut spread, mut zero, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut row = 0;
        for (i, &n) in lengths.iter().enumerate() {
            spread.extend((0..width).map(|c| (first_row + row + c.min(n.max(1) - 1)) as i32));
            zero.extend((0..width).map(|c| if c < n { row + c } else { rows } as i32));
            places.extend((0..n).map(|c| (i * width + c) as i32));
            row += n;
        }
        let ints = |values: Vec<i32>| {
            let n = values.len();
            Tensor::<1, Int>::from_data(TensorData::new(values, [n]), device)
        };
        Self { spread: ints(spread), spread_or_zero: ints(zero), places: ints(places) }
    }
}

impl Mask {
    fn new(window: Option<usize>, longest: usize, chunk: usize, device: &Device) -> Self {
        let rows = if chunk == 0 { longest } else { chunk.min(longest) };
        let last_start = longest.saturating_sub(1) / rows.max(1) * rows;
        let before = window.map_or(last_start, |w| last_start.min(w.saturating_sub(1)));
        let hidden = |query: usize, column: usize| {
            let seen_from = query + before;
            column > seen_from || window.is_some_and(|w| seen_from - column >= w)
        };
        let columns = before + rows;
        let values: Vec<bool> = (0..rows).flat_map(|i| (0..columns).map(move |j| hidden(i, j))).collect();
        let hidden = Tensor::from_data(TensorData::new(values, [rows, columns]), device);
        Self { window, before, hidden }
    }
}

impl Group {
    /// The group's part of rows `[tokens, heads, dim]` as `[sequences, heads, width, dim]`.
    pub(super) fn by_head(&self, rows: &Tensor<3>) -> Tensor<4> {
        let padded = match &self.gather {
            Some(gather) => rows.clone().select(0, gather.spread.clone()),
            None => self.group_rows(rows),
        };
        self.folded(padded)
    }

    /// [`Self::by_head`] with zeros for padding: for sums over queries.
    pub(super) fn by_head_or_zero(&self, rows: &Tensor<3>) -> Tensor<4> {
        let group = self.group_rows(rows);
        let padded = match &self.gather {
            Some(gather) => {
                let [_, heads, dim] = group.dims();
                let zero = Tensor::zeros([1, heads, dim], (&group.device(), group.dtype()));
                Tensor::cat(vec![group, zero], 0).select(0, gather.spread_or_zero.clone())
            }
            None => group,
        };
        self.folded(padded)
    }

    /// The group's rows, `[tokens, heads, dim]`.
    fn group_rows(&self, rows: &Tensor<3>) -> Tensor<3> {
        let count = self.rows.len();
        if rows.dims()[0] == count { rows.clone() } else { rows.clone().narrow(0, self.rows.start, count) }
    }

    fn folded(&self, rows: Tensor<3>) -> Tensor<4> {
        let [_, heads, dim] = rows.dims();
        rows.reshape([self.sequences, self.width, heads, dim]).swap_dims(1, 2)
    }

    /// `[sequences, heads, width, dim]` as rows `[tokens, heads, dim]` of the group.
    pub(super) fn rows(&self, values: Tensor<4>) -> Tensor<3> {
        let [_, heads, _, dim] = values.dims();
        let rows = values.swap_dims(1, 2).reshape([self.sequences * self.width, heads, dim]);
        match &self.gather {
            Some(gather) => rows.select(0, gather.places.clone()),
            None => rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_along_the_path_of_a_run() {
        let layout = SequenceLayout::shared_prefix(&[3, 2, 1, 2, 2], &[None, Some(0), Some(1), Some(0), None]);
        assert_eq!(layout.positions(), [0, 1, 2, 3, 4, 5, 3, 4, 0, 1]);
        assert_eq!((layout.longest(), layout.tokens()), (6, 10));
        assert!(layout.shares_prefixes());
        let alone = SequenceLayout::packed(&[2, 1], Grouping { waste: 0.0, queries: 0 }, &Device::flex());
        assert_eq!((alone.parents(), alone.positions()), (&[None, None][..], vec![0, 1, 0]));
        assert!(!alone.shares_prefixes());
    }
}
