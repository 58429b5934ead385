//! The paged KV cache as numbers: blocks, the type that keys and values are stored in, and how large its pools are.

use crate::Arch;
use crate::arch::Mixer;
use firebrick_spec::BLOCK_SIZE;
use serde::{Deserialize, Serialize};

/// Format of keys and values in the cache (vLLM's `kv_cache_dtype`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// The precision of the sampler.
    #[default]
    Auto,
    /// 8 bits per element, with a scale per token and head.
    Int8,
}

impl KvCacheDtype {
    /// Bytes of one token's keys and values in one layer, where floats have `width` bytes.
    pub fn layer_bytes_per_token(self, arch: &Arch, width: usize) -> usize {
        let numbers = 2 * arch.num_kv_heads * arch.head_dim;
        match self {
            Self::Auto => numbers * width,
            // the scales of a key and its value share four bytes
            Self::Int8 => numbers + 4 * arch.num_kv_heads,
        }
    }
}

/// Layers with the same sliding window. Their sequences have one block table, and one pool of block numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheGroup {
    /// The sliding window, in tokens; `None` for layers that see the whole sequence.
    pub window: Option<usize>,
    /// Number of layers.
    pub layers: usize,
}

impl KvCacheGroup {
    /// The groups of an architecture, in the order of their first layers.
    pub fn from_arch(arch: &Arch) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        let attend = arch.windows.iter().zip(&arch.mixers).filter(|(_, mixer)| **mixer == Mixer::Attention);
        for (&window, _) in attend {
            match groups.iter_mut().find(|group| group.window == window) {
                Some(group) => group.layers += 1,
                None => groups.push(Self { window, layers: 1 }),
            }
        }
        groups
    }

    /// Most blocks that a sequence of `tokens` tokens has while it is decoded: blocks outside of the window are given
    /// back.
    pub fn blocks_per_sequence(&self, tokens: usize) -> usize {
        let blocks = tokens.div_ceil(BLOCK_SIZE);
        match self.window {
            // a window touches one block more where it does not begin with one
            Some(window) => blocks.min(window.div_ceil(BLOCK_SIZE) + 1),
            None => blocks,
        }
    }

    /// The fewest blocks with which a sequence of `tokens` tokens can be sampled, if its prompt is prefilled `chunk`
    /// tokens at a time.
    fn min_blocks(&self, tokens: usize, chunk: usize) -> usize {
        let blocks = tokens.div_ceil(BLOCK_SIZE);
        match self.window {
            // a chunk's own blocks are given back after it
            Some(_) => blocks.min(self.blocks_per_sequence(tokens) + chunk.div_ceil(BLOCK_SIZE) + 1),
            None => blocks,
        }
    }
}

/// Bytes of the states of linear attention of one sequence, all layers: those of the delta rule in f32, the last inputs
/// of convolutions in the precision that it runs in. None without such layers.
pub fn state_bytes(arch: &Arch) -> usize {
    let [recurrent, convolution] = arch.state_numbers();
    4 * recurrent + arch.precision.width() as usize * convolution
}

/// Bytes of a choice of an expert in a table of routes.
pub const ROUTE_BYTES: usize = 2;

/// Bytes on the host of the table of routes beside pools of `blocks`: one of each slot of the layers that see the whole
/// sequence. None without experts, nor where every layer has a window.
pub fn route_bytes(arch: &Arch, blocks: &[usize]) -> usize {
    let mut whole = KvCacheGroup::from_arch(arch).into_iter().zip(blocks).filter(|(group, _)| group.window.is_none());
    let blocks = whole.next().map_or(0, |(_, blocks)| *blocks);
    blocks * BLOCK_SIZE * arch.route_width() * ROUTE_BYTES
}

/// Slots of states while `running` sequences are decoded at a time: theirs, those of prompts that wait for their turn
/// (an eighth of them), and those that are kept for prompts that begin alike (as many).
pub fn state_slots(running: usize) -> usize {
    running + 2 * running.div_ceil(8)
}

/// Demand on a cache: sequences, their lengths, and the format of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheDemand {
    /// Sequences that are decoded at a time.
    pub sequences: usize,
    /// Tokens of the longest sequence, prompt and completion.
    pub longest: usize,
    /// Tokens of a forward pass over prompts.
    pub prefill_tokens: usize,
    /// All sequences. If there are more than are decoded at a time, prompts are prefilled while others are decoded.
    pub total: usize,
    /// Format of keys and values.
    pub dtype: KvCacheDtype,
    /// Bytes of a float.
    pub width: usize,
}

impl KvCacheDemand {
    fn block_bytes(&self, arch: &Arch, group: &KvCacheGroup) -> u64 {
        let token = group.layers * self.dtype.layer_bytes_per_token(arch, self.width);
        (token * BLOCK_SIZE) as u64
    }

    /// The fewest bytes with which every sequence can be sampled: those of one of the longest.
    pub fn least_bytes(&self, arch: &Arch) -> u64 {
        self.bytes(arch, &self.min_blocks(arch))
    }

    /// The fewest blocks of each group with which every sequence can be sampled.
    fn min_blocks(&self, arch: &Arch) -> Vec<usize> {
        let groups = KvCacheGroup::from_arch(arch).into_iter();
        groups.map(|group| group.min_blocks(self.longest, self.prefill_tokens)).collect()
    }

