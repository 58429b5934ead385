//! The KV cache in pages: keys and values of many sequences in blocks of [`BLOCK_SIZE`] tokens (`PagedAttention`, Kwon
//! et al., 2023, arXiv:2309.06180).
//!
//! Every layer has one pool of blocks, allocated once. A sequence has a [`BlockTable`]: the numbers of its blocks, the
//! same ones in all layers that see as much of it. Sequences begin, grow, end and are preempted by editing tables; keys
//! and values do not move.
//!
//! ```text
//! prompt of 40 tokens, two completions     blocks   7 8 9 | 12        pool of a layer: [kv_heads, blocks · 16, head_dim]
//!                                                   7 8 4 | 13        7 and 8 are full and shared; 4 is a copy of 9
//! ```
//!
//! - [`KvCache::fork`] shares all blocks of a sequence with another one. Whoever writes to a last block that is shared,
//!   or kept with other tokens for later sequences, gets a copy of it first (copy on write).
//! - Layers with a sliding window give blocks back that no later token sees. Layers with different windows have
//!   separate block numbers.
//! - With linear attention a sequence also has a slot of states, which a fork copies.
//! - Full blocks are kept after their sequence has ended, until the pool needs them: a sequence that begins with the
//!   same tokens shares them (prefix caching). With linear attention it has to find states too, which are kept at some
//!   boundaries: at the end of prompts and turns, and where prompts part. A cache belongs to the weights that filled
//!   it, so one is made for each generator.

mod attention;
mod block_pool;
mod block_table;
mod layer_cache;
mod linear;
mod metadata;
mod prefix_caching;
mod prefix_index;
mod routes;
mod states;
mod step;
#[cfg(test)]
mod tests;

pub use block_table::BlockTable;
pub use firebrick_spec::BLOCK_SIZE;
pub(crate) use layer_cache::LayerCache;
pub(crate) use metadata::Decode;
pub use metadata::{AttentionMetadata, Chunk};
pub use states::Boundary;

use crate::arch::{Arch, Mixer};
use crate::delta_net::LayerStates;
use crate::routing::Routes;
use block_pool::{BlockPool, ContentId};
use block_table::GroupTable;
use burn::tensor::{DType, Device};
use firebrick_arch::KvCacheDtype;
use firebrick_arch::kv_cache::{KvCacheGroup, state_bytes};
use firebrick_backends::PrecisionExt;
use firebrick_backends::kernels::KvPool;
use prefix_index::PrefixIndex;
use states::StateSlots;

/// The cache of a decoder.
#[derive(Debug)]
pub struct KvCache {
    /// Keys and values of layers that attend.
    layers: Vec<LayerCache>,
    /// States of layers of linear attention; there are none without [`Self::slots`].
    states: Vec<LayerStates>,
    /// Index of each layer in `layers` or `states`.
    places: Vec<usize>,
    /// The slots of states, in architectures that have any.
    slots: Option<StateSlots>,
    /// Bytes of a sequence's states, all layers.
    state_bytes: usize,
    groups: Vec<LayerGroup>,
    prefixes: PrefixIndex,
    /// The routes of the tokens in the slots of the widest group, in a model with experts.
    routes: Option<Routes>,
    dtype: KvCacheDtype,
    device: Device,
}

/// Layers with the same sliding window, and their blocks.
#[derive(Debug)]
struct LayerGroup {
    window: Option<usize>,
    pool: BlockPool,
    /// Bytes of a block, all layers of the group.
    block_bytes: usize,
    /// Blocks that are copied before the next forward pass, which hold a reference until then.
    copies: Vec<(u32, u32)>,
}

impl KvCache {
    /// Groups of an architecture's layers with the same sliding window, each of which has blocks of its own.
    pub fn groups(arch: &Arch) -> usize {
        KvCacheGroup::from_arch(arch).len()
    }

