//! How rows belong to sequences: which attend together, and the way to padded rows and back.

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, Families, Family, Operation};
use std::ops::Range;

/// How rows belong to sequences, whose attention is computed together, and what stands in for rows that are not there.
#[derive(Clone, Debug)]
pub struct Sequences {
    lengths: Vec<usize>,
    pub(super) groups: Vec<Group>,
    /// Queries scored at a time; 0 is all.
    chunk: usize,
    /// Whether rows may stand for padding.
    packed: bool,
    masks: Vec<Mask>,
    /// Where a kernel does it all: the sequences as rows.
    pub(super) fused: Option<Families>,
}

/// Consecutive sequences that attend together, as rows of one width.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Rows of the forward.
    rows: Range<usize>,
    sequences: usize,
    pub width: usize,
    gather: Option<Gather>,
}

/// The way of packed rows to padded ones and back.
#[derive(Clone, Debug)]
struct Gather {
    /// The row for every padded place; its sequence's last where there is none. `[sequences · width]`
    spread: Tensor<1, Int>,
    /// The same among the group's own rows, with the one behind them where there is none.
    spread_or_zero: Tensor<1, Int>,
    /// The padded place of every row.
    places: Tensor<1, Int>,
}

/// What is hidden by a window, for any chunk: true at query i and column j where key `j − before` of those from the chunk's
/// first query on is hidden.
#[derive(Clone, Debug)]
struct Mask {
    window: Option<usize>,
    before: usize,
    hidden: Tensor<2, Bool>,
}

/// Queries that are scored together, and the keys that any of them sees. Columns of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
}

/// Consecutive sequences that attend together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// Which.
    pub sequences: Range<usize>,
    /// Tokens of the longest of them.
    pub width: usize,
}

/// How many sequences attend together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouping {
    /// Most of their rows that may be padding, as a share; with 0 only sequences of one length attend together.
    pub waste: f64,
    /// Most queries whose scores are there at a time; 0 is any number. A longer sequence attends alone, in chunks.
    pub queries: usize,
}

impl Grouping {
    /// Consecutive sequences in groups as large as they may be.
    pub fn of(self, lengths: &[usize]) -> impl Iterator<Item = Together> {
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
            Some(Together {
                sequences: start..first,
                width,
            })
        })
    }
}

impl Sequences {
    /// Sequences of the given lengths without anything between them.
    #[must_use]
    pub fn packed(lengths: &[usize], grouping: Grouping, device: &Device) -> Self {
        let mut this = Self::empty(lengths.to_vec(), true);
        let mut row = 0;
        for Together { sequences, width } in grouping.of(lengths) {
            let own = &lengths[sequences];
            let rows = row..row + own.iter().sum::<usize>();
            let padded = width * own.len() > rows.len();
            row = rows.end;
            this.groups.push(Group {
                gather: padded.then(|| Gather::new(own, width, rows.start, device)),
                rows,
                sequences: own.len(),
                width,
            });
        }
        this
    }

    /// Sequences that are padded on the right to `width` rows each, in every layer.
    #[must_use]
    pub fn padded(sequences: usize, width: usize) -> Self {
        let mut this = Self::empty(vec![width; sequences], false);
        this.groups.push(Group {
            rows: 0..sequences * width,
            sequences,
            width,
            gather: None,
        });
        this
    }

    fn empty(lengths: Vec<usize>, packed: bool) -> Self {
        Self {
            lengths,
            groups: Vec::new(),
            chunk: 0,
            packed,
            masks: Vec::new(),
            fused: None,
        }
    }

    /// The same with what windows hide, and scores of at most `chunk` queries at a time (0: all).
    #[must_use]
    pub fn prepared(mut self, windows: &[Option<usize>], chunk: usize, device: &Device) -> Self {
        self.chunk = chunk;
        let long = self.is_chunked(self.longest());
        if kernels::available(Operation::Attention, device)
            || (long && kernels::available(Operation::LongAttention, device))
        {
            self.fused = Some(self.families(device));
            return self;
        }
        let longest = self.longest();
        for &window in windows {
            if self.masks.iter().all(|m| m.window != window) {
                self.masks.push(Mask::new(window, longest, chunk, device));
            }
        }
        self
    }

    /// Every sequence as rows of its own.
    fn families(&self, device: &Device) -> Families {
        let mut row = 0;
        let own = self.lengths.iter().map(|&n| {
            row += n;
            row - n..row
        });
        let families = own.map(|rows| Family {
            prefix: rows.start..rows.start,
            members: vec![rows],
        });
        Families::new(families.collect(), device)
    }

