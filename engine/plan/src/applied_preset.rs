//! A preset laid under what a configuration says, and what of it a device cannot do.

use crate::Preset;
use firebrick_spec::{Backend, DeviceProfile, Precision};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The key of the float type of a run.
pub const PRECISION: &str = "precision";
/// The key of the share of the device that sampling may have.
pub const SHARE: &str = "rollout.gpu_memory_utilization";

/// Values that a preset set for a run. A value that is set through the preset, and no other, gives way where the run
/// cannot have it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AppliedPreset {
    /// Its name; none where the configuration names no preset.
    pub name: Option<Preset>,
    /// The values that are the preset's, by the path of their key. What the configuration says itself is not among
    /// them.
    pub set: BTreeMap<String, Value>,
    /// The values that were not taken.
    pub left_out: Vec<DroppedValue>,
}

/// A value of a preset that a run does not take.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DroppedValue {
    /// The path of its key.
    pub key: String,
    /// The preset's value.
    pub value: Value,
    /// Why the run does without it.
    pub because: String,
}

/// The properties of a device that decide which values of a preset it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceAbilities {
    /// As it names itself.
    pub name: String,
    /// Its backend.
    pub backend: Backend,
    /// The float types that it computes in.
    pub precisions: Vec<Precision>,
    /// Bytes it holds, where that is known.
    pub capacity_bytes: Option<u64>,
}

impl DeviceAbilities {
    /// Those of a device. `dtypes` are the names of the float types that it says it computes in; without them, where
    /// the device is not at hand, the types that every device of its backend computes in.
    pub fn new(profile: &DeviceProfile, dtypes: Option<&[&str]>) -> Self {
        let assumed = |precision: Precision| match profile.backend {
            Backend::Cpu => true,
            Backend::Cuda | Backend::Metal => precision != Precision::F16,
            Backend::Vulkan | Backend::Wgpu => precision == Precision::F32,
        };
        let known = |precision: &Precision| match dtypes {
            Some(dtypes) => dtypes.contains(&precision.name()),
            None => assumed(*precision),
        };
        Self {
            name: profile.name.clone(),
            backend: profile.backend,
            precisions: Precision::ALL.into_iter().filter(known).collect(),
            capacity_bytes: profile.capacity_bytes,
        }
    }
}

impl AppliedPreset {
    /// Lays the values of the preset that a configuration names under those that it says itself. A name that is no
    /// preset is left for whoever reads the section.
    pub fn merge_into(root: &mut Map<String, Value>) -> Self {
        let named = root.get("memory").and_then(|memory| memory.get("preset"));
        let Some(Ok(preset)) = named.cloned().map(serde_json::from_value::<Preset>) else {
            return Self::default();
        };
        let mut this = Self { name: Some(preset), ..Self::default() };
        let mut values = preset.run_settings();
        values.insert("memory".into(), Value::Object(preset.settings()));
        this.remove_conflicts(&mut values, root);
        this.merge(root, values, "");
        this
    }

    /// Takes out what would not go with something that is written.
    fn remove_conflicts(&mut self, values: &mut Map<String, Value>, written: &Map<String, Value>) {
        let rollout = |key: &str| written.get("rollout").and_then(|section| section.get(key));
        let sampled = rollout(PRECISION).and_then(Value::as_str);
        if sampled == Some(Precision::F32.name()) && !written.contains_key(PRECISION) {
            let because = "rollout.precision is f32, and rollout.precision must not exceed precision";
            if let Some(value) = values.remove(PRECISION) {
                self.record(PRECISION, value, because);
            }
        }
        let share = SHARE.trim_start_matches("rollout.");
        let limited = rollout("kv_cache_memory_bytes").is_some_and(|bytes| !bytes.is_null());
        if limited && rollout(share).is_none() {
            let rollout = values.get_mut("rollout").and_then(Value::as_object_mut);
            if let Some(value) = rollout.and_then(|rollout| rollout.remove(share)) {
                let because = "rollout.kv_cache_memory_bytes is set, and limits the KV cache itself";
                self.record(SHARE, value, because);
            }
        }
    }

    fn merge(&mut self, into: &mut Map<String, Value>, values: Map<String, Value>, prefix: &str) {
        for (key, value) in values {
            let path = format!("{prefix}{key}");
            match (into.get_mut(&key), value) {
                (Some(Value::Object(into)), Value::Object(values)) => {
                    self.merge(into, values, &format!("{path}."));
                }
                (Some(_), _) => {}
                (None, Value::Object(values)) => {
                    let mut section = Map::new();
                    self.merge(&mut section, values, &format!("{path}."));
                    if !section.is_empty() {
                        into.insert(key, Value::Object(section));
                    }
                }
                (None, value) => {
                    self.set.insert(path, value.clone());
                    into.insert(key, value);
                }
            }
        }
    }

    /// True if a value is the preset's.
    pub fn sets(&self, key: &str) -> bool {
        self.set.contains_key(key)
    }

    /// Values of the preset that a run cannot have on a device: each key with the reason. `planned` is true if a budget
    /// or a file decides the run's plan.
    pub fn beyond(&self, device: &DeviceAbilities, planned: bool) -> Vec<(&'static str, String)> {
        let reasons = [(PRECISION, self.unsupported_precision(device)), (SHARE, unsupported_share(device, planned))];
        let taken = reasons.into_iter().filter(|(key, _)| self.sets(key));
        taken.filter_map(|(key, reason)| reason.map(|reason| (key, reason))).collect()
    }

    /// Why a device does not train in the preset's precision.
    fn unsupported_precision(&self, device: &DeviceAbilities) -> Option<String> {
        let value = self.set.get(PRECISION)?;
        let wanted = Precision::ALL.into_iter().find(|precision| value == precision.name())?;
        if device.backend == Backend::Cpu {
            return Some(format!(
                "the CPU stores {wanted} and computes in f32, which takes longer, and f32 master weights take more than two-byte \
                 weights save"
            ));
        }
        if device.precisions.contains(&wanted) {
            return None;
        }
        let known: Vec<&str> = device.precisions.iter().map(|p| p.name()).collect();
        Some(format!("{} is not known to compute in {wanted}, but in {}", device.name, known.join(" and ")))
    }

    /// Moves a value from those that are the preset's to those that are left out.
    pub fn leave_out(&mut self, key: &str, because: impl Into<String>) {
        if let Some(value) = self.set.remove(key) {
            self.record(key, value, because);
        }
    }

    fn record(&mut self, key: &str, value: Value, because: impl Into<String>) {
        self.left_out.push(DroppedValue { key: key.to_owned(), value, because: because.into() });
    }

    /// The preset's values as a configuration's overrides.
    pub fn settings(&self) -> Vec<String> {
        let setting = |(key, value): (&String, &Value)| format!("{key}={}", plain(value));
        self.set.iter().map(setting).collect()
    }
}

impl DroppedValue {
    /// The value as a configuration's override.
    pub fn setting(&self) -> String {
        format!("{}={}", self.key, plain(&self.value))
    }
}

/// Why sampling on a device has no share of it.
fn unsupported_share(device: &DeviceAbilities, planned: bool) -> Option<String> {
    if planned {
        return Some("memory.budget or memory.plan decides what stays on the device while sampling".into());
    }
    match (device.backend, device.capacity_bytes) {
        (Backend::Cpu, _) => Some("the CPU has no separate memory to take a share of".into()),
        (_, None) => Some(format!("{} does not report the size of its memory", device.name)),
        (_, Some(_)) => None,
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(word) => word.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
