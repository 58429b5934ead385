//! The prompt of a group of completions computed once.

use crate::Layout;
use crate::technique::prelude::*;

pub(crate) struct SharedPrefix;

impl Technique for SharedPrefix {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.share_prefix"]
    }

    /// States of gated `DeltaNet` layers run through whole sequences.
    fn apply(&self, memory: &MemoryConfig, arch: &Arch, plan: &mut ModelPlan) {
        if memory.share_prefix && plan.layout == Layout::Packed && arch.delta_net.is_none() {
            plan.layout = Layout::SharedPrefix;
        }
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        let workload = &request.workload;
        let shares = used.memory.share_prefix
            && used.memory.packing.layout() == Layout::Packed
            && workload.arch.delta_net.is_none();
        (shares && workload.group > 1 && workload.examples.is_none()).then_some("prompts are computed once a group")
    }

    fn undo(&self, used: &mut Candidate, _: &Request) {
        used.memory.share_prefix = false;
    }
}
