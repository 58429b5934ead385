//! Embedding and head on the host, copied to the device for each use.

use crate::technique::prelude::*;

pub(crate) struct EmbeddingOffload;

impl Technique for EmbeddingOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.embedding_offload"]
    }

    fn apply(&self, memory: &MemoryConfig, arch: &Arch, plan: &mut ModelPlan) {
        if memory.embedding_offload && !arch.tied {
            plan.ends = Home::Host;
        }
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.embedding_offload = false;
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.embedding_offload.then_some("embedding and head are streamed to the device")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ends_that_are_not_tied_wait_on_the_host_and_layers_on_the_device() {
        for tied in [false, true] {
            let config = json!({
                "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
                "num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": tied,
            });
            let arch = Arch::from_config(config.as_object().expect("an object"), "config.json".as_ref());
            let memory = MemoryConfig { embedding_offload: true, ..MemoryConfig::default() };
            let plan = memory.plan(&arch.expect("an architecture")).expect("a plan");
            assert_eq!(plan.ends == Home::Device, tied);
            assert!(plan.segments.iter().all(|segment| segment.weights == Home::Device));
        }
    }
}
