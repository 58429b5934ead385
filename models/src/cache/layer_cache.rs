//! Keys and values of one layer: its pool of blocks. `attention` attends over it.

use firebrick_backends::kernels::{self, KvPool};

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct LayerCache {
    /// Its group of layers with the same sliding window.
    pub group: usize,
    // Taken out while it is written, so that its tensors have one owner and are written in place.
    pool: Option<KvPool>,
}

impl LayerCache {
    pub fn new(group: usize, pool: KvPool) -> Self {
        Self { group, pool: Some(pool) }
    }

    pub(super) fn pool(&self) -> &KvPool {
        let pool = self.pool.as_ref();
        pool.unwrap_or_else(|| unreachable!("a pool in use twice"))
    }

    /// Replaces the pool by the one that `f` returns next to a result.
    pub(super) fn update<T>(&mut self, f: impl FnOnce(KvPool) -> (T, KvPool)) -> T {
        let pool = self.pool.take();
        let (result, pool) = f(pool.unwrap_or_else(|| unreachable!("a pool in use twice")));
        self.pool = Some(pool);
        result
    }

    /// Makes room for more blocks.
    pub fn grow(&mut self, blocks: usize) {
        self.update(|pool| ((), pool.grown(blocks)));
    }

    /// Copies blocks to others: pairs of source and target.
    pub fn copy_blocks(&mut self, pairs: &[(u32, u32)]) {
        self.update(|pool| ((), kernels::copy_blocks(pool, pairs)));
    }
}