    /// Pools of zeros: `blocks` of each group of layers with the same sliding window, in the order of
    /// [`KvCacheGroup::from_arch`].
    ///
    /// # Panics
    /// If `blocks` has another length.
    pub fn new(arch: &Arch, blocks: &[usize], dtype: KvCacheDtype, device: &Device) -> Self {
        let groups = KvCacheGroup::from_arch(arch);
        assert_eq!(groups.len(), blocks.len(), "blocks of every group");
        let attend = arch.windows.iter().zip(&arch.mixers).filter(|(_, mixer)| **mixer == Mixer::Attention);
        let layers = attend.map(|(window, _)| {
            let group = groups.iter().position(|group| group.window == *window);
            let group = group.unwrap_or_else(|| unreachable!("every layer is in a group"));
            let (heads, dim) = (arch.num_kv_heads, arch.head_dim);
            let pool = match dtype {
                KvCacheDtype::Auto => {
                    let float = arch.precision.dtype(device);
                    KvPool::float(heads, blocks[group], dim, float, device)
                }
                KvCacheDtype::Int8 => KvPool::int8(heads, blocks[group], dim, device),
            };
            LayerCache::new(group, pool)
        });
        let token = dtype.layer_bytes_per_token(arch, arch.precision.width() as usize);
        let routes = Self::route_slots(arch, &groups, blocks);
        let place = |layer: usize| {
            let before = arch.mixers[..layer].iter();
            before.filter(|mixer| **mixer == arch.mixers[layer]).count()
        };
        let states = empty_states(arch, device);
        Self {
            routes,
            layers: layers.collect(),
            states,
            places: (0..arch.num_layers).map(place).collect(),
            slots: arch.delta_net.map(|_| StateSlots::default()),
            state_bytes: state_bytes(arch),
            groups: groups
                .iter()
                .zip(blocks)
                .map(|(group, &blocks)| LayerGroup {
                    window: group.window,
                    pool: BlockPool::new(blocks),
                    block_bytes: group.layers * token * BLOCK_SIZE,
                    copies: Vec::new(),
                })
                .collect(),
            prefixes: PrefixIndex::default(),
            dtype,
            device: device.clone(),
        }
    }

    /// Sets whether contents of ended sequences stay as long as there are blocks that were never used. Otherwise they
    /// go first, so that on the CPU, where unused blocks take no memory, the pools take what the sequences need at a
    /// time.
    pub fn keep_contents(&mut self, keep: bool) {
        for group in &mut self.groups {
            group.pool.keep_contents(keep);
        }
    }

    /// Format of keys and values.
    pub fn dtype(&self) -> KvCacheDtype {
        self.dtype
    }

    /// Bytes of all blocks after [`Self::grow`], without states.
    pub fn bytes_with(&self, blocks: &[usize]) -> usize {
        let bytes = |(group, &blocks): (&LayerGroup, &usize)| group.pool.len().max(blocks) * group.block_bytes;
        self.groups.iter().zip(blocks).map(bytes).sum()
    }

    /// Makes the pools at least as large as these blocks, a layer at a time. What they hold stays.
    pub fn grow(&mut self, blocks: &[usize]) {
        let widest = self.widest_index();
        for (index, (group, &blocks)) in self.groups.iter_mut().zip(blocks).enumerate() {
            if group.pool.len() >= blocks {
                continue;
            }
            group.pool.grow(blocks);
            if index == widest {
                self.routes.iter_mut().for_each(|routes| routes.resize(blocks * BLOCK_SIZE));
            }
            for layer in self.layers.iter_mut().filter(|layer| layer.group == index) {
                layer.grow(blocks);
            }
        }
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        let bytes = |group: &LayerGroup| group.pool.len() * group.block_bytes;
        self.groups.iter().map(bytes).sum::<usize>() + self.states_held()
    }

    /// Bytes of the blocks and states that sequences have, those apart that are kept for sequences to come.
    pub fn used_bytes(&self) -> usize {
        let bytes = |group: &LayerGroup| group.pool.used() * group.block_bytes;
        let states = self.slots.as_ref().map_or(0, StateSlots::used) * self.state_bytes;
        self.groups.iter().map(bytes).sum::<usize>() + states
    }

    /// Blocks that sequences have, of layers that see the whole sequence, or of those with the first window where all
    /// have one. A block that several sequences share counts once.
    pub fn used_blocks(&self) -> usize {
        self.widest().pool.used()
    }

    /// [`Self::used_blocks`] of one sequence: those that it shares count.
    pub fn blocks_of(&self, table: &BlockTable) -> usize {
        table.groups[self.widest_index()].blocks.len()
    }

    fn widest_index(&self) -> usize {
        self.groups.iter().position(|group| group.window.is_none()).unwrap_or(0)
    }

    fn widest(&self) -> &LayerGroup {
        &self.groups[self.widest_index()]
    }