    /// Rows of each sequence, padding included where the layout has some.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Rows.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Rows that attention works on: with those that are there for their width alone.
    #[must_use]
    pub fn attended(&self) -> usize {
        self.groups.iter().map(|g| g.sequences * g.width).sum()
    }

    /// Rows of the longest sequence.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Whether scores are computed again in a backward outside of the graph: where they are packed, or too many for one piece.
    /// A kernel on the graph does so by itself.
    #[must_use]
    pub fn recomputes(&self) -> bool {
        self.fused.is_none() && (self.packed || self.is_chunked(self.longest()))
    }

    /// Position of every row in its sequence.
    #[must_use]
    pub fn positions(&self) -> Vec<u32> {
        self.lengths.iter().flat_map(|&n| 0..n as u32).collect()
    }

    fn is_chunked(&self, width: usize) -> bool {
        self.chunk > 0 && self.chunk < width
    }

    /// Keys after a chunk's last query, and before its window, are left out.
    pub(super) fn chunks(&self, width: usize, window: Option<usize>) -> Vec<Chunk> {
        let size = if self.is_chunked(width) {
            self.chunk
        } else {
            width.max(1)
        };
        (0..width)
            .step_by(size)
            .map(|start| {
                let end = (start + size).min(width);
                let oldest = window.map_or(0, |w| (start + 1).saturating_sub(w));
                Chunk {
                    queries: start..end,
                    keys: oldest..end,
                }
            })
            .collect()
    }

    /// `[1, 1, queries, keys]`.
    pub(super) fn mask(&self, window: Option<usize>, chunk: &Chunk) -> Option<Tensor<4, Bool>> {
        let [queries, keys] = [chunk.queries.len(), chunk.keys.len()];
        let mask = self.masks.iter().find(|m| m.window == window)?;
        let before = chunk.queries.start - chunk.keys.start;
        let hidden = mask.hidden.clone().narrow(0, 0, queries);
        let hidden = hidden.narrow(1, mask.before - before, keys);
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
        Self {
            spread: ints(spread),
            spread_or_zero: ints(zero),
            places: ints(places),
        }
    }
}

impl Mask {
    fn new(window: Option<usize>, longest: usize, chunk: usize, device: &Device) -> Self {
        let rows = if chunk == 0 {
            longest
        } else {
            chunk.min(longest)
        };
        let last_start = longest.saturating_sub(1) / rows.max(1) * rows;
        let before = window.map_or(last_start, |w| last_start.min(w.saturating_sub(1)));
        let hidden = |query: usize, column: usize| {
            let seen_from = query + before;
            column > seen_from || window.is_some_and(|w| seen_from - column >= w)
        };
        let columns = before + rows;
        let values: Vec<bool> = (0..rows)
            .flat_map(|i| (0..columns).map(move |j| hidden(i, j)))
            .collect();
        let hidden = Tensor::from_data(TensorData::new(values, [rows, columns]), device);
        Self {
            window,
            before,
            hidden,
        }
    }
}

impl Group {
    fn count(&self) -> usize {
        self.rows.len()
    }

    /// Rows `[tokens, heads, dim]` of all as `[sequences, heads, width, dim]` of the group.
    pub(super) fn by_head(&self, all: &Tensor<3>) -> Tensor<4> {
        let own = match &self.gather {
            Some(gather) => all.clone().select(0, gather.spread.clone()),
            None => self.own(all),
        };
        self.folded(own)
    }

    /// The same with zeros where there is no row: for what is summed over queries.
    pub(super) fn by_head_or_zero(&self, all: &Tensor<3>) -> Tensor<4> {
        let own = self.own(all);
        let own = match &self.gather {
            Some(gather) => {
                let [_, heads, dim] = own.dims();
                let zero = Tensor::zeros([1, heads, dim], (&own.device(), own.dtype()));
                Tensor::cat(vec![own, zero], 0).select(0, gather.spread_or_zero.clone())
            }
            None => own,
        };
        self.folded(own)
    }

    fn own(&self, all: &Tensor<3>) -> Tensor<3> {
        if all.dims()[0] == self.count() {
            all.clone()
        } else {
            all.clone().narrow(0, self.rows.start, self.count())
        }
    }

    fn folded(&self, own: Tensor<3>) -> Tensor<4> {
        let [_, heads, dim] = own.dims();
        own.reshape([self.sequences, self.width, heads, dim])
            .swap_dims(1, 2)
    }

    /// The way back.
    pub(super) fn rows(&self, own: Tensor<4>) -> Tensor<3> {
        let [_, heads, _, dim] = own.dims();
        let rows = own
            .swap_dims(1, 2)
            .reshape([self.sequences * self.width, heads, dim]);
        match &self.gather {
            Some(gather) => rows.select(0, gather.places.clone()),
            None => rows,
        }
    }
}
