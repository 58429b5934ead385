//! The sequences of a forward pass, as attention kernels take them.

use crate::shapes::int_tensor;
use burn::tensor::{Device, Int, Tensor};
use firebrick_device::device::is_cpu;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Rows of a block on GPUs, at most: queries, or in the backward pass keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRows {
    /// 64 rows.
    Of64,
    /// 128 rows.
    Of128,
}

impl BlockRows {
    /// The number of rows.
    pub const fn count(self) -> usize {
        match self {
            Self::Of64 => 64,
            Self::Of128 => 128,
        }
    }
}

/// Fields of a block in a [`BlockTable`].
pub const BLOCK_FIELDS: usize = 5;
/// Fields of a span in a [`BlockTable`].
pub const SPAN_FIELDS: usize = 3;

/// Consecutive rows of one sequence, or of several that begin with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixRun {
    /// The rows; there may be none.
    pub rows: Range<usize>,
    /// The run before it in its sequences, by its smaller index in the tree.
    pub parent: Option<usize>,
}

/// Sequences with common prefixes, as runs of rows: a run's rows see those of its path from the root, and their own up
/// to themselves. Positions count along the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixTree {
    /// The runs, the root first; it alone has no parent.
    runs: Vec<PrefixRun>,
    /// The position of the first row, where only keys and values of the root are known.
    context: Option<usize>,
}

impl PrefixTree {
    /// A tree of runs.
    ///
    /// # Panics
    /// If the first run has a parent, or another run none before it.
    pub fn new(runs: Vec<PrefixRun>) -> Self {
        let ordered = |(index, run): (usize, &PrefixRun)| run.parent.map_or(index == 0, |parent| parent < index);
        assert!(runs.iter().enumerate().all(ordered), "one root, and every other run behind its parent");
        Self { runs, context: None }
    }

    /// A sequence that shares nothing.
    pub fn single(rows: Range<usize>) -> Self {
        Self::new(vec![PrefixRun { rows, parent: None }])
    }

    /// A prefix, and the rows behind it of each sequence that has it.
    pub fn of_prefix(prefix: Range<usize>, members: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut tree = Self::single(prefix);
        tree.runs.extend(members.into_iter().map(|rows| PrefixRun { rows, parent: Some(0) }));
        tree
    }

    /// [`Self::of_prefix`], of whose prefix only keys and values are known, from the token at `position` on. A kernel may
    /// leave the prefix's own rows zero.
    pub fn of_context(position: usize, prefix: Range<usize>, members: impl IntoIterator<Item = Range<usize>>) -> Self {
        Self { context: Some(position), ..Self::of_prefix(prefix, members) }
    }

    /// The position of the first row.
    pub fn first(&self) -> usize {
        self.context.unwrap_or(0)
    }

    /// True if only keys and values of the root are known.
    pub fn is_continued(&self) -> bool {
        self.context.is_some()
    }

    /// The runs, the root first.
    pub fn runs(&self) -> &[PrefixRun] {
        &self.runs
    }

    /// For each run the runs of its path, from the root to itself.
    pub fn paths(&self) -> Vec<Vec<usize>> {
        let mut paths: Vec<Vec<usize>> = Vec::with_capacity(self.runs.len());
        for (index, run) in self.runs.iter().enumerate() {
            let above = run.parent.map_or(&[][..], |parent| &paths[parent]);
            paths.push([above, &[index]].concat());
        }
        paths
    }
}

/// The sequences of a forward pass: no row is in two runs. Made once, used by every layer.
#[derive(Clone, Debug)]
pub struct PrefixGroups {
    trees: Arc<[PrefixTree]>,
    blocks: Option<Blocks>,
}

impl PrefixGroups {
    /// Prepares sequences for a device.
    pub fn new(trees: Vec<PrefixTree>, device: &Device) -> Self {
        let trees: Arc<[PrefixTree]> = trees.into();
        let blocks =
            (!is_cpu(device)).then(|| Blocks { trees: trees.clone(), device: device.clone(), tables: Arc::default() });
        Self { trees, blocks }
    }

