//! Division of work: a pure function of costs, which every rank computes without a message.

use std::ops::Range;

/// Splits items, in order, into a contiguous part per rank, of about equal cost. Parts may be empty.
pub fn contiguous(costs: &[u64], ranks: usize) -> Vec<Range<usize>> {
    let total: u64 = costs.iter().sum();
    let (mut parts, mut start, mut before) = (Vec::with_capacity(ranks), 0, 0);
    for rank in 0..ranks {
        let mut end = start;
        // where the items up to here cost so much in all, the next rank begins: at the end that is nearer
        let goal = (rank as u64 + 1) * total / ranks.max(1) as u64;
        let rest = ranks - rank - 1;
        while end < costs.len() && (rest == 0 || before + costs[end] / 2 < goal) {
            before += costs[end];
            end += 1;
        }
        parts.push(start..end);
        start = end;
    }
    parts
}

/// Assigns items, the most costly first, to the rank with the least cost so far; no rank gets more than `ceil(items /
/// ranks)` items. Returns each rank's items in order.
pub fn balanced(costs: &[u64], ranks: usize) -> Vec<Vec<usize>> {
    let rounds = costs.len().div_ceil(ranks.max(1));
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&item| (std::cmp::Reverse(costs[item]), item));
    let mut dealt = vec![(0_u64, Vec::new()); ranks];
    for item in order {
        let free = dealt.iter_mut().filter(|rank| rank.1.len() < rounds);
        if let Some(least) = free.min_by_key(|rank| (rank.0, rank.1.len())) {
            least.0 += costs[item];
            least.1.push(item);
        }
    }
    dealt
        .into_iter()
        .map(|(_, mut items)| {
            items.sort_unstable();
            items
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_costs_are_dealt_out_evenly() {
        assert_eq!(contiguous(&[3; 8], 4), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(balanced(&[3; 4], 2), [[0, 2], [1, 3]]);
    }

    #[test]
    fn a_costly_item_is_alone() {
        assert_eq!(contiguous(&[1, 1, 1, 9], 2), [0..3, 3..4]);
        assert_eq!(balanced(&[9, 4, 3, 2], 2), [vec![0, 3], vec![1, 2]]);
    }

    #[test]
    fn ranks_without_work_have_empty_parts() {
        let parts = contiguous(&[5], 3);
        assert_eq!(parts.iter().map(Range::len).sum::<usize>(), 1);
        assert_eq!(balanced(&[5], 3), [vec![0], vec![], vec![]]);
        assert_eq!(contiguous(&[], 2), [0..0, 0..0]);
        assert!(balanced(&[], 2).concat().is_empty());
    }

    proptest! {
        #[test]
        fn every_item_is_dealt_once(costs in prop::collection::vec(0_u64..100, 0..60), ranks in 1_usize..9) {
            let every_item: Vec<usize> = (0..costs.len()).collect();
            let parts = contiguous(&costs, ranks);
            prop_assert_eq!(parts.len(), ranks);
            prop_assert_eq!(parts.into_iter().flatten().collect::<Vec<_>>(), every_item.clone());
            let dealt = balanced(&costs, ranks);
            let rounds = costs.len().div_ceil(ranks);
            prop_assert!(dealt.iter().all(|items_of_rank| items_of_rank.len() <= rounds));
            let mut items = dealt.concat();
            items.sort_unstable();
            prop_assert_eq!(items, every_item);
        }

        #[test]
        fn no_rank_has_much_more_than_its_share(costs in prop::collection::vec(1_u64..100, 1..60), ranks in 1_usize..9) {
            let most = costs.iter().max().copied().unwrap_or(0);
            let share = costs.iter().sum::<u64>() / ranks as u64;
            for part in contiguous(&costs, ranks) {
                let cost: u64 = costs[part].iter().sum();
                prop_assert!(cost <= share + most + 1, "{cost} of {share}, the largest {most}");
            }
        }
    }
}
