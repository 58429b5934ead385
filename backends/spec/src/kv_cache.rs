//! The paged KV cache as numbers: blocks, the type that keys and values are stored in, and their bytes.

use crate::Arch;
use serde::{Deserialize, Serialize};

/// Tokens of a block of the KV cache (vLLM's `block_size`).
pub const BLOCK_SIZE: usize = 16;

/// How keys and values are stored in the cache (vLLM's `kv_cache_dtype`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// In the precision of the model that samples.
    #[default]
    Auto,
    /// In 8 bits per number, with a scale for each token and head.
    Int8,
}

impl KvCacheDtype {
    /// Bytes of one token's keys and values of one layer, where floats have `width` bytes.
    #[must_use]
    pub fn layer_bytes_per_token(self, arch: &Arch, width: usize) -> usize {
        let numbers = 2 * arch.num_kv_heads * arch.head_dim;
        match self {
            Self::Auto => numbers * width,
            // the scales of a key and its value share four bytes
            Self::Int8 => numbers + 4 * arch.num_kv_heads,
        }
    }
}
