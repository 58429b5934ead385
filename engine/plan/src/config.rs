//! The `memory` section of a configuration.

use crate::size::{Budget, Bytes};
use crate::{Granularity, MomentKind, OptimizerOffload, Order, Packing, ParamOffload, Preset};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use smart_default::SmartDefault;
use std::fmt;
use std::sync::LazyLock;

/// Memory settings of a model that is not trained.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoleMemory {
    /// Location of the reference policy's weights.
    pub param_offload: ParamOffload,
    /// Maximum tokens per micro-batch of the reference policy. `null`: `memory.score_tokens`.
    #[schemars(range(min = 1))]
    pub score_tokens: Option<usize>,
}

/// The `memory` section of a configuration. In code, [`MemoryConfig::from`] sets a preset's values in this section, and
/// the builder of a run's configuration its other values; the field `preset` by itself sets nothing.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[schemars(transform = describe_critic)]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "switches that a user sets one by one")]
pub struct MemoryConfig {
    /// Starting values, also of `precision`, `rollout.gpu_memory_utilization` and `rollout.max_num_seqs` if the device
    /// supports them.
    pub preset: Option<Preset>,
    /// File from `firebrick plan --output`, run as it is regardless of other keys.
    pub plan: Option<std::path::PathBuf>,
    /// Device memory for a plan: a size, or `auto` (CPU: available, CUDA: free, other GPUs: total memory). The planner
    /// chooses what to recompute and offload; sizes are upper limits. `null`: the keys apply as they are.
    pub budget: Option<Budget>,
    /// Host memory for a plan. `null`: no limit.
    pub host_budget: Option<Bytes>,
    /// Fraction of the budget to leave free.
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 0.9))]
    #[default(0.1)]
    pub margin: f64,
    /// Device memory above which the run counts as out of memory.
    pub limit: Option<Bytes>,
    /// Repeat a phase that runs out of memory under a cheaper plan.
    #[default(true)]
    pub recover: bool,
    /// Keep only the inputs of segments and recompute activations in the backward pass: less memory, about a third more
    /// time.
    pub gradient_checkpointing: bool,
    /// Layers per segment. Needs `gradient_checkpointing`. Set at most one of this key, `checkpoint_layers`,
    /// `checkpoint_ratio` and `recompute_granularity: half`.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub checkpoint_every: usize,
    /// Indices of recomputed layers: `[0, 4, 8]`. `null`: all.
    pub checkpoint_layers: Option<Vec<usize>>,
    /// Fraction of recomputed layers, evenly spaced. `null`: all.
    #[schemars(range(min = 0, max = 1))]
    pub checkpoint_ratio: Option<f64>,
    /// Unit of recomputation.
    pub recompute_granularity: Granularity,
    /// Store checkpointed activations on the host. Needs `gradient_checkpointing`.
    pub activation_offload: bool,
    /// Activations per copy. Needs `activation_offload`.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub activation_offload_group: usize,
    /// Location of the policy's weights outside rollout. `streamed` needs `gradient_checkpointing` of all layers.
    pub param_offload: ParamOffload,
    /// Outer loop with streamed weights or `zero_stage: 3`.
    pub order: Order,
    /// Accumulate gradients on the host.
    pub grad_offload: bool,
    /// Location of the optimizer's state.
    pub optimizer_offload: OptimizerOffload,
    /// Fraction of parameters updated on the host with `optimizer_offload: cpu`.
    #[schemars(range(min = 0, max = 1))]
    #[default(1.0)]
    pub offload_fraction: f64,
    /// Format of optimizer moments; arithmetic is f32.
    pub moments: MomentKind,
    /// Update each segment in the last backward pass and free its gradient. Needs `optim.clip_grad: null`, no loss
    /// scale and one rank; not with `optimizer_offload: idle`.
    pub step_in_backward: bool,
    /// What data-parallel ranks shard: 1 optimizer state, 2 also gradients, 3 also weights (FSDP). With `budget`, the
    /// lowest stage.
    #[schemars(range(min = 0, max = 3))]
    pub zero_stage: u8,
    /// With `zero_stage: 3`, free gathered weights after the forward pass. Needs `gradient_checkpointing` of all
    /// layers; `false` gathers half as often.
    #[default(true)]
    pub reshard_after_forward: bool,
    /// Ulysses degree: consecutive ranks that split the tokens of each micro-batch. Must divide the ranks and query
    /// heads.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub ulysses_sequence_parallel_size: usize,
    /// Tensor-parallel degree of training: consecutive ranks that shard each layer. Must divide the ranks, heads and
    /// MLP width.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub tensor_model_parallel_size: usize,
    /// Pipeline stages of training (1F1B). Must divide the ranks and be at most the layers; `zero_stage` at most 1.
    #[schemars(range(min = 1))]
    #[default(1)]
    pub pipeline_model_parallel_size: usize,
    /// Host copies in flight, and segments gathered ahead with `zero_stage: 3`. 0: synchronous.
    #[default(1)]
    pub prefetch: usize,
    /// Rows (tokens) per chunk of logits; full logits are never stored.
    #[schemars(range(min = 1))]
    #[default(1024)]
    pub head_rows: usize,
    /// On GPUs with a larger vocabulary than a tile (8,192 tokens), recompute a chunk's logits for its gradient, a tile
    /// at a time. `false` keeps them.
    pub recompute_logits: bool,
    /// Queries per chunk of attention scores; 0: all.
    #[default(512)]
    pub attention_rows: usize,
    /// Layout of sequences in a micro-batch.
    pub packing: Packing,
    /// Compute common prefixes of sequences, such as prompts, once in training and scoring. Off for padded rows and, in
    /// training, `model.lora.dropout`.
    #[default(true)]
    pub share_prefix: bool,
    /// Maximum tokens per training micro-batch, at least `rollout.prompt_length` + `rollout.response_length`. Padding
    /// counts.
    #[schemars(range(min = 1))]
    #[default(16_384)]
    pub train_tokens: usize,
    /// Maximum tokens per forward-only micro-batch (old and reference log-probs); lower limit as `train_tokens`.
    #[schemars(range(min = 1))]
    #[default(32_768)]
    pub score_tokens: usize,
    /// Maximum sequences per micro-batch. `null`: no limit.
    #[schemars(range(min = 1))]
    pub micro_batch_size: Option<usize>,
    /// Every this many steps, return free pages to the device before each phase (`torch.cuda.empty_cache`). 0: never.
    pub cleanup_every: u64,
    /// First steps, after a start or resumption, recorded in `memory_timeline.json`. 0: only if the run ends out of
    /// memory.
    pub snapshot: u64,
    /// Latest allocations and releases to include in the timeline.
    #[schemars(range(max = 1_000_000), extend("x-because" = "1,000,000 allocations take about 450 MB of host memory"))]
    pub trace: usize,
    /// Memory settings of the reference policy.
    pub reference: RoleMemory,
    /// Memory settings of the critic, by default the policy's. With `budget`, sizes are upper limits.
    pub critic: CriticMemory,
}

