//! The critic's part of the `memory` section: its own settings over the policy's.

use crate::{Granularity, MomentKind, OptimizerOffload, Order, Packing, ParamOffload};
use serde::de::{Deserializer, Error as _, IgnoredAny};
use serde::{Deserialize, Serialize};

/// Declares the settings of the section that a model may have of its own, and the keys that belong to the run or to
/// another model.
macro_rules! overrides {
    (own { $($(#[$doc:meta])* $key:ident: $kind:ty,)* } run { $($other:ident: $name:literal,)* }) => {
        /// Settings of the critic's own, under the keys of [`MemoryConfig`](crate::MemoryConfig). What is absent is the
        /// policy's.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
        #[serde(from = "Section")]
        #[allow(
            clippy::option_option,
            reason = "a setting may be absent here, and the setting itself may be absent"
        )]
        pub struct CriticMemory {
            $(
                $(#[$doc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $key: Option<$kind>,
            )*
        }

        /// The section as a file has it.
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields, expecting = "a map")]
        #[allow(clippy::option_option, reason = "as above")]
        struct Section {
            $(
                #[serde(default, deserialize_with = "present")]
                $key: Option<$kind>,
            )*
            $(
                #[serde(default, rename = $name, deserialize_with = "refuse_key_of_run")]
                $other: (),
            )*
        }

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for CriticMemory {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                "CriticMemory".into()
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let mut properties = serde_json::Map::new();
                $(
                    let mut own = generator.subschema_for::<$kind>();
                    let what = concat!("The critic's `memory.", stringify!($key), "`; defaults to the policy's.");
                    own.insert("description".into(), what.into());
                    properties.insert(stringify!($key).into(), own.into());
                )*
                schemars::json_schema!({
                    "type": "object",
                    "properties": properties,
                    "additionalProperties": false,
                })
            }
        }

        impl From<Section> for CriticMemory {
            fn from(section: Section) -> Self {
                Self { $($key: section.$key,)* }
            }
        }
    };
}

overrides! {
    own {
        /// See [`MemoryConfig::gradient_checkpointing`](crate::MemoryConfig::gradient_checkpointing).
        gradient_checkpointing: bool,
        /// See [`MemoryConfig::checkpoint_every`](crate::MemoryConfig::checkpoint_every).
        checkpoint_every: usize,
        /// See [`MemoryConfig::checkpoint_layers`](crate::MemoryConfig::checkpoint_layers).
        checkpoint_layers: Option<Vec<usize>>,
        /// See [`MemoryConfig::checkpoint_ratio`](crate::MemoryConfig::checkpoint_ratio).
        checkpoint_ratio: Option<f64>,
        /// See [`MemoryConfig::recompute_granularity`](crate::MemoryConfig::recompute_granularity).
        recompute_granularity: Granularity,
        /// See [`MemoryConfig::activation_offload`](crate::MemoryConfig::activation_offload).
        activation_offload: bool,
        /// See [`MemoryConfig::activation_offload_group`](crate::MemoryConfig::activation_offload_group).
        activation_offload_group: usize,
        /// See [`MemoryConfig::param_offload`](crate::MemoryConfig::param_offload).
        param_offload: ParamOffload,
        /// See [`MemoryConfig::order`](crate::MemoryConfig::order).
        order: Order,
        /// See [`MemoryConfig::grad_offload`](crate::MemoryConfig::grad_offload).
        grad_offload: bool,
        /// See [`MemoryConfig::optimizer_offload`](crate::MemoryConfig::optimizer_offload).
        optimizer_offload: OptimizerOffload,
        /// See [`MemoryConfig::offload_fraction`](crate::MemoryConfig::offload_fraction).
        offload_fraction: f64,
        /// See [`MemoryConfig::moments`](crate::MemoryConfig::moments).
        moments: MomentKind,
        /// See [`MemoryConfig::step_in_backward`](crate::MemoryConfig::step_in_backward).
        step_in_backward: bool,
        /// See [`MemoryConfig::packing`](crate::MemoryConfig::packing).
        packing: Packing,
        /// See [`MemoryConfig::micro_batch_size`](crate::MemoryConfig::micro_batch_size).
        micro_batch_size: Option<usize>,
        /// See [`MemoryConfig::prefetch`](crate::MemoryConfig::prefetch).
        prefetch: usize,
        /// See [`MemoryConfig::head_rows`](crate::MemoryConfig::head_rows).
        head_rows: usize,
        /// See [`MemoryConfig::attention_rows`](crate::MemoryConfig::attention_rows).
        attention_rows: usize,
        /// See [`MemoryConfig::score_tokens`](crate::MemoryConfig::score_tokens).
        score_tokens: usize,
        /// See [`MemoryConfig::train_tokens`](crate::MemoryConfig::train_tokens).
        train_tokens: usize,
    }
    run {
        _preset: "preset",
        _plan: "plan",
        _budget: "budget",
        _host_budget: "host_budget",
        _margin: "margin",
        _limit: "limit",
        _recover: "recover",
        _zero_stage: "zero_stage",
        _reshard_after_forward: "reshard_after_forward",
        _ulysses_sequence_parallel_size: "ulysses_sequence_parallel_size",
        _tensor_model_parallel_size: "tensor_model_parallel_size",
        _pipeline_model_parallel_size: "pipeline_model_parallel_size",
        _cleanup_every: "cleanup_every",
        _snapshot: "snapshot",
        _trace: "trace",
        _reference: "reference",
        _critic: "critic",
    }
}

/// Reads a setting that is there; `null` only where the setting takes it.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

fn refuse_key_of_run<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    IgnoredAny::deserialize(deserializer)?;
    Err(D::Error::custom("this key applies to the run and not to one model; set it only in `memory`"))
}

impl CriticMemory {
    /// Whether the critic has no settings of its own.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The settings that say how much is done at a time, and not where things live.
    #[must_use]
    pub(crate) fn sizes(&self) -> Self {
        Self {
            head_rows: self.head_rows,
            attention_rows: self.attention_rows,
            train_tokens: self.train_tokens,
            score_tokens: self.score_tokens,
            micro_batch_size: self.micro_batch_size,
            prefetch: self.prefetch,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryConfig;
    use serde_json::{Value, json};

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
        let own = with(json!({"param_offload": "streamed", "train_tokens": 64})).unwrap();
        assert!(own.gradient_checkpointing);
        assert_eq!(own.param_offload, ParamOffload::Streamed);
        assert_eq!(own.train_tokens, 64);
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
}
