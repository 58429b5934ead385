//! Sequences that begin with the end state of an earlier one: a prefix that several share, of trees of any depth.

use std::ops::Range;

/// The parents and children of the sequences of a forward pass.
#[derive(Debug)]
pub struct Generations {
    /// Of each sequence the one whose end state it begins with.
    pub parents: Vec<Option<usize>>,
    /// Of each sequence those that begin with its end state, in their order.
    pub children: Vec<Vec<usize>>,
    /// Sequences without a parent, then those whose parents are among them, and so on. Children of one sequence are
    /// neighbors, in their order.
    pub members: Vec<Vec<usize>>,
    /// Of each sequence that has children its place among those.
    pub ends: Vec<Option<usize>>,
    /// Of each sequence that has a parent its place among those.
    pub starts: Vec<Option<usize>>,
}

/// A row of a descendant that a convolution's last inputs of a sequence reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Rows between the end of the sequence and this one, in the descendant's view.
    pub offset: usize,
    /// The row.
    pub row: usize,
    /// The descendant.
    pub sequence: usize,
}

impl Generations {
    /// Parents stand before their children.
    pub(super) fn new(parents: Vec<Option<usize>>) -> Self {
        let count = parents.len();
        let mut children = vec![Vec::new(); count];
        for (i, parent) in parents.iter().enumerate() {
            if let Some(parent) = *parent {
                children[parent].push(i);
            }
        }
        let (mut ends, mut starts) = (vec![None; count], vec![None; count]);
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut generation: Vec<usize> = (0..count).filter(|&i| parents[i].is_none()).collect();
        let (mut handed, mut taken) = (0, 0);
        while !generation.is_empty() {
            for &i in &generation {
                if !children[i].is_empty() {
                    ends[i] = Some(handed);
                    handed += 1;
                }
                if parents[i].is_some() {
                    starts[i] = Some(taken);
                    taken += 1;
                }
            }
            let next = generation.iter().flat_map(|&i| children[i].iter().copied()).collect();
            members.push(std::mem::replace(&mut generation, next));
        }
        Self { parents, children, members, ends, starts }
    }

    /// Sequences that have children, and those that have a parent.
    pub fn handed(&self) -> [usize; 2] {
        [&self.ends, &self.starts].map(|places| places.iter().flatten().count())
    }

    /// The last `count` rows, or as many as there are, that come before a sequence, the last of them first. `rows` are
    /// those of each sequence.
    pub fn rows_before(&self, rows: impl Fn(usize) -> Range<usize>, sequence: usize, count: usize) -> Vec<usize> {
        let mut before = Vec::new();
        let mut parent = self.parents[sequence];
        while let Some(i) = parent.filter(|_| before.len() < count) {
            before.extend(rows(i).rev().take(count - before.len()));
            parent = self.parents[i];
        }
        before
    }

    /// The rows of descendants up to `reach` rows behind the end of a sequence, by their offsets, and those of one
    /// offset in the order of their sequences.
    pub fn readers(&self, rows: impl Fn(usize) -> Range<usize>, sequence: usize, reach: usize) -> Vec<Reader> {
        let mut readers = Vec::new();
        let mut below = vec![(sequence, 0)];
        while let Some((parent, first)) = below.pop() {
            for &child in &self.children[parent] {
                let of_child = rows(child);
                let offsets = first..reach.min(first + of_child.len());
                readers.extend(offsets.zip(of_child.clone()).map(|(offset, row)| Reader {
                    offset,
                    row,
                    sequence: child,
                }));
                if first + of_child.len() < reach {
                    below.push((child, first + of_child.len()));
                }
            }
        }
        readers.sort_by_key(|reader| (reader.offset, reader.sequence));
        readers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two trees and a sequence by itself: 0 ← 1, 0 ← 2 ← 3, 0 ← 5, 4, 6 ← 7.
    fn generations() -> (Generations, [Range<usize>; 8]) {
        let parents = [None, Some(0), Some(0), Some(2), None, Some(0), None, Some(6)];
        (Generations::new(parents.to_vec()), [0..4, 4..9, 9..10, 10..13, 13..15, 15..20, 20..21, 21..25])
    }

    #[test]
    fn parents_come_first_and_siblings_are_neighbors() {
        let (generations, _) = generations();
        assert_eq!(generations.members, [vec![0, 4, 6], vec![1, 2, 5, 7], vec![3]]);
        assert_eq!(generations.handed(), [3, 5]);
        assert_eq!(generations.ends[2], Some(2));
        assert_eq!(generations.starts[3], Some(4));
        assert!(Generations::new(Vec::new()).members.is_empty());
    }

    #[test]
    fn taps_reach_through_short_sequences_into_those_before_them() {
        let (generations, rows) = generations();
        let rows = |i: usize| rows[i].clone();
        assert_eq!(generations.rows_before(rows, 3, 3), [9, 3, 2]);
        assert_eq!(generations.rows_before(rows, 7, 3), [20]);
        let readers = |sequence| {
            let readers = generations.readers(rows, sequence, 2).into_iter();
            readers.map(|reader| (reader.offset, reader.row, reader.sequence)).collect::<Vec<_>>()
        };
        assert_eq!(readers(0), [(0, 4, 1), (0, 9, 2), (0, 15, 5), (1, 5, 1), (1, 10, 3), (1, 16, 5)]);
        assert_eq!(readers(2), [(0, 10, 3), (1, 11, 3)]);
        assert_eq!(readers(4), []);
    }
}
