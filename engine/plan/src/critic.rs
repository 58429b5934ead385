//! The critic's part of the `memory` section: its own settings over the policy's.

use super::{MemoryConfig, ModelPlan};
use crate::{Error, Result};
use firebrick_spec::Arch;
use serde_json::{Map, Value};

/// Keys of the section that belong to the run, or to another model.
const NOT_ITS_OWN: [&str; 10] = [
    "preset",
    "plan",
    "budget",
    "host_budget",
    "margin",
    "limit",
    "recover",
    "cleanup_every",
    "reference",
    "critic",
];

/// Keys that say how much is done at a time, and not where things live.
const SIZES: [&str; 6] = [
    "head_rows",
    "attention_rows",
    "train_tokens",
    "score_tokens",
    "micro_batch_size",
    "prefetch",
];

impl MemoryConfig {
    /// The settings that the critic's plan is made of.
    pub fn of_critic(&self) -> Result<Self> {
        let base = Self {
            critic: Map::new(),
            ..self.clone()
        };
        if self.critic.is_empty() {
            return Ok(base);
        }
        let Ok(Value::Object(mut all)) = serde_json::to_value(&base) else {
            unreachable!("a section is a mapping")
        };
        let known: Vec<String> = all.keys().cloned().collect();
        for (key, value) in &self.critic {
            check_key(key, &known)?;
            all.insert(key.clone(), value.clone());
        }
        let own: Self = serde_path_to_error::deserialize(Value::Object(all))
            .map_err(|e| Error::Config(format!("memory.critic.{}: {}", e.path(), e.inner())))?;
        own.check().map_err(|e| match e {
            Error::Config(detail) => Error::Config(format!(
                "memory.critic, whose keys stand over the policy's: {detail}"
            )),
            other => other,
        })?;
        Ok(own)
    }

    /// The critic's plan.
    pub fn critic_plan(&self, arch: &Arch) -> Result<ModelPlan> {
        self.of_critic()?.plan(arch)
    }

    /// Leaves everything but sizes and limits to the policy's settings.
    pub(crate) fn critic_follows(&mut self) {
        self.critic.retain(|key, _| SIZES.contains(&key.as_str()));
    }

    /// Sets a size of the critic's own, or leaves it to the policy.
    pub(crate) fn set_critic(&mut self, key: &str, value: Option<usize>) {
        match value {
            Some(value) => self.critic.insert(key.to_owned(), value.into()),
            None => self.critic.remove(key),
        };
    }

    /// A number of the critic's own.
    pub(crate) fn critic_size(&self, key: &str) -> Option<usize> {
        let value = self.critic.get(key).and_then(Value::as_u64);
        value.map(|n| n as usize)
    }
}

fn check_key(key: &str, known: &[String]) -> Result<()> {
    if NOT_ITS_OWN.contains(&key) {
        return Err(Error::Config(format!(
            "memory.critic.{key}: `{key}` is the run's and not a model's; it stands in `memory` alone"
        )));
    }
    if known.iter().any(|k| k == key) {
        return Ok(());
    }
    let closeness = |name: &str| strsim::jaro_winkler(name, key);
    let own = known.iter().filter(|k| !NOT_ITS_OWN.contains(&k.as_str()));
    let nearest = own.max_by(|a, b| closeness(a).total_cmp(&closeness(b)));
    Err(Error::Config(format!(
        "memory.critic: unknown key `{key}`; did you mean `{}`?",
        nearest.map_or("", String::as_str)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParamOffload;
    use serde_json::json;

    fn with(critic: &Value) -> Result<MemoryConfig> {
        let memory = MemoryConfig {
            gradient_checkpointing: true,
            critic: critic.as_object().cloned().unwrap_or_default(),
            ..MemoryConfig::default()
        };
        memory.of_critic()
    }

    #[test]
    fn what_the_critic_leaves_out_is_the_policys() {
        let own = with(&json!({"param_offload": "streamed", "train_tokens": 64})).unwrap();
        assert!(own.gradient_checkpointing);
        assert_eq!(own.param_offload, ParamOffload::Streamed);
        assert_eq!(own.train_tokens, 64);
        assert_eq!(with(&json!({})).unwrap().train_tokens, 16_384);
    }

    #[test]
    fn settings_of_the_critic_that_make_no_sense_are_refused_by_name() {
        for (settings, part) in [
            (json!({"trian_tokens": 3}), "did you mean `train_tokens`?"),
            (json!({"budget": 3}), "stands in `memory` alone"),
            (json!({"head_rows": "many"}), "memory.critic.head_rows"),
            (
                json!({"offload_fraction": 0.5}),
                "memory.critic, whose keys",
            ),
        ] {
            let message = with(&settings).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
