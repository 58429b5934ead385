//! Presets: starting values of `memory` and of other sections.

use crate::named::named;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;

named! {
    /// Starting values of the `memory` section, of the run's precision and of its sampling. Keys that are set win.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
    pub enum Preset {
        /// One small device: checkpointing, offload, 8-bit moments, small chunks and micro-batches, bf16.
        Constrained = "constrained",
        /// Checkpointing, with all state on the device.
        Balanced = "balanced",
        /// No recomputation, no offload.
        Fast = "fast",
        /// Weights that barely fit: streamed, everything else on the host, bf16.
        Huge = "huge",
    }
}

impl Preset {
    /// The keys of `memory` that it sets.
    pub fn settings(self) -> Map<String, Value> {
        let value = match self {
            Self::Fast => json!({ "gradient_checkpointing": false }),
            Self::Balanced => json!({ "gradient_checkpointing": true, "train_tokens": 8192 }),
            Self::Constrained => json!({
                "gradient_checkpointing": true,
                "activation_offload": true,
                "param_offload": "idle",
                "optimizer_offload": "idle",
                "moments": "block8",
                "head_rows": 256,
                "recompute_logits": true,
                "attention_rows": 256,
                "train_tokens": 4096,
                "score_tokens": 8192,
                "reference": { "param_offload": "idle" },
            }),
            Self::Huge => json!({
                "gradient_checkpointing": true,
                "activation_offload": true,
                "param_offload": "streamed",
                "order": "segment_major",
                "grad_offload": true,
                "optimizer_offload": "cpu",
                "head_rows": 256,
                "recompute_logits": true,
                "attention_rows": 256,
                "train_tokens": 4096,
                "score_tokens": 8192,
                "reference": { "param_offload": "streamed" },
            }),
        };
        object(value)
    }

    /// The keys outside `memory` that it sets, by section. Not every device can do them: see
    /// [`AppliedPreset::beyond`](crate::AppliedPreset::beyond).
    ///
    /// The share of the device is that of everything which is there while sampling. Where the state waits on the host
    /// that is the engine's own, as in the guides (0.5); where it stays, 12 of training's 16 bytes per parameter stay
    /// too, and 0.8 is what leaves keys and values an eighth of a device that training fills.
    pub fn run_settings(self) -> Map<String, Value> {
        object(match self {
            Self::Fast => json!({}),
            Self::Balanced => json!({ "rollout": { "gpu_memory_utilization": 0.8 } }),
            Self::Constrained => json!({
                "precision": "bf16",
                "rollout": { "gpu_memory_utilization": 0.5, "max_num_seqs": 64 },
            }),
            Self::Huge => json!({
                "precision": "bf16",
                "rollout": { "gpu_memory_utilization": 0.85, "max_num_seqs": 64 },
            }),
        })
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => unreachable!("settings are an object, not {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_configurations() {
        for preset in Preset::ALL {
            let name = serde_json::to_value(preset).expect("a name");
            assert_eq!(name, preset.name());
        }
    }
}
