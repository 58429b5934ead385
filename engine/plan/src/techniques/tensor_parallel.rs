//! Layers that ranks shard (tensor parallelism, arXiv:1909.08053).

use crate::technique::prelude::*;

pub(crate) struct TensorParallel;

impl Technique for TensorParallel {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.tensor_model_parallel_size"]
    }

    fn is_parallelism(&self) -> bool {
        true
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        at_least_one("tensor_model_parallel_size", memory.tensor_model_parallel_size)
    }
}
