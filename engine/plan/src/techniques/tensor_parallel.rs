//! Layers that ranks shard (tensor parallelism, arXiv:1909.08053).

use crate::estimate::{Context, MemoryUsage};
use crate::technique::prelude::*;
use firebrick_spec::Category;

impl Context<'_> {
    /// Memory for sampling tokens from `logits` bytes. With tensor parallelism every device gathers all logits through the
    /// host.
    pub(crate) fn chosen(&self, logits: u64, copies: u64) -> MemoryUsage {
        let whole = MemoryUsage::default().on_device(Category::Head, copies * logits);
        if self.parallel.tensor == 1 {
            return whole;
        }
        // what others sent, and what is put together of it
        whole.on_device(Category::Head, self.parallel.tensor_share(logits)).on_host(Category::Communication, 2 * logits)
    }

    /// Host bytes of an all-reduce of a row per token over tensor-parallel devices: what is sent, received and made of it.
    pub(crate) fn summed(&self, tokens: u64) -> MemoryUsage {
        let row = self.widths.row(tokens);
        let bytes = if self.parallel.tensor > 1 { 3 * row } else { 0 };
        MemoryUsage::default().on_host(Category::Communication, bytes)
    }
}

pub(crate) struct TensorParallel;

impl Technique for TensorParallel {
    fn about(&self) -> About {
        About { keys: &["memory.tensor_model_parallel_size"], kind: TechniqueKind::Parallelism, examples: &[] }
    }
}