    /// The sequences.
    pub fn trees(&self) -> &[PrefixTree] {
        &self.trees
    }

    /// Their blocks for GPU kernels; none on the CPU.
    pub fn blocks(&self) -> Option<&Blocks> {
        self.blocks.as_ref()
    }
}

/// The tables of GPU kernels, by the rows of their blocks; each is made when a kernel first asks for it.
#[derive(Clone, Debug)]
pub struct Blocks {
    trees: Arc<[PrefixTree]>,
    device: Device,
    tables: Arc<[OnceLock<BlockTable>; 2]>,
}

/// Blocks of queries with the spans of keys that they see, then blocks of keys with the spans of queries that see
/// them; those with the most rows to see or to be seen by first, so that none of them is left for the end. A block has
/// its first row, the row after its last, the position of the first, and the range of its spans; a span has its first
/// row, the row after its last, and the position of the first.
#[derive(Clone, Debug)]
pub struct BlockTable {
    /// Both kinds of blocks, and all spans.
    pub entries: Tensor<1, Int>,
    /// The number of blocks of queries, and that of blocks of keys.
    pub count: usize,
}

impl BlockTable {
    /// The offset of blocks of keys.
    pub fn keys(&self) -> usize {
        self.count * BLOCK_FIELDS
    }

    /// The offset of spans.
    pub fn spans(&self) -> usize {
        2 * self.count * BLOCK_FIELDS
    }
}

impl Blocks {
    /// The table with blocks of some rows.
    pub fn table(&self, rows: BlockRows) -> &BlockTable {
        self.tables[rows as usize].get_or_init(|| {
            let (entries, count) = table(&self.trees, rows.count());
            BlockTable { entries: int_tensor(entries, &self.device), count }
        })
    }

    /// The number of rows that are in a sequence.
    pub fn rows(&self) -> usize {
        self.trees.iter().flat_map(|tree| &tree.runs).map(|run| run.rows.len()).sum()
    }
}

/// Rows, and the position of the first.
type Span = (Range<usize>, usize);

/// The entries of a [`BlockTable`] with blocks of `height` rows, and the number of blocks of each kind.
fn table(trees: &[PrefixTree], height: usize) -> (Vec<i32>, usize) {
    let (mut seen, mut seeing) = (Lists::default(), Lists::default());
    for tree in trees {
        let paths = tree.paths();
        let mut spans: Vec<Span> = Vec::with_capacity(paths.len());
        // the runs that see each: itself and those behind it
        let mut under = vec![Vec::new(); paths.len()];
        for (index, (run, path)) in tree.runs.iter().zip(&paths).enumerate() {
            let position = run.parent.map_or(tree.first(), |parent| spans[parent].1 + spans[parent].0.len());
            spans.push((run.rows.clone(), position));
            for &above in path {
                under[above].push(index);
            }
        }
        for (span, (path, under)) in spans.iter().zip(paths.iter().zip(&under)) {
            seen.add(span, path.iter().map(|&run| &spans[run]), height, |block, _| block.end);
            seeing.add(span, under.iter().map(|&run| &spans[run]), height, |block, all| span.1 + all - block.start);
        }
    }
    let count = seen.blocks.len();
    let first = seen.spans.len() / SPAN_FIELDS;
    let blocks = [seen.sorted(0), seeing.sorted(first)].concat();
    ([blocks, seen.spans, seeing.spans].concat(), count)
}

#[derive(Default)]
struct Lists {
    /// Rows that a block sees, or that see it, and the block.
    blocks: Vec<(usize, [i32; BLOCK_FIELDS])>,
    spans: Vec<i32>,
}