    /// True if every group can allocate this many blocks.
    pub fn has_blocks(&self, blocks: usize) -> bool {
        self.groups.iter().all(|group| group.pool.available() >= blocks.min(group.pool.len()))
    }

    /// Gets blocks for `count` more tokens: first gives back blocks that no later token sees, and takes a copy of a
    /// last block that is shared, or kept for others with tokens after those of this sequence. False, and nothing new,
    /// where a pool has too few.
    pub fn append(&mut self, table: &mut BlockTable, count: usize) -> bool {
        self.trim(table);
        if !self.could_append(std::iter::once(&*table), count) {
            return false;
        }
        let end = (table.tokens + count).div_ceil(BLOCK_SIZE);
        let mut forgotten: Vec<ContentId> = Vec::new();
        for (group, table_group) in self.groups.iter_mut().zip(&mut table.groups) {
            let (tokens, partial) = (table.tokens, table.tokens % BLOCK_SIZE);
            let last = table_group.blocks.last().copied().filter(|_| partial > 0);
            if let Some(last) = last
                && group.copies_before_writing(last, partial, group.needed(table_group, tokens, count))
            {
                let at = table_group.blocks.len() - 1;
                let before = at.checked_sub(1).map(|at| table_group.blocks[at]);
                let (block, contents) = group.allocate(before, &mut self.prefixes);
                forgotten.extend(contents);
                // the copy is made before the next forward pass; until then the source keeps this reference
                group.copies.push((last, block));
                table_group.blocks[at] = block;
                table_group.shared = table_group.shared.min(table_group.first + at);
            } else if let Some(last) = last {
                let gone = group.pool.forget_beyond(last, partial);
                forgotten.extend(gone.into_iter().filter(|&c| self.prefixes.forget(c)));
            }
            while table_group.end() < end {
                let last = table_group.blocks.last().copied();
                let (block, contents) = group.allocate(last, &mut self.prefixes);
                forgotten.extend(contents);
                table_group.blocks.push(block);
            }
        }
        self.drop_states(&forgotten);
        table.tokens += count;
        true
    }

    /// True if [`Self::append`] would succeed for each of these sequences, one after the other, with `count` tokens.
    pub fn could_append<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>, count: usize) -> bool {
        let mut needed = vec![0; self.groups.len()];
        for table in tables {
            for (needed, (group, table_group)) in needed.iter_mut().zip(self.groups.iter().zip(&table.groups)) {
                *needed += group.needed(table_group, table.tokens, count);
            }
        }
        let enough = |(group, needed): (&LayerGroup, usize)| group.pool.available() >= needed;
        self.groups.iter().zip(needed).all(enough)
    }

    /// Gives back the blocks that no token from the next one on sees.
    pub fn trim(&mut self, table: &mut BlockTable) {
        for (group, table_group) in self.groups.iter_mut().zip(&mut table.groups) {
            let gone = group.first_visible(table.tokens).saturating_sub(table_group.first);
            let gone = gone.min(table_group.blocks.len());
            for block in table_group.blocks.drain(..gone) {
                group.release(block);
            }
            table_group.first += gone;
        }
    }

    /// Another sequence with the same tokens, in the same blocks, and with a copy of the states.
    pub fn fork(&mut self, table: &mut BlockTable) -> BlockTable {
        let state = self.allocate_state();
        if let (Some(slots), Some((source, target))) = (&mut self.slots, table.state.zip(state)) {
            slots.copy(source, target);
        }
        for (group, table_group) in self.groups.iter_mut().zip(&mut table.groups) {
            for &block in &table_group.blocks {
                group.pool.share(block);
            }
            table_group.shared = table_group.end();
        }
        BlockTable { tokens: table.tokens, groups: table.groups.clone(), known: table.known, state }
    }

    /// Ends a sequence: its blocks are free for others, or kept for their content.
    pub fn free(&mut self, table: BlockTable) {
        if let (Some(slots), Some(slot)) = (&mut self.slots, table.state) {
            slots.release(slot);
        }
        for (group, table_group) in self.groups.iter_mut().zip(table.groups) {
            // the last ones are to be needed first
            for block in table_group.blocks.into_iter().rev() {
                group.release(block);
            }
        }
    }

    /// Keys and values of a layer that attends.
    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[self.places[index]]
    }

    /// Copies the blocks that sequences are about to write to while others hold them, and the states of sequences that
    /// share a beginning.
    pub fn copy_shared_blocks(&mut self) {
        let widest = self.widest_index();
        let copies = self.slots.as_mut().map(StateSlots::take_copies);
        if let Some(copies) = copies.filter(|copies| !copies.is_empty()) {
            for states in &mut self.states {
                states.copy(&copies);
            }
        }
        for (index, group) in self.groups.iter_mut().enumerate() {
            let copies = std::mem::take(&mut group.copies);
            if copies.is_empty() {
                continue;
            }
            for layer in self.layers.iter_mut().filter(|layer| layer.group == index) {
                layer.copy_blocks(&copies);
            }
            if let Some(routes) = self.routes.as_mut().filter(|_| index == widest) {
                routes.copy_blocks(&copies, BLOCK_SIZE);
            }
            for (source, _) in copies {
                group.pool.release(source);
            }
        }
    }
}

