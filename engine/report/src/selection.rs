//! Selection of the groups of a report.

use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Reason for the selection of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tag {
    /// The first or the last of the run.
    End,
    /// Evenly spaced.
    Even,
    /// Among the best mean rewards.
    Best,
    /// Among the worst mean rewards.
    Worst,
    /// Among those with most truncated completions.
    Truncated,
    /// All its rewards are equal.
    NoSpread,
    /// Its tokens were logged.
    Tokens,
}

/// Properties of a group for the selection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupFacts {
    /// Samples.
    pub size: usize,
    /// Truncated ones.
    pub truncated: usize,
    /// Mean of their rewards.
    pub mean: f64,
    /// True for several samples with one reward.
    pub no_spread: bool,
    /// True if its tokens were logged.
    pub tokens: bool,
}

/// Selects whole groups with at most `most` samples in all, at least one group: the ends, then one of each list in
/// turn. Returns the groups by index, with all reasons.
pub fn select(groups: &[GroupFacts], most: usize) -> BTreeMap<usize, BTreeSet<Tag>> {
    let total: usize = groups.iter().map(|group| group.size).sum();
    let mut selected: BTreeMap<usize, BTreeSet<Tag>> = BTreeMap::new();
    if total <= most {
        selected = (0..groups.len()).map(|at| (at, BTreeSet::new())).collect();
    }
    let mut lists: Vec<(Tag, std::vec::IntoIter<usize>)> =
        candidates(groups, most).into_iter().map(|(tag, list)| (tag, list.into_iter())).collect();
    let mut taken = if total <= most { total } else { 0 };
    while !lists.is_empty() {
        lists.retain_mut(|(tag, list)| {
            let Some(at) = list.next() else { return false };
            if !selected.contains_key(&at) {
                if taken > 0 && taken + groups[at].size > most {
                    return false;
                }
                taken += groups[at].size;
            }
            selected.entry(at).or_default().insert(*tag);
            true
        });
    }
    selected
}

/// The groups of each reason, the most significant first: at most a fifth of the selection each, except
/// the evenly spaced ones.
fn candidates(groups: &[GroupFacts], most: usize) -> Vec<(Tag, Vec<usize>)> {
    let count = groups.len();
    if count == 0 {
        return Vec::new();
    }
    let usual = groups.iter().map(|group| group.size).sum::<usize>() / count;
    let fifth = (most.min(count * usual.max(1)) / usual.max(1) / 5).max(1);
    let mut by_mean: Vec<usize> = (0..count).collect();
    by_mean.sort_by(|&a, &b| {
        let means = groups[a].mean.total_cmp(&groups[b].mean);
        means.then(scattered(a).total_cmp(&scattered(b)))
    });
    let worst = by_mean.iter().copied().take(fifth).collect();
    let best = by_mean.iter().rev().copied().take(fifth).collect();
    let mut truncated: Vec<usize> = (0..count).filter(|&at| groups[at].truncated > 0).collect();
    truncated.sort_by(|&a, &b| {
        let most = groups[b].truncated.cmp(&groups[a].truncated);
        most.then(scattered(a).total_cmp(&scattered(b)))
    });
    truncated.truncate(fifth);
    let flat: Vec<usize> = (0..count).filter(|&at| groups[at].no_spread).collect();
    let flat = evenly(flat.len(), fifth).map(|at| flat[at]).collect();
    let logged: Vec<usize> = (0..count).filter(|&at| groups[at].tokens).collect();
    let logged = evenly(logged.len(), fifth).map(|at| logged[at]).collect();
    vec![
        (Tag::End, vec![0, count - 1]),
        (Tag::Even, evenly(count, most).collect()),
        (Tag::Best, best),
        (Tag::Worst, worst),
        (Tag::Truncated, truncated),
        (Tag::NoSpread, flat),
        (Tag::Tokens, logged),
    ]
}

/// A low-discrepancy sequence from 0 to 1: the fractional parts of multiples of the golden
/// ratio.
pub fn scattered(at: usize) -> f64 {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    (at as f64 * GOLDEN).fract()
}

/// Up to `most` of `count` indices in an order of which every prefix is evenly spread.
fn evenly(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let at = move |k: usize| (scattered(k) * count as f64) as usize;
    let tries = if count == 0 { 0 } else { most.saturating_mul(2) };
    (1..=tries).map(at).take(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(count: usize) -> Vec<GroupFacts> {
        let group = |at: usize| GroupFacts {
            size: 8,
            truncated: usize::from(at == 777),
            mean: at as f64,
            no_spread: at == 333,
            tokens: at % 100 == 50,
        };
        (0..count).map(group).collect()
    }

    #[test]
    fn the_ends_the_best_the_worst_the_truncated_and_the_flat_are_selected_within_the_limit() {
        let selected = select(&groups(8000), 400);
        let samples = selected.len() * 8;
        assert!((392..=400).contains(&samples), "{samples}");
        for (at, tag) in [
            (0, Tag::End),
            (7999, Tag::End),
            (7998, Tag::Best),
            (1, Tag::Worst),
            (777, Tag::Truncated),
            (333, Tag::NoSpread),
        ] {
            assert!(selected[&at].contains(&tag), "{at}: {selected:?}");
        }
        let thirds = [0..2667, 2667..5334, 5334..8000];
        for third in thirds {
            let inside = selected.keys().filter(|at| third.contains(*at)).count();
            assert!(inside >= 8, "{inside} in {third:?}");
        }
    }

    #[test]
    fn of_groups_that_are_equally_good_some_of_all_times_are_selected() {
        let same = GroupFacts { size: 8, truncated: 0, mean: 0.0, no_spread: true, tokens: false };
        let selected = select(&vec![same; 1000], 400);
        for tag in [Tag::Best, Tag::Worst, Tag::NoSpread] {
            let tagged = selected.iter().filter(|(_, tags)| tags.contains(&tag));
            let late = tagged.clone().filter(|(at, _)| **at >= 500).count();
            let total = tagged.count();
            assert!(late >= total / 4 && late <= total - total / 4, "{tag:?}: {late} of {total}");
        }
    }

    #[test]
    fn all_groups_are_selected_where_there_is_room_and_one_where_there_is_none() {
        assert_eq!(select(&groups(10), 80).len(), 10);
        assert_eq!(select(&groups(10), 1).len(), 1);
        assert!(select(&[], 10).is_empty());
    }
}
