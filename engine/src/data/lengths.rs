//! Statistics of lengths in tokens.

use serde::Serialize;

/// Maximum bins of a histogram.
const MAX_BINS: usize = 10;

/// Statistics of lengths in tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lengths {
    /// Number of lengths.
    pub counted: u64,
    /// Minimum.
    pub min: usize,
    /// Median.
    pub median: usize,
    /// 95th percentile.
    pub p95: usize,
    /// Maximum.
    pub max: usize,
    /// Mean.
    pub mean: f64,
    /// Counts in ranges of equal width.
    pub histogram: Vec<Bin>,
}

/// A range of lengths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bin {
    /// Minimum, inclusive.
    pub from: usize,
    /// Maximum, inclusive.
    pub to: usize,
    /// Number of lengths in it.
    pub count: u64,
}

impl Lengths {
    /// Statistics of some lengths; `None` without any.
    pub fn new(mut lengths: Vec<usize>) -> Option<Self> {
        lengths.sort_unstable();
        let (&min, &max) = (lengths.first()?, lengths.last()?);
        // the smallest length that a share of all do not exceed
        let percentile = |percent: usize| lengths[(lengths.len() * percent).div_ceil(100).max(1) - 1];
        let width = width(max - min + 1);
        let start = min / width * width;
        let bins = (max - start) / width + 1;
        let bin = |i: usize| {
            let (from, to) = (start + i * width, start + (i + 1) * width - 1);
            let below = |limit: usize| lengths.partition_point(|&length| length < limit);
            let count = (below(to + 1) - below(from)) as u64;
            Bin { from, to, count }
        };
        Some(Self {
            counted: lengths.len() as u64,
            min,
            median: percentile(50),
            p95: percentile(95),
            max,
            mean: lengths.iter().sum::<usize>() as f64 / lengths.len() as f64,
            histogram: (0..bins).map(bin).collect(),
        })
    }
}

/// The smallest of 1, 2, 5, 10, 20, … that covers a span with [`MAX_BINS`] bins.
fn width(span: usize) -> usize {
    let mut power = 1;
    loop {
        for step in [1, 2, 5] {
            // one bin less, since the first one begins at a multiple
            if step * power * (MAX_BINS - 1) >= span {
                return step * power;
            }
        }
        power *= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_summed_up() {
        assert_eq!(Lengths::new(Vec::new()), None);
        let lengths = Lengths::new((1..=100).rev().collect()).expect("some");
        assert_eq!((lengths.min, lengths.median, lengths.p95, lengths.max), (1, 50, 95, 100));
        assert!((lengths.mean - 50.5).abs() < 1e-9);
        let first = &lengths.histogram[0];
        assert_eq!((first.from, first.to, first.count), (0, 19, 19));
        let one = Lengths::new(vec![7]).expect("one");
        assert_eq!((one.median, one.p95, one.histogram.len()), (7, 7, 1));
    }

    proptest! {
        #[test]
        fn every_length_lies_in_one_bin(lengths in prop::collection::vec(0usize..5000, 1..200)) {
            let counted = lengths.len() as u64;
            let lengths = Lengths::new(lengths).expect("some");
            prop_assert_eq!(lengths.histogram.iter().map(|bin| bin.count).sum::<u64>(), counted);
            prop_assert!(lengths.histogram.len() <= MAX_BINS);
            let neighbours = lengths.histogram.windows(2);
            for pair in neighbours {
                prop_assert_eq!(pair[0].to + 1, pair[1].from);
            }
        }
    }
}
