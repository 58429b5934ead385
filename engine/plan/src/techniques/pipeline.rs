//! Layers that ranks divide into stages (pipeline parallelism, 1F1B: arXiv:1806.03377).

use crate::estimate::Context;
use crate::technique::prelude::*;
use crate::{Order, Zero};

impl Context<'_> {
    /// Micro-batches that may have gone forward and not backward, if there are as many.
    pub fn in_flight(&self) -> u64 {
        let behind = self.stage.map_or(1, |stage| stage.stages() - stage.stage());
        behind as u64
    }

    /// Turns of a pipeline for `micros` micro-batches.
    pub(crate) fn pipeline_turns(&self, micros: f64) -> f64 {
        let behind = self.stage.map_or(0, |stage| stage.stages() - 1);
        micros + behind as f64
    }
}

pub(crate) struct Pipeline;

impl Technique for Pipeline {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.pipeline_model_parallel_size"]
    }

    fn is_parallelism(&self) -> bool {
        true
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        at_least_one("pipeline_model_parallel_size", memory.pipeline_model_parallel_size)?;
        let alone = memory.pipeline_model_parallel_size == 1;
        require(
            alone || memory.zero() <= Zero::Stage1,
            "pipeline_model_parallel_size requires a zero_stage of at most 1: a stage accumulates gradients of several \
             micro-batches in flight, and holds only the weights of its layers",
        )?;
        require(
            alone || memory.order == Order::MicroMajor,
            "pipeline_model_parallel_size runs micro-batches through a stage one after the other: remove \
             memory.order: segment_major",
        )
    }
}
