//! Items into parts that cost about the same, by costs and sizes alone.

use std::collections::BinaryHeap;

/// Rows and sequences: of an item, of a part, or the most that a part may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Size {
    pub rows: usize,
    pub sequences: usize,
}

impl Size {
    /// The size of both together.
    pub fn and(self, other: Self) -> Self {
        Self { rows: self.rows + other.rows, sequences: self.sequences + other.sequences }
    }

    fn holds(self, part: Self) -> bool {
        part.rows <= self.rows && part.sequences <= self.sequences
    }

    /// Returns true if every part of items of these sizes is within it.
    pub fn holds_all(self, parts: &[Vec<usize>], sizes: &[Self]) -> bool {
        let size = |part: &Vec<usize>| part.iter().fold(Self::default(), |sum, &i| sum.and(sizes[i]));
        parts.iter().all(|part| self.holds(size(part)))
    }
}

/// The largest differencing method for many parts (Karmarkar & Karp, 1982): partial partitions are merged, those that
/// are least balanced first, the largest part of one with the smallest of the other.
pub(super) fn largest_differencing(costs: &[u64], parts: usize) -> Vec<Vec<usize>> {
    let mut heap: BinaryHeap<Partial> =
        (0..costs.len()).map(|item| Partial::new(vec![(costs[item], vec![item])], parts)).collect();
    while heap.len() > 1 {
        if let (Some(a), Some(b)) = (heap.pop(), heap.pop()) {
            heap.push(a.merged(b, parts));
        }
    }
    let last = heap.pop();
    last.map_or_else(Vec::new, |last| last.parts.into_iter().map(|p| p.1).collect())
}

/// Costs and items of the parts that are not empty, the most costly first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Partial {
    spread: u64,
    parts: Vec<(u64, Vec<usize>)>,
}

impl Partial {
    fn new(mut parts: Vec<(u64, Vec<usize>)>, wanted: usize) -> Self {
        parts.sort_by(|a, b| b.cmp(a));
        let most = parts.first().map_or(0, |p| p.0);
        let least = parts.get(wanted.max(1) - 1).map_or(0, |p| p.0);
        Self { spread: most - least, parts }
    }

    fn merged(self, other: Self, wanted: usize) -> Self {
        let mut parts = self.parts;
        let free = wanted.max(1) - parts.len();
        // empty parts are the smallest: the other's largest go there, the rest to this one's smallest
        for (i, (cost, items)) in other.parts.into_iter().enumerate() {
            if i < free {
                parts.push((cost, items));
            } else {
                let part = &mut parts[wanted.max(1) - 1 - i];
                part.0 += cost;
                part.1.extend(items);
            }
        }
        Self::new(parts, wanted)
    }
}

/// Every item to the least costly part that has room for it, the most costly item first (Graham's LPT with capacities).
/// `None` where an item finds no room.
pub(super) fn longest_first(costs: &[u64], sizes: &[Size], parts: usize, capacity: Size) -> Option<Vec<Vec<usize>>> {
    let mut bins = vec![(0_u64, Size::default(), Vec::new()); parts];
    for item in by_size(costs) {
        let room = |p: &&mut (u64, Size, Vec<usize>)| capacity.holds(p.1.and(sizes[item]));
        let part = bins.iter_mut().filter(room).min_by_key(|p| p.0)?;
        part.0 += costs[item];
        part.1 = part.1.and(sizes[item]);
        part.2.push(item);
    }
    Some(bins.into_iter().map(|p| p.2).collect())
}

/// As few parts as best-fit decreasing finds: every item, the largest first, to the fullest part that has room for it.
pub(super) fn best_fit(sizes: &[Size], capacity: Size) -> Vec<Vec<usize>> {
    let mut bins: Vec<(Size, Vec<usize>)> = Vec::new();
    for item in by_size(sizes) {
        let room = |p: &&mut (Size, Vec<usize>)| capacity.holds(p.0.and(sizes[item]));
        match bins.iter_mut().filter(room).max_by_key(|p| p.0.rows) {
            Some(part) => {
                part.0 = part.0.and(sizes[item]);
                part.1.push(item);
            }
            None => bins.push((sizes[item], vec![item])),
        }
    }
    bins.into_iter().map(|p| p.1).collect()
}

/// Items, the largest first, equal ones in their order.
pub(super) fn by_size<T: Ord + Copy>(sizes: &[T]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(sizes[i]), i));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn most(parts: &[Vec<usize>], costs: &[u64]) -> u64 {
        let cost = |part: &Vec<usize>| part.iter().map(|&i| costs[i]).sum();
        parts.iter().map(cost).max().unwrap_or(0)
    }

    #[test]
    fn differencing_balances_what_the_greedy_way_does_not() {
        let costs = [8, 7, 6, 5, 4];
        let sizes = costs.map(|_| Size { rows: 1, sequences: 1 });
        let free = Size { rows: usize::MAX, sequences: usize::MAX };
        let differencing = largest_differencing(&costs, 2);
        let greedy = longest_first(&costs, &sizes, 2, free).unwrap();
        assert_eq!(most(&differencing, &costs), 16);
        assert_eq!(most(&greedy, &costs), 17);
    }

    proptest! {
        #[test]
        fn every_item_is_in_one_part(
            costs in prop::collection::vec(0_u64..1000, 0..80),
            parts in 1_usize..20,
        ) {
            let partition = largest_differencing(&costs, parts);
            prop_assert!(partition.len() <= parts);
            let mut items = partition.concat();
            items.sort_unstable();
            prop_assert_eq!(items, (0..costs.len()).collect::<Vec<_>>());
        }
    }
}
