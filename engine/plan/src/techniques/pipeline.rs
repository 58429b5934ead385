//! Layers that ranks divide into stages (pipeline parallelism, 1F1B: arXiv:1806.03377).

use crate::estimate::{Axis, Communication, Context, F32, MessageKind};
use crate::technique::prelude::*;
use crate::{Order, Zero};
use firebrick_arch::PipelineStage;

impl Context<'_> {
    /// Micro-batches that may have gone forward and not backward, if there are as many.
    pub fn in_flight(&self) -> u64 {
        let behind = self.stage.map_or(1, |stage| stage.stages() - stage.stage());
        behind as u64
    }

    /// The gradient of a tied matrix, which the first stage and the last send each other once an update.
    pub(crate) fn tied_ends_traffic(&self) -> Communication {
        let mut traffic = Communication::default();
        let trained = self.sizes.trained_ends(self.sizes.embedding);
        let two = self.stage.is_some_and(|stage| stage.is_first() || stage.is_last());
        if two && self.arch.tied && trained > 0 {
            let group = self.parallel.group(Axis::Pipeline);
            let bytes = self.parallel.tensor_share(F32 * trained) as f64;
            traffic.even(MessageKind::Send, group, 1, bytes);
        }
        traffic
    }

    /// The policy's units, each from the stage that has it to all others of the pipeline.
    pub(crate) fn stages_traffic(&self) -> Communication {
        let mut traffic = Communication::default();
        let Some(stage) = self.stage else {
            return traffic;
        };
        let group = self.training.group(Axis::Pipeline);
        let (whole, here) = (&self.counted.whole_policy, &self.counted.policy);
        let mut send = |count: u64, here: u64, bytes: u64| {
            let bytes = self.training.tensor_share(bytes);
            let others = (group.size - 1) * bytes;
            let (at, buffer) = ((MessageKind::Exchange, group), bytes as f64);
            traffic.add(at, here, others, buffer);
            traffic.add(at, count - here, 0, buffer);
        };
        for sublayer in whole.kinds() {
            send(whole.count(sublayer), here.count(sublayer), whole.sublayer_bytes(sublayer));
        }
        // of two stages both have a tied matrix
        let embeds = u64::from(!(self.arch.tied && stage.stages() == 2));
        let first = embeds * u64::from(stage.is_first());
        send(embeds, first, whole.width * whole.embedding);
        send(1, u64::from(stage.is_last()), whole.width * whole.head);
        traffic
    }

    /// Host bytes of gathering the policy's units from other stages: the message of the largest unit that a stage lacks,
    /// and the parameters that are made of it.
    pub(crate) fn sent_by_stages(&self, stage: PipelineStage) -> u64 {
        // gathered as they are trained, whatever they are sampled in
        let whole = &self.counted.whole_policy;
        let body = whole.kinds().map(|sublayer| whole.sublayer_bytes(sublayer));
        let embedding = if self.arch.tied && stage.stages() == 2 { 0 } else { whole.embedding };
        let ends = whole.width * embedding.max(whole.head);
        2 * self.parallel.replicated().weights(body.fold(ends, u64::max))
    }

    /// Turns of a pipeline for `micros` micro-batches.
    pub(crate) fn pipeline_turns(&self, micros: f64) -> f64 {
        let behind = self.stage.map_or(0, |stage| stage.stages() - 1);
        micros + behind as f64
    }
}

pub(crate) struct Pipeline;

impl Technique for Pipeline {
    fn about(&self) -> About {
        About { keys: &["memory.pipeline_model_parallel_size"], kind: TechniqueKind::Parallelism, examples: &[] }
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
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
