//! The techniques that a plan uses, and what each saves and costs.

use super::fit::Fit;
use crate::config::object;
use crate::estimate::EstimatePhase;
use crate::request::{Candidate, Request};
use crate::{MemoryConfig, Result, TECHNIQUES, Technique};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Keys of the critic's overrides that say how much is done at a time, and not where it is.
const CRITIC_SIZES: [&str; 6] =
    ["head_rows", "attention_rows", "train_tokens", "score_tokens", "micro_batch_size", "prefetch"];

/// One technique of a plan.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Decision {
    /// The decision in words.
    pub what: String,
    /// The settings, as they are written in a configuration.
    pub settings: String,
    /// The phase that needs it most.
    pub phase: EstimatePhase,
    /// Bytes that the phase would need more without it.
    pub saves_bytes: u64,
    /// Seconds that a step would take less without it.
    pub costs_seconds: f64,
}

impl Fit {
    /// Settings that differ from the defaults, and the sequences sampled at a time, as a configuration's overrides.
    pub fn overrides(&self) -> Vec<String> {
        let chosen = object(&self.memory).unwrap_or_default();
        let plain = object(&MemoryConfig::default()).unwrap_or_default();
        let ignored = ["preset", "plan", "budget", "host_budget", "margin", "limit", "recover"];
        let mut overrides: Vec<String> = chosen
            .iter()
            .filter(|(key, value)| !ignored.contains(&key.as_str()) && plain[*key] != **value)
            .flat_map(|(key, value)| spelled(&format!("memory.{key}"), value))
            .collect();
        overrides.push(format!("rollout.max_num_seqs={}", self.plan.rollout.max_num_seqs));
        overrides
    }

    /// Every technique that the plan uses, with what it saves and costs by itself.
    ///
    /// # Errors
    /// `Error::Config` or `Error::Plan` if there is no plan without one of the techniques.
    pub fn decisions(&self, request: &Request) -> Result<Vec<Decision>> {
        let used = Candidate { memory: self.memory.clone(), max_num_seqs: self.plan.rollout.max_num_seqs };
        let effects = TECHNIQUES.iter().filter_map(|technique| Some((technique, technique.explain(&used, request)?)));
        effects.map(|(technique, what)| self.decision(&used, *technique, what, request)).collect()
    }

    fn decision(&self, used: &Candidate, technique: &dyn Technique, what: &str, request: &Request) -> Result<Decision> {
        let mut without = used.clone();
        technique.undo(&mut without, request);
        if without.memory.critic_settings().is_err() {
            // an override of the critic's needed what was undone: it goes with it
            without.memory.critic = without.memory.critic.only(&CRITIC_SIZES);
        }
        let without = request.estimate(&without.plan(&request.workload)?);
        let saved = |name, bytes: u64| bytes.saturating_sub(self.estimate.phase(name).map_or(0, |p| p.total_bytes));
        let most =
            without.phases.iter().map(|p| (saved(p.name, p.total_bytes), p.name)).max_by_key(|(bytes, _)| *bytes);
        let (saves_bytes, phase) = most.unwrap_or((0, EstimatePhase::Backward));
        let settings: Vec<String> = technique.used_keys(used).iter().map(|key| setting(used, key)).collect();
        Ok(Decision {
            what: what.to_owned(),
            settings: settings.join(" "),
            phase,
            saves_bytes,
            costs_seconds: self.estimate.seconds.total() - without.seconds.total(),
        })
    }
}

fn spelled(key: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => {
            map.iter().filter(|(_, v)| !v.is_null()).flat_map(|(k, v)| spelled(&format!("{key}.{k}"), v)).collect()
        }
        Value::String(text) => vec![format!("{key}={text}")],
        other => vec![format!("{key}={other}")],
    }
}

/// A key's setting as a configuration's override.
fn setting(used: &Candidate, key: &str) -> String {
    let Some(path) = key.strip_prefix("memory.") else {
        return format!("{key}={}", used.max_num_seqs);
    };
    let memory = Value::Object(object(&used.memory).unwrap_or_default());
    let value = memory.pointer(&format!("/{}", path.replace('.', "/")));
    spelled(key, value.unwrap_or(&Value::Null)).join(" ")
}
