//! Order of the loops over micro-batches and segments: weights are fetched once for all micro-batches.

use crate::technique::prelude::*;
use crate::{Order, ParamOffload, Zero};

pub(crate) struct SegmentOrder;

impl Technique for SegmentOrder {
    fn about(&self) -> About {
        About {
            keys: &["memory.order"],
            kind: TechniqueKind::Chosen,
            examples: &["param_offload: streamed, order: segment_major"],
        }
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        let fetched = memory.param_offload == ParamOffload::Streamed || memory.zero() == Zero::Stage3;
        require(
            memory.order == Order::MicroMajor || fetched,
            "order: segment_major shares the fetches of weights among micro-batches and costs memory otherwise: it \
             requires memory.param_offload: streamed or memory.zero_stage: 3",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.order = memory.order;
    }

    fn placements(&self, memory: &MemoryConfig, _: &Request) -> Vec<MemoryConfig> {
        // pipeline stages take micro-batches one after the other
        if memory.param_offload == ParamOffload::Streamed && memory.pipeline_model_parallel_size == 1 {
            return and(memory, |m| m.order = Order::SegmentMajor);
        }
        vec![memory.clone()]
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        let what = "each segment's weights are fetched once for all micro-batches";
        (used.memory.order == Order::SegmentMajor).then_some(what)
    }
}
