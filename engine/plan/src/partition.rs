//! Shards of parameters on data-parallel ranks (`ZeRO`, arXiv:1910.02054).

use std::ops::Range;

/// Elements that shards are rounded to: those that share a scale in 8-bit moments, so that no block is cut.
const BLOCK: usize = 256;

/// A rank among those that shard state. A parameter is taken flat, row by row, and cut into as many parts of equal
/// length as there are ranks; the last ones may be shorter or empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    ranks: usize,
    rank: usize,
}

impl Default for Partition {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl Partition {
    /// Everything: one rank has it all.
    pub const WHOLE: Self = Self { ranks: 1, rank: 0 };

    /// Rank `rank` of `ranks`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn new(ranks: usize, rank: usize) -> Self {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        Self { ranks, rank }
    }

    /// True if nothing is sharded.
    pub fn is_whole(self) -> bool {
        self.ranks == 1
    }

    /// The number of ranks.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// Largest shard of a parameter: `ceil(numel / (256 ranks)) · 256` elements. In messages every shard is padded to
    /// this length.
    pub fn part(self, numel: usize) -> usize {
        numel.div_ceil(BLOCK * self.ranks) * BLOCK
    }

    /// This rank's elements of a parameter of `numel`.
    pub fn range(self, numel: usize) -> Range<usize> {
        self.range_of(self.rank, numel)
    }

    /// The elements of another rank.
    pub fn range_of(self, rank: usize, numel: usize) -> Range<usize> {
        let part = self.part(numel);
        (rank * part).min(numel)..((rank + 1) * part).min(numel)
    }

    /// A matrix for the elements of a shard, in their order: with up to 256 columns, so that whole blocks are whole
    /// rows.
    pub fn shape(len: usize) -> [usize; 2] {
        let columns = 1 << len.trailing_zeros().min(BLOCK.trailing_zeros());
        [len / columns, columns]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_whole_blocks_and_cover_a_parameter_once() {
        for numel in [1, 255, 256, 257, 1000, 2048, 4097] {
            for ranks in [1, 2, 3, 4, 7] {
                let shards: Vec<Range<usize>> =
                    (0..ranks).map(|rank| Partition::new(ranks, rank).range(numel)).collect();
                let covered: Vec<usize> = shards.iter().cloned().flatten().collect();
                assert_eq!(covered, (0..numel).collect::<Vec<_>>());
                let part = Partition::new(ranks, 0).part(numel);
                assert!(part < numel.div_ceil(ranks) + BLOCK, "{numel} on {ranks}");
                for shard in shards {
                    assert!(shard.len() <= part);
                    assert!(shard.is_empty() || shard.start.is_multiple_of(BLOCK));
                }
            }
        }
        assert_eq!(Partition::WHOLE.range(1000), 0..1000);
    }

    #[test]
    fn a_shard_is_a_matrix_of_whole_blocks() {
        assert_eq!(Partition::shape(1024), [4, 256]);
        assert_eq!(Partition::shape(96), [3, 32]);
        assert_eq!(Partition::shape(7), [7, 1]);
        assert_eq!(Partition::shape(0), [0, 256]);
    }
}