impl MemoryConfig {
    /// Gives keys, by their paths in a configuration, the values of another section.
    pub(crate) fn reset(&mut self, keys: &[&str], from: &Self) {
        let value = |memory: &Self| serde_json::to_value(memory).expect("settings are JSON");
        let (mut settings, from) = (value(self), value(from));
        for key in keys.iter().filter_map(|key| key.strip_prefix("memory")) {
            let path = key.replace('.', "/");
            if let (Some(to), Some(from)) = (settings.pointer_mut(&path), from.pointer(&path)) {
                *to = from.clone();
            }
        }
        *self = serde_json::from_value(settings).expect("values of this section");
    }
}

impl From<Preset> for MemoryConfig {
    /// The preset's settings, and the defaults of the others.
    fn from(preset: Preset) -> Self {
        let settings = serde_json::from_value(Value::Object(preset.settings()));
        let settings: Self = settings.expect("a preset's keys are settings of this section");
        Self { preset: Some(preset), ..settings }
    }
}

/// Keys of `memory` that the critic overrides: settings in place of the policy's. Keys that are absent are the
/// policy's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct CriticMemory(Map<String, Value>);

/// Keys that apply to the run or to another model, and not to the critic.
const RUN_KEYS: [&str; 17] = [
    "preset",
    "plan",
    "budget",
    "host_budget",
    "margin",
    "limit",
    "recover",
    "zero_stage",
    "reshard_after_forward",
    "ulysses_sequence_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "cleanup_every",
    "snapshot",
    "trace",
    "reference",
    "critic",
];

/// All keys of the section.
static KEYS: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| object(&MemoryConfig::default()).into_iter().flatten().map(|(key, _)| &*key.leak()).collect());

pub(crate) fn object(memory: &MemoryConfig) -> serde_json::Result<Map<String, Value>> {
    serde_json::from_value(serde_json::to_value(memory)?)
}

impl CriticMemory {
    /// True if the critic overrides no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The policy's settings with the critic's over them.
    ///
    /// # Errors
    /// For settings that cannot be written as JSON, such as a path that is not UTF-8.
    pub fn over(&self, policy: &MemoryConfig) -> serde_json::Result<MemoryConfig> {
        let plain = MemoryConfig { critic: Self::default(), ..policy.clone() };
        if self.is_empty() {
            return Ok(plain);
        }
        let mut settings = object(&plain)?;
        settings.extend(self.0.clone());
        serde_json::from_value(Value::Object(settings))
    }

    /// A size that the critic overrides.
    pub(crate) fn size(&self, key: &str) -> Option<usize> {
        self.0.get(key).and_then(Value::as_u64).map(|size| size as usize)
    }

