//! Sequences that ranks split (Ulysses, arXiv:2309.14509).

use crate::estimate::Context;
use crate::technique::prelude::*;

impl Context<'_> {
    /// Extra bytes kept by sequence-parallel attention for `tokens` tokens: queries, keys and values of some heads over
    /// all tokens, and what is mixed of them; and what lies in a message of the former, on both sides.
    pub fn shared_attention(&self, tokens: u64) -> [u64; 2] {
        if self.parallel.sequence == 1 {
            return [0; 2];
        }
        let copies = self.parallel.key_copies(self.arch.num_kv_heads as u64);
        let [q, k] = self.widths.query_key_widths();
        let there = q + 2 * copies * k;
        [there + q, 2 * there].map(|numbers| self.parallel.inside(self.sizes.width * tokens * numbers))
    }
}

pub(crate) struct Ulysses;

impl Technique for Ulysses {
    fn about(&self) -> About {
        About { keys: &["memory.ulysses_sequence_parallel_size"], kind: TechniqueKind::Parallelism, examples: &[] }
    }
}