impl Lists {
    /// Adds the blocks of some rows, all with the same spans. `work` is the number of rows that matter to a block,
    /// given its positions and the number of rows of all spans.
    fn add<'a>(
        &mut self,
        (rows, position): &Span,
        spans: impl Iterator<Item = &'a Span>,
        height: usize,
        work: impl Fn(Range<usize>, usize) -> usize,
    ) {
        if rows.is_empty() {
            return;
        }
        let first = self.spans.len() / SPAN_FIELDS;
        let mut all = 0;
        for (rows, position) in spans {
            if !rows.is_empty() {
                all += rows.len();
                self.spans.extend([rows.start as i32, rows.end as i32, *position as i32]);
            }
        }
        let last = self.spans.len() / SPAN_FIELDS;
        for start in rows.clone().step_by(height) {
            let end = (start + height).min(rows.end);
            let positions = position + start - rows.start..position + end - rows.start;
            let block = [start, end, positions.start, first, last].map(|n| n as i32);
            self.blocks.push((work(positions, all), block));
        }
    }

    /// The fields of the blocks, those with the most work first, with `spans` before their spans.
    fn sorted(&mut self, spans: usize) -> Vec<i32> {
        self.blocks.sort_by_key(|(work, _)| Reverse(*work));
        let shifted = |&(_, [start, end, position, first, last]): &(usize, [i32; BLOCK_FIELDS])| {
            [start, end, position, first + spans as i32, last + spans as i32]
        };
        self.blocks.iter().flat_map(shifted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prefix of 100 rows; of its two branches one of 3 rows is shared by two sequences.
    fn tree() -> PrefixTree {
        let run = |rows, parent| PrefixRun { rows, parent };
        PrefixTree::new(vec![
            run(0..100, None),
            run(100..103, Some(0)),
            run(103..110, Some(1)),
            run(110..111, Some(1)),
            run(111..120, Some(0)),
        ])
    }

    /// Rows and position of a block, and its spans.
    type Listed = (Range<usize>, usize, Vec<Span>);

    fn listed(table: &[i32], blocks: Range<usize>, count: usize) -> Vec<Listed> {
        let number = |at: usize| table[at] as usize;
        let span = |entry: usize| {
            let at = 2 * count * BLOCK_FIELDS + entry * SPAN_FIELDS;
            (number(at)..number(at + 1), number(at + 2))
        };
        let block = |block: usize| {
            let at = block * BLOCK_FIELDS;
            (number(at)..number(at + 1), number(at + 2), (number(at + 3)..number(at + 4)).map(span).collect())
        };
        blocks.map(block).collect()
    }

    #[test]
    fn queries_see_their_path_and_keys_are_seen_by_every_run_behind_them() {
        let (table, count) = table(&[tree()], 64);
        let [root, turn, first, second, other] =
            [(0..100, 0), (100..103, 100), (103..110, 103), (110..111, 103), (111..120, 100)];
        let spans = |spans: &[&Span]| spans.iter().copied().cloned().collect::<Vec<Span>>();
        let alone = spans(&[&root]);
        assert_eq!(
            listed(&table, 0..count, count),
            [
                (103..110, 103, spans(&[&root, &turn, &first])),
                (111..120, 100, spans(&[&root, &other])),
                (110..111, 103, spans(&[&root, &turn, &second])),
                (100..103, 100, spans(&[&root, &turn])),
                (64..100, 64, alone.clone()),
                (0..64, 0, alone),
            ]
        );
        let all = spans(&[&root, &turn, &first, &second, &other]);
        assert_eq!(
            listed(&table, count..2 * count, count),
            [
                (0..64, 0, all.clone()),
                (64..100, 64, all),
                (100..103, 100, spans(&[&turn, &first, &second])),
                (111..120, 100, spans(&[&other])),
                (103..110, 103, spans(&[&first])),
                (110..111, 103, spans(&[&second])),
            ]
        );
    }

    #[test]
    #[should_panic(expected = "behind its parent")]
    fn a_run_stands_behind_its_parent() {
        let _ =
            PrefixTree::new(vec![PrefixRun { rows: 0..1, parent: None }, PrefixRun { rows: 1..2, parent: Some(1) }]);
    }
}
