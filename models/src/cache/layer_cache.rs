//! Keys and values of one layer: its pool of blocks. `attention` attends over it.

use firebrick_backends::kernels::{self, KvPool};

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct LayerCache {
    /// Its group of layers with the same sliding window.
    group: usize,
    // Taken out while it is written, so that its tensors have one owner and are written in place.
    pool: Option<KvPool>,
}

impl LayerCache {
    pub fn new(group: usize, pool: KvPool) -> Self {
        Self { group, pool: Some(pool) }
    }

    pub fn group(&self) -> usize {
        self.group
    }

    pub(super) fn pool(&self) -> &KvPool {
        let pool = self.pool.as_ref();
        pool.unwrap_or_else(|| unreachable!("a pool in use twice"))
    }

    /// Replaces the pool by what `f` makes of it.
    pub(super) fn change(&mut self, f: impl FnOnce(KvPool) -> KvPool) {
        let pool = self.pool.take();
        self.pool = Some(f(pool.unwrap_or_else(|| unreachable!("a pool in use twice"))));
    }

    /// Makes room for more blocks.
    pub fn grow(&mut self, blocks: usize) {
        self.change(|pool| pool.grown(blocks));
    }

    /// Copies blocks to others: pairs of source and target.
    pub fn copy_blocks(&mut self, pairs: &[(u32, u32)]) {
        self.change(|pool| kernels::copy_blocks(pool, pairs));
    }
}
