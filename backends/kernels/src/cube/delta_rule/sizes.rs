//! Sizes that follow from the dimensions of heads, known when a kernel is compiled.

use crate::delta::DeltaHeads;

/// Widest key or value: a unit has a column or a row of a state in registers.
const MAX_DIM: usize = 256;

/// Numbers of shared memory for queries and keys of a tile, or for all that the tile of a chunk needs: 12 KiB.
const STAGED: usize = 3072;

/// Units that sum the squares of a vector.
pub(crate) const PARTS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sizes {
    pub key_dim: usize,
    pub value_dim: usize,
}

/// States that a run through sequences keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keep {
    /// The last ones of sequences that others go on behind.
    Ends,
    /// The last ones, in the pool that the first ones come from.
    Pool,
    /// Those before each chunk, and [`Self::Ends`]; instead of the output, what each token finds changed.
    Chunks,
}

impl Sizes {
    /// `None` for heads that are too wide.
    pub(super) fn new(heads: DeltaHeads) -> Option<Self> {
        let DeltaHeads { key_dim, value_dim, .. } = heads;
        let fits = |dim| (1..=MAX_DIM).contains(&dim);
        let grouped = heads.keys > 0 && heads.values.is_multiple_of(heads.keys);
        let sizes = Self { key_dim, value_dim };
        (fits(key_dim) && fits(value_dim) && grouped).then_some(sizes)
    }

    /// Units of a cube that has columns of a state, and cubes of a state.
    pub(super) const fn units(self) -> usize {
        if self.value_dim > 32 { 64 } else { 32 }
    }

    pub(super) const fn slices(self) -> usize {
        self.value_dim.div_ceil(self.units())
    }

    /// Units of a cube that has all rows of a state: a power of two.
    pub(super) const fn row_units(self) -> usize {
        if self.key_dim > 32 { self.key_dim.next_power_of_two() } else { 32 }
    }

    /// Tokens whose queries and keys are in shared memory at a time: they divide a chunk.
    pub(super) const fn tile(self) -> usize {
        Self::tokens(2 * self.key_dim)
    }

    /// [`Self::tile`] with the tokens' values in shared memory too, three vectors of each.
    pub(super) const fn chunk_tile(self) -> usize {
        Self::tokens(2 * self.key_dim + 3 * self.value_dim)
    }

    /// A power of two, at most eight.
    const fn tokens(numbers: usize) -> usize {
        match STAGED / numbers {
            0..=1 => 1,
            2..=3 => 2,
            4..=7 => 4,
            _ => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::CHUNK;

    fn heads(key_dim: usize, value_dim: usize) -> DeltaHeads {
        DeltaHeads { keys: 2, values: 4, key_dim, value_dim }
    }

    #[test]
    fn tiles_divide_chunks_and_fit_in_the_shared_memory_that_webgpu_guarantees() {
        for (key_dim, value_dim) in (1..=MAX_DIM).flat_map(|k| (1..=MAX_DIM).map(move |v| (k, v))) {
            let sizes = Sizes::new(heads(key_dim, value_dim)).expect("not too wide");
            assert!(CHUNK.is_multiple_of(sizes.tile()));
            let norms = 2 * sizes.tile() * PARTS;
            let run = 2 * key_dim * sizes.tile() + norms;
            let tile = sizes.chunk_tile();
            let chunk = (2 * key_dim + 3 * value_dim) * tile + 2 * tile * PARTS;
            let bytes = 4 * run.max(chunk + sizes.row_units());
            assert!(bytes <= 16 << 10, "{sizes:?}: {bytes} bytes");
            assert!(sizes.units() * sizes.slices() >= value_dim && sizes.row_units() >= key_dim);
        }
        assert_eq!(Sizes::new(heads(MAX_DIM + 1, 8)), None);
        assert_eq!(Sizes::new(heads(8, MAX_DIM + 1)), None);
    }
}
