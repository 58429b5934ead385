//! Presets under the names people know.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Starting values of the `memory` section; keys written beside the preset win.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// One small device: everything that saves memory and costs moderate time.
    Constrained,
    /// Checkpointing, state on the device.
    Balanced,
    /// Nothing recomputed, nothing moved.
    Fast,
    /// A model larger than the device: weights visit it.
    Huge,
}

impl Preset {
    /// The keys it sets.
    #[must_use]
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
                "attention_rows": 256,
                "train_tokens": 4096,
                "score_tokens": 8192,
                "reference": { "param_offload": "streamed" },
            }),
        };
        match value {
            Value::Object(map) => map,
            _ => unreachable!("an object was written above"),
        }
    }
}
