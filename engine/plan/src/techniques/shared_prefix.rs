//! The prompt of a group of completions computed once.

use crate::Layout;
use crate::technique::prelude::*;

pub(crate) struct SharedPrefix;

impl MemoryConfig {
    /// The layout of a model's micro-batches.
    pub(crate) fn layout(&self) -> Layout {
        match self.packing.layout() {
            Layout::Packed if self.share_prefix => Layout::SharedPrefix,
            layout => layout,
        }
    }
}

impl Technique for SharedPrefix {
    fn about(&self) -> About {
        About { keys: &["memory.share_prefix"], kind: TechniqueKind::Set, examples: &[] }
    }

    /// Also says why prompts are repeated if a model or a setting excludes sharing.
    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        let (memory, workload) = (&used.memory, &request.workload);
        if !memory.share_prefix || workload.group <= 1 || workload.examples.is_some() {
            return None;
        }
        let drops = workload.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        Some(if memory.packing.layout() == Layout::Padded {
            "prompts are repeated: rows are padded"
        } else if drops {
            "prompts are repeated in training: model.lora.dropout is above 0"
        } else {
            "prompts are computed once a group"
        })
    }

    fn undo(&self, used: &mut Candidate, _: &Request) {
        used.memory.share_prefix = false;
    }
}