    /// Overrides a size; without a value the policy's applies.
    pub(crate) fn set_size(&mut self, key: &str, size: Option<usize>) {
        match size {
            Some(size) => self.0.insert(key.to_owned(), size.into()),
            None => self.0.shift_remove(key),
        };
    }

    /// The overrides of these keys alone.
    pub(crate) fn only(&self, keys: &[&str]) -> Self {
        let kept = self.0.iter().filter(|(key, _)| keys.contains(&key.as_str()));
        Self(kept.map(|(key, value)| (key.clone(), value.clone())).collect())
    }
}

impl<'de> Deserialize<'de> for CriticMemory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Section;
        impl<'de> Visitor<'de> for Section {
            type Value = CriticMemory;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<CriticMemory, A::Error> {
                let mut settings = Map::new();
                while let Some(Key(key)) = map.next_key()? {
                    settings.insert(key.to_owned(), map.next_value_seed(Key(key))?);
                }
                Ok(CriticMemory(settings))
            }
        }
        deserializer.deserialize_map(Section)
    }
}

/// A key of the section; as a seed it reads the key's value, as the section reads it.
struct Key(&'static str);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let key = KEYS.iter().find(|key| **key == name);
        key.map(|key| Self(key)).ok_or_else(|| D::Error::unknown_field(&name, &KEYS))
    }
}

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if RUN_KEYS.contains(&self.0) {
            IgnoredAny::deserialize(deserializer)?;
            return Err(D::Error::custom("this key applies to the run and not to one model; set it only in `memory`"));
        }
        let value = Value::deserialize(deserializer)?;
        let section = Map::from_iter([(self.0.to_owned(), value)]);
        let memory: MemoryConfig = serde_json::from_value(Value::Object(section)).map_err(D::Error::custom)?;
        let mut settings = object(&memory).map_err(D::Error::custom)?;
        Ok(settings.remove(self.0).unwrap_or_default())
    }
}

/// Gives the section of the critic the keys that it may override, as the section of the policy has them.
fn describe_critic(schema: &mut schemars::Schema) {
    let Some(Value::Object(keys)) = schema.get_mut("properties") else {
        return;
    };
    let mut overrides = Map::new();
    for (key, setting) in keys.iter().filter(|(key, _)| !RUN_KEYS.contains(&key.as_str())) {
        let mut setting = setting.clone();
        if let Value::Object(setting) = &mut setting {
            setting.shift_remove("default");
            setting
                .insert("description".into(), format!("The critic's `memory.{key}`; defaults to the policy's.").into());
        }
        overrides.insert(key.clone(), setting);
    }
    if let Some(Value::Object(critic)) = keys.get_mut("critic") {
        critic.insert("properties".into(), Value::Object(overrides));
        critic.insert("additionalProperties".into(), false.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(critic: Value) -> Result<MemoryConfig, String> {
        let memory = MemoryConfig {
            gradient_checkpointing: true,
            critic: serde_path_to_error::deserialize(critic).map_err(|e| e.to_string())?,
            ..MemoryConfig::default()
        };
        memory.critic_settings().map_err(|e| e.to_string())
    }

    #[test]
    fn what_the_critic_leaves_out_is_the_policys() {
        let critic = with(json!({"param_offload": "streamed", "train_tokens": 64})).unwrap();
        assert!(critic.gradient_checkpointing);
        assert_eq!(critic.param_offload, ParamOffload::Streamed);
        assert_eq!(critic.train_tokens, 64);
        assert_eq!(with(json!({})).unwrap().train_tokens, 16_384);
    }

    #[test]
    fn null_is_a_setting_only_where_the_policy_s_may_be_null() {
        let memory = MemoryConfig {
            gradient_checkpointing: true,
            checkpoint_ratio: Some(0.5),
            critic: serde_json::from_value(json!({"checkpoint_ratio": null})).unwrap(),
            ..MemoryConfig::default()
        };
        assert_eq!(memory.critic_settings().unwrap().checkpoint_ratio, None);
        assert!(with(json!({"train_tokens": null})).is_err());
    }

    #[test]
    fn only_settings_that_are_there_are_written() {
        for section in [json!({}), json!({"checkpoint_ratio": null, "head_rows": 64})] {
            let read: CriticMemory = serde_json::from_value(section.clone()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), section);
        }
    }

    #[test]
    fn settings_of_the_critic_that_make_no_sense_are_refused_by_name() {
        for (settings, part) in [
            (json!({"trian_tokens": 3}), "unknown field `trian_tokens`"),
            (json!({"budget": 3}), "set it only in `memory`"),
            (json!({"ulysses_sequence_parallel_size": 2}), "set it only in `memory`"),
            (json!({"head_rows": "many"}), "head_rows"),
            (json!({"offload_fraction": 0.5}), "memory.critic, whose keys"),
        ] {
            let message = with(settings).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn keys_of_the_run_are_keys_of_the_section() {
        assert!(RUN_KEYS.iter().all(|key| KEYS.contains(key)));
    }
}
