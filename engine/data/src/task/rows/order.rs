//! Which row an index of a split is, where several sources are mixed by weight.

use std::ops::Range;

/// Numbers of rows, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Indices {
    Range(Range<u64>),
    List(Vec<u64>),
}

impl Indices {
    pub fn len(&self) -> u64 {
        match self {
            Self::Range(range) => range.end - range.start,
            Self::List(list) => list.len() as u64,
        }
    }

    fn get(&self, at: u64) -> u64 {
        match self {
            Self::Range(range) => range.start + at,
            Self::List(list) => list[at as usize],
        }
    }

    /// Those that lie in a range.
    pub fn within(&self, range: &Range<u64>) -> Self {
        match self {
            Self::Range(own) => {
                let start = own.start.max(range.start);
                Self::Range(start..own.end.min(range.end).max(start))
            }
            Self::List(list) => {
                let bound = |row: u64| list.partition_point(|&own| own < row);
                Self::List(list[bound(range.start)..bound(range.end)].to_vec())
            }
        }
    }

    pub fn truncate(&mut self, len: u64) {
        match self {
            Self::Range(range) => range.end = range.end.min(range.start + len),
            Self::List(list) => list.truncate(len as usize),
        }
    }
}

/// The examples of an epoch: every source has a share of them, and each of its rows at least one.
#[derive(Debug)]
pub(crate) struct Order {
    /// Rows of a source, and how many of the epoch's examples are its.
    parts: Vec<(Indices, u64)>,
    len: u64,
}

impl Order {
    /// Every row once.
    pub fn plain(rows: Indices) -> Self {
        let len = rows.len();
        Self { parts: vec![(rows, len)], len }
    }

    /// Sources by weight. An epoch is as long as it takes for the source with the most rows for its weight to be gone
    /// through once; rows of the others repeat.
    pub fn weighted(sources: Vec<(Indices, f64)>) -> Self {
        let longest = sources.iter().map(|(rows, weight)| rows.len() as f64 / weight).fold(0.0, f64::max);
        let parts: Vec<(Indices, u64)> = sources
            .into_iter()
            .map(|(rows, weight)| {
                let share = (longest * weight).round() as u64;
                // no rounding may lose a row
                let slots = if rows.len() == 0 { 0 } else { share.max(rows.len()) };
                (rows, slots)
            })
            .collect();
        let len = parts.iter().map(|(_, slots)| slots).sum();
        Self { parts, len }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of the lists of rows.
    pub fn held_bytes(&self) -> u64 {
        let of = |rows: &Indices| match rows {
            Indices::Range(_) => 0,
            Indices::List(list) => size_of_val(list.as_slice()) as u64,
        };
        self.parts.iter().map(|(rows, _)| of(rows)).sum()
    }

    /// The row of an index, if there is one.
    pub fn row(&self, index: u64) -> Option<u64> {
        let mut left = index;
        for (rows, slots) in &self.parts {
            if left < *slots {
                return Some(rows.get(left % rows.len()));
            }
            left -= slots;
        }
        None
    }
}