    /// Blocks of each group's pool: as many as the sequences may ever need, or what `limit` bytes allow. `None` where
    /// these are fewer than [`Self::least_bytes`].
    pub fn blocks(&self, arch: &Arch, limit: Option<u64>) -> Option<Vec<usize>> {
        let groups = KvCacheGroup::from_arch(arch);
        let least = self.min_blocks(arch);
        let wanted = groups.iter().zip(&least).map(|(group, &least)| {
            let staged = match group.window {
                None if self.total <= self.sequences => 0,
                _ => self.prefill_tokens.div_ceil(BLOCK_SIZE) + 1,
            };
            // no more than all sequences have, so that a sequence more at a time never needs less
            let total = self.total.saturating_mul(self.longest.div_ceil(BLOCK_SIZE));
            let decoded = self.sequences * group.blocks_per_sequence(self.longest);
            (decoded + staged).min(total).max(least)
        });
        let wanted: Vec<usize> = wanted.collect();
        let Some(limit) = limit else {
            return Some(wanted);
        };
        let rest = limit.checked_sub(self.least_bytes(arch))?;
        let extra = |i: usize| (wanted[i] - least[i]) as u64 * self.block_bytes(arch, &groups[i]);
        let more: u64 = (0..groups.len()).map(extra).sum();
        let share = if more == 0 { 1.0 } else { rest as f64 / more as f64 };
        let allowed = least
            .iter()
            .zip(&wanted)
            .map(|(&least, &wanted)| least + ((wanted - least) as f64 * share.min(1.0)) as usize);
        Some(allowed.collect())
    }

    /// Bytes of all pools with these blocks.
    pub fn bytes(&self, arch: &Arch, blocks: &[usize]) -> u64 {
        KvCacheGroup::from_arch(arch)
            .iter()
            .zip(blocks)
            .map(|(group, &blocks)| blocks as u64 * self.block_bytes(arch, group))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::path::Path;

    fn arch(family: &str) -> Arch {
        let Value::Object(config) = json!({
            "model_type": family, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 40
        }) else {
            unreachable!("an object")
        };
        Arch::from_config(&config, Path::new(family)).expect("a valid architecture")
    }

    fn demand(sequences: usize, total: usize, longest: usize) -> KvCacheDemand {
        KvCacheDemand { sequences, longest, prefill_tokens: 128, total, dtype: KvCacheDtype::Auto, width: 4 }
    }

    #[test]
    fn eight_bits_take_at_most_28_percent_of_f32() {
        for family in ["llama", "gemma2"] {
            let arch = arch(family);
            let bytes = |dtype: KvCacheDtype| dtype.layer_bytes_per_token(&arch, 4) as f64;
            let share = bytes(KvCacheDtype::Int8) / bytes(KvCacheDtype::Auto);
            assert!((share - 68.0 / 256.0).abs() < 1e-12 && share < 0.28);
        }
    }

    #[test]
    fn a_limit_below_one_sequence_is_refused() {
        for family in ["llama", "gemma2", "mistral"] {
            let (arch, demand) = (arch(family), demand(8, 64, 300));
            let least = demand.least_bytes(&arch);
            assert_eq!(demand.blocks(&arch, Some(least - 1)), None);
            let blocks = demand.blocks(&arch, Some(least)).expect("one sequence");
            assert_eq!(demand.bytes(&arch, &blocks), least);
        }
    }

    #[test]
    fn layers_with_a_window_need_fewer_blocks() {
        let groups = KvCacheGroup::from_arch(&arch("gemma2"));
        let mut blocks: Vec<_> = groups.iter().map(|g| g.blocks_per_sequence(800)).collect();
        blocks.sort_unstable();
        assert_eq!(blocks, [4, 50]);
    }

    #[test]
    fn pools_stay_within_their_limit_and_grow_with_the_sequences() {
        for (family, sequences) in ["llama", "gemma2", "mistral"]
            .into_iter()
            .flat_map(|family| [1, 2, 7, 39].map(|sequences| (family, sequences)))
        {
            let arch = arch(family);
            for (more, longest) in
                [0, 1, 2, 30].into_iter().flat_map(|more| [1, 15, 16, 17, 130, 399].map(|longest| (more, longest)))
            {
                let demand = demand(sequences, sequences + more, longest);
                let least = demand.least_bytes(&arch);
                let unlimited = demand.blocks(&arch, None).expect("no limit");
                for share in [1.0, 1.3, 2.0, 9.5, 40.0] {
                    let limit = (least as f64 * share) as u64;
                    let limited = demand.blocks(&arch, Some(limit)).expect("one sequence");
                    assert!(demand.bytes(&arch, &limited) <= limit);
                    assert!(limited.iter().zip(&unlimited).all(|(limited, most)| limited <= most));
                }
                let larger =
                    KvCacheDemand { sequences: sequences + 1, total: demand.total.max(sequences + 1), ..demand };
                let larger = larger.blocks(&arch, None).expect("no limit");
                assert!(larger.iter().zip(&unlimited).all(|(larger, smaller)| larger >= smaller));
            }
        }
    }
}