/// The type of the delta rule's states: f32, or f64 where a device computes in that.
fn state_dtype(arch: &Arch, device: &Device) -> DType {
    match arch.precision.dtype(device) {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// States of every layer of linear attention, without a slot.
fn empty_states(arch: &Arch, device: &Device) -> Vec<LayerStates> {
    let dtypes = [state_dtype(arch, device), arch.precision.dtype(device)];
    let numbers = arch.delta_net.map_or([0, 0], |delta| [delta.recurrent_state(), delta.convolution_state()]);
    (0..arch.count(Mixer::GatedDeltaNet)).map(|_| LayerStates::new(0, numbers, dtypes, device)).collect()
}

impl LayerGroup {
    /// Index of the first block that token `token` sees.
    fn first_visible(&self, token: usize) -> usize {
        let window = self.window.unwrap_or(usize::MAX);
        (token + 1).saturating_sub(window) / BLOCK_SIZE
    }

    /// True if all blocks with these contents that the token after `tokens` tokens sees are kept.
    fn keeps(&self, contents: &[ContentId], tokens: usize) -> bool {
        let mut seen = contents.iter().skip(self.first_visible(tokens));
        seen.all(|&content| self.pool.find(content).is_some())
    }

    /// True if several sequences have a block. A copy that is still to be made does not count: it is made before
    /// anything is written.
    fn is_shared(&self, block: u32) -> bool {
        let references = self.pool.references(block) as usize;
        let copied = || self.copies.iter().filter(|&&(source, _)| source == block);
        references > 1 && references - copied().count() > 1
    }

    /// True if a sequence that is about to write to its last block, which has `partial` tokens of it, takes a copy:
    /// where others have the block, and where it is kept with tokens after these, if there is a block besides the
    /// `needed` ones. Otherwise those are forgotten.
    fn copies_before_writing(&self, last: u32, partial: usize, needed: usize) -> bool {
        let spare = self.pool.available() > needed;
        self.is_shared(last) || (spare && self.pool.keeps_beyond(last, partial))
    }

    /// Takes a reference away. What was to be copied to a block that nobody has any more is not copied.
    fn release(&mut self, block: u32) {
        self.pool.release(block);
        if self.pool.references(block) == 0
            && let Some(at) = self.copies.iter().position(|&(_, target)| target == block)
        {
            let (source, _) = self.copies.swap_remove(at);
            self.pool.release(source);
        }
    }

    /// Blocks that `count` more tokens of a sequence of `tokens` need, those not counted that it gives back before.
    fn needed(&self, table_group: &GroupTable, tokens: usize, count: usize) -> usize {
        let more = (tokens + count).div_ceil(BLOCK_SIZE) - table_group.end().min((tokens + count).div_ceil(BLOCK_SIZE));
        let partial = !tokens.is_multiple_of(BLOCK_SIZE);
        let shared = |&last: &u32| partial && self.is_shared(last);
        more + usize::from(table_group.blocks.last().is_some_and(shared))
    }

    /// A block, and what nobody keeps any more that it held.
    fn allocate(&mut self, last: Option<u32>, prefixes: &mut PrefixIndex) -> (u32, Vec<ContentId>) {
        let allocated = self.pool.allocate(last);
        let (block, mut contents) = allocated.unwrap_or_else(|| unreachable!("counted before"));
        contents.retain(|&content| prefixes.forget(content));
        (block, contents)
    }
}
