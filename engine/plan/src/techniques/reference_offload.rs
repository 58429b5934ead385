//! The reference policy's weights on the host.

use crate::ParamOffload;
use crate::technique::prelude::*;

pub(crate) struct ReferenceOffload;

impl Technique for ReferenceOffload {
    fn about(&self) -> About {
        About { keys: &["memory.reference.param_offload"], kind: TechniqueKind::Chosen, examples: &[] }
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.profile.is_unified() || !request.workload.reference {
            return vec![memory.clone()];
        }
        let locations = [ParamOffload::None, ParamOffload::Idle, ParamOffload::Streamed];
        let with = |param_offload| {
            let mut memory = memory.clone();
            memory.reference.param_offload = param_offload;
            memory
        };
        locations.map(with).to_vec()
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        let offloads = used.memory.reference.param_offload != ParamOffload::None;
        offloads.then_some("the reference is offloaded to the host")
    }
}
