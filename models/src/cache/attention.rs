//! Attention of new columns over a cache, reading what is alive.
//!
//! Rows with windows of much different length are scored in bands of neighbouring rows, each from the first column of its
//! own longest window on; a layer with a sliding window reads no more than that. What a band still reads in vain is hidden
//! by a mask. A band costs a few operations of its own, so there are as few as pay: one where all windows are alike.
//! Where a kernel decodes, it reads each sequence's live columns and no others, and there are neither bands nor masks.
//! Many columns at once (a prompt) are scored a few queries at a time, each chunk up to its own last column.

use super::{KvCache, LayerCache};
use crate::arch::Arch;
use crate::attention::{AttentionParams, scaled_dot_product_attention};
use burn::tensor::{Bool, Device, Tensor, TensorData};
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels::{self, Decoded, Families, Family, Operation};
use std::ops::Range;

/// Keys read in vain (rows times columns) that cost as much as the operations of another band: measured on a CPU with 8 heads
/// of 32; a GPU reads faster, and waits longer for a launch.
const BAND_COST: [usize; 2] = [256, 65_536];

/// Most bands of a forward.
const BANDS: usize = 8;

/// Queries of a prompt that are scored together: their scores are `[rows, heads, QUERIES, keys]`.
const QUERIES: usize = 256;

/// Rows and queries that are scored together, and the columns of the keys they read.
#[derive(Clone, Debug)]
struct Block {
    rows: Range<usize>,
    /// Columns of this forward.
    queries: Range<usize>,
    /// Columns of the cache.
    keys: Range<usize>,
    mask: Option<Tensor<4, Bool>>,
}

/// What the queries of one forward see of a cache. Made once, used by every layer.
#[derive(Clone, Debug)]
pub(crate) struct Reach {
    first: usize,
    /// The sequences, where a kernel decodes one token of each and needs no blocks.
    fused: Option<Decoded>,
    /// Rows of a forward that begins the sequences, where a kernel attends over whole ones.
    prompts: Option<Families>,
    /// Blocks by a layer's sliding window.
    blocks: Vec<(Option<usize>, Vec<Block>)>,
}

impl Reach {
    /// For the next `len` columns of a cache's sequences.
    pub fn new(arch: &Arch, cache: &KvCache, len: usize, device: &Device) -> Self {
        let (starts, first) = (cache.starts(), cache.used());
        let available = kernels::available(Operation::DecodeAttention, device);
        // the CPU's kernel has no half precision
        let known = available && !(is_cpu(device) && arch.precision.is_half());
        if len == 1 && known {
            return Self {
                first,
                fused: Some(Decoded::new(cache.kin(), starts.len(), device)),
                prompts: None,
                blocks: Vec::new(),
            };
        }
        if first == 0 && len > 1 && kernels::available(Operation::Attention, device) {
            return Self {
                first,
                fused: None,
                prompts: Some(prompts(starts, len, device)),
                blocks: Vec::new(),
            };
        }
        let cost = BAND_COST[usize::from(!is_cpu(device))];
        let mut blocks: Vec<(Option<usize>, Vec<Block>)> = Vec::new();
        for &window in &arch.windows {
            if blocks.iter().all(|(w, _)| *w != window) {
                let cut = cut(starts, window, first, len, cost);
                let masked = cut.into_iter().map(|block| Block {
                    mask: block.mask(starts, window, first, device),
                    ..block
                });
                blocks.push((window, masked.collect()));
            }
        }
        Self {
            first,
            fused: None,
            prompts: None,
            blocks,
        }
    }

    /// The rows of each sequence that begins with this forward pass, where [`attend_rows`](crate::attention::attend_rows) attends.
    pub fn prompts(&self) -> Option<&Families> {
        self.prompts.as_ref()
    }

    /// The sequences, where [`LayerCache::decode`](super::LayerCache::decode) attends.
    pub fn decoded(&self) -> Option<&Decoded> {
        self.fused.as_ref()
    }

    /// The column of the first query.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Softmax attention over keys and values `[rows, kv_heads, capacity, head_dim]`, in the shape of the queries.
    ///
    /// Where there is no kernel that does it: [`Self::decoded`] and [`Self::prompts`] have none.
    pub fn attend(
        &self,
        params: AttentionParams,
        q: &Tensor<4>,
        keys: &Tensor<4>,
        values: &Tensor<4>,
    ) -> Tensor<4> {
        let blocks = self.blocks.iter().find(|(w, _)| *w == params.window);
        let blocks = blocks.map_or(&[][..], |(_, blocks)| blocks);
        let mut mixed: Vec<Tensor<4>> = blocks
            .iter()
            .map(|block| {
                let cut = |t: &Tensor<4>, columns: &Range<usize>| {
                    let rows = t.clone().narrow(0, block.rows.start, block.rows.len());
                    rows.narrow(2, columns.start, columns.len())
                };
                let q = cut(q, &block.queries);
                let [k, v] = [keys, values].map(|t| cut(t, &block.keys));
                scaled_dot_product_attention(q, k, v, params, block.mask.clone())
            })
            .collect();
        match mixed.len() {
            1 => mixed.remove(0),
            // one query: bands of rows; several: chunks of queries
            _ => Tensor::cat(mixed, if q.dims()[2] > 1 { 2 } else { 0 }),
        }
    }
}

impl LayerCache {
    /// Writes the keys and values of new columns, `[rows, kv_heads, columns, head_dim]` each.
    pub(crate) fn enter(&mut self, k: Tensor<4>, v: Tensor<4>, reach: &Reach) {
        self.write(0..k.dims()[0], reach.first(), k, v);
    }

