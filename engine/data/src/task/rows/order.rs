//! Order of a split's rows, which mixes sources by weight.

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

    /// The indices in a range.
    pub fn within(&self, range: &Range<u64>) -> Self {
        match self {
            Self::Range(rows) => {
                let start = rows.start.max(range.start);
                Self::Range(start..rows.end.min(range.end).max(start))
            }
            Self::List(list) => {
                let bound = |row: u64| list.partition_point(|&index| index < row);
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

/// The examples of an epoch: each source has a number of them, and each row at least one.
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

    /// Sources by weight. An epoch ends when the source with the most rows for its weight has been used
    /// once; rows of the others repeat.
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
        let bytes = |rows: &Indices| match rows {
            Indices::Range(_) => 0,
            Indices::List(list) => size_of_val(list.as_slice()) as u64,
        };
        self.parts.iter().map(|(rows, _)| bytes(rows)).sum()
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
