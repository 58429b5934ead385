//! Sequences that ranks split (Ulysses, arXiv:2309.14509).

use crate::technique::prelude::*;

pub(crate) struct Ulysses;

impl Technique for Ulysses {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.ulysses_sequence_parallel_size"]
    }

    fn is_parallelism(&self) -> bool {
        true
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        at_least_one("ulysses_sequence_parallel_size", memory.ulysses_sequence_parallel_size)
    }
}
