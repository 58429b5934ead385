//! The reference policy's weights on the host.

use crate::request::{Candidate, Request};
use crate::technique::{Explanation, Technique};
use crate::{MemoryConfig, ParamOffload};

pub(crate) struct ReferenceOffload;

impl Technique for ReferenceOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.reference.param_offload"]
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.reference.param_offload = ParamOffload::None;
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

    fn explain(&self, used: &Candidate, _: &Request) -> Option<Explanation> {
        if used.memory.reference.param_offload == ParamOffload::None {
            return None;
        }
        used.explained("the reference is offloaded to the host", self.keys(), |c| self.turn_off(&mut c.memory))
    }
}