    /// Writes the keys and values of new columns, and attends over the cache with their queries: `[rows, heads, columns, head_dim]`
    /// each.
    pub(crate) fn attend(
        &mut self,
        params: AttentionParams,
        [q, k, v]: [Tensor<4>; 3],
        reach: &Reach,
    ) -> Tensor<4> {
        self.enter(k, v, reach);
        let (keys, values) = self.whole();
        reach.attend(params, &q, &keys, &values)
    }
}

/// The rows of sequences padded on the left to `len` columns, without the padding.
fn prompts(starts: &[usize], len: usize, device: &Device) -> Families {
    let rows = starts.iter().enumerate().map(|(row, &start)| {
        let own = row * len + start.min(len)..(row + 1) * len;
        Family {
            prefix: own.start..own.start,
            members: vec![own],
        }
    });
    let begun = rows.filter(|family| !family.members[0].is_empty());
    Families::new(begun.collect(), device)
}

impl Block {
    /// True where a key is hidden, `[rows, 1, queries, keys]`. `None` where every key is visible.
    fn mask(
        &self,
        starts: &[usize],
        window: Option<usize>,
        first: usize,
        device: &Device,
    ) -> Option<Tensor<4, Bool>> {
        let hidden = |start: usize, query: usize, key: usize| {
            key > query || key < start || window.is_some_and(|w| query - key >= w)
        };
        let mut values = Vec::with_capacity(self.rows.len() * self.queries.len() * self.keys.len());
        for &start in &starts[self.rows.clone()] {
            for query in self.queries.clone() {
                values.extend(
                    self.keys
                        .clone()
                        .map(|key| hidden(start, first + query, key)),
                );
            }
        }
        let shape = [self.rows.len(), 1, self.queries.len(), self.keys.len()];
        let any = values.contains(&true);
        any.then(|| Tensor::<4, Bool>::from_data(TensorData::new(values, shape), device))
    }
}

/// The blocks of a forward, their masks left out.
fn cut(
    starts: &[usize],
    window: Option<usize>,
    first: usize,
    len: usize,
    cost: usize,
) -> Vec<Block> {
    let oldest = |query: usize| window.map_or(0, |w| (first + query + 1).saturating_sub(w));
    let lowest = |rows: &Range<usize>| starts[rows.clone()].iter().copied().min().unwrap_or(0);
    let block = |rows: Range<usize>, queries: Range<usize>| {
        // a row that has not begun sees nothing, and still reads its own column
        let from = lowest(&rows)
            .max(oldest(queries.start))
            .min(first + queries.start);
        Block {
            keys: from..first + queries.end,
            rows,
            queries,
            mask: None,
        }
    };
    if len > 1 {
        let chunks = (0..len).step_by(QUERIES);
        return chunks
            .map(|from| block(0..starts.len(), from..(from + QUERIES).min(len)))
            .collect();
    }
    let reach = |row: usize| first + 1 - starts[row].max(oldest(0)).min(first);
    bands(starts.len(), reach, cost)
        .into_iter()
        .map(|rows| block(rows, 0..1))
        .collect()
}

/// Neighbouring rows that are scored together, so that few keys are read in vain: from even bands, neighbours are joined as
/// long as that costs less than a band.
fn bands(rows: usize, reach: impl Fn(usize) -> usize, cost: usize) -> Vec<Range<usize>> {
    let size = rows.div_ceil(BANDS).max(1);
    let even = (0..rows).step_by(size).map(|r| r..(r + size).min(rows));
    let longest = |band: Range<usize>| band.map(&reach).max().unwrap_or(0);
    let mut bands: Vec<(Range<usize>, usize)> = even.map(|b| (b.clone(), longest(b))).collect();
    let joined = |a: &(Range<usize>, usize), b: &(Range<usize>, usize)| {
        let (both, most) = (a.0.start..b.0.end, a.1.max(b.1));
        let more = both.len() * most - a.0.len() * a.1 - b.0.len() * b.1;
        (more, (both, most))
    };
    while let Some((more, at)) = (1..bands.len())
        .map(|i| (joined(&bands[i - 1], &bands[i]).0, i))
        .min()
    {
        if more >= cost {
            break;
        }
        bands[at - 1] = joined(&bands[at - 1], &bands[at]).1;
        bands.remove(at);
    }
    bands.into_iter().map(|(band, _)| band).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_alike_are_one_band() {
        assert_eq!(bands(64, |_| 100, 256), vec![0..64; 1]);
        assert!(bands(0, |_| 100, 256).is_empty());
    }

    #[test]
    fn a_few_long_rows_are_scored_apart_from_many_short_ones() {
        let reach = |row: usize| if row < 8 { 1000 } else { 10 };
        assert_eq!(bands(64, reach, 256), [0..8, 8..64]);
        assert_eq!(bands(64, reach, 1 << 20), vec![0..64; 1]);
    }

    #[test]
    fn a_sliding_window_bounds_what_is_read() {
        let blocks = cut(&[0, 4], Some(8), 20, 1, 256);
        assert_eq!((blocks.len(), blocks[0].keys.clone()), (1, 13..21));
        let whole = cut(&[3, 4], None, 20, 1, 256);
        assert_eq!(whole[0].keys, 3..21);
    }

    #[test]
    fn chunks_of_queries_read_up_to_their_own_last_column() {
        let blocks = cut(&[0, 2], None, 10, QUERIES + 4, 256);
        let read: Vec<_> = blocks
            .iter()
            .map(|b| (b.queries.clone(), b.keys.clone()))
            .collect();
        let (a, b) = (0..QUERIES, QUERIES..QUERIES + 4);
        assert_eq!(read, [(a, 0..10 + QUERIES), (b, 0..14 + QUERIES)]);
    }
}
