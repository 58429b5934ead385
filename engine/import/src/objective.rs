//! The `objective` section: the nearest algorithm's name, and the settings that differ from it.

use super::assembly::Assembly;
use firebrick_engine::config::keys;
use firebrick_engine::objective::{Algorithm, ObjectiveConfig};
use firebrick_settings::is_on;
use serde_json::Value;

/// Names the objective and removes settings that it does not read or that its name implies. Returns the unread keys
/// with the reasons.
pub(super) fn resolve(assembly: &mut Assembly) -> Vec<(String, String)> {
    if assembly.keys_of("objective").is_empty() {
        return Vec::new();
    }
    let unread = unread_settings(assembly);
    for (key, _) in &unread {
        assembly.remove(key);
    }
    let algorithm = algorithm(assembly);
    let name = serde_json::to_value(algorithm).unwrap_or_default();
    let base = serde_json::to_value(algorithm.settings()).unwrap_or_default();
    // what the name sets beyond the defaults and nothing reads would be refused
    let plain = serde_json::to_value(ObjectiveConfig::default()).unwrap_or_default();
    for (key, value) in base.as_object().into_iter().flatten() {
        let path = format!("objective.{key}");
        if key != "name" && plain[key] != *value && !assembly.has(&path) && idle(assembly, key).is_some() {
            assembly.put(&path, plain[key].clone());
        }
    }
    for key in assembly.keys_of("objective") {
        let pointer = format!("/{}", key["objective.".len()..].replace('.', "/"));
        let value = assembly.get(&key);
        if value.is_some_and(|value| base.pointer(&pointer).is_some_and(|base| same(value, base))) {
            assembly.remove(&key);
        }
    }
    assembly.put("objective.name", name);
    if algorithm == Algorithm::Ppo && assembly.keys_of("critic").is_empty() {
        assembly.put("critic", Value::Object(serde_json::Map::new()));
    }
    unread
}

fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= f64::EPSILON * b.abs(),
        _ => a == b,
    }
}

fn text<'a>(assembly: &'a Assembly, key: &str, default: &'a str) -> &'a str {
    assembly.get(&format!("objective.{key}")).and_then(Value::as_str).unwrap_or(default)
}

/// Reason why no part of the objective reads a setting, if so.
fn idle(assembly: &Assembly, setting: &str) -> Option<String> {
    let keys = keys();
    let find = |name: &str| keys.iter().find(|key| key.path == format!("objective.{name}"));
    let (other, values) = find(setting.split('.').next()?)?.with.as_ref()?;
    let default = find(other)?.default.clone().unwrap_or_default();
    let current = assembly.get(&format!("objective.{other}")).unwrap_or(&default);
    if values.is_empty() {
        return (!is_on(current)).then(|| format!("ignored: {other} is off"));
    }
    let current = current.as_str().unwrap_or_default();
    let is_one = values.iter().any(|value| value == current);
    (!is_one).then(|| format!("ignored with {other}: {current}; it applies with {}", values.join(", ")))
}

fn unread_settings(assembly: &Assembly) -> Vec<(String, String)> {
    let with_reason = |key: String| idle(assembly, &key["objective.".len()..]).map(|why| (key, why));
    assembly.keys_of("objective").into_iter().filter_map(with_reason).collect()
}

/// The algorithm with these settings.
fn algorithm(assembly: &Assembly) -> Algorithm {
    let level = text(assembly, "importance_sampling_level", "token");
    let name = match text(assembly, "adv_estimator", "grpo") {
        "gae" => "ppo",
        "rloo_vectorized" => "rloo",
        "grpo" | "grpo_leave_one_out" => match text(assembly, "policy_loss", "clip") {
            "geo_mean" => "gmpo",
            "clip" | "reinforce" if level == "sequence_token" => "gspo_token",
            "clip" | "reinforce" if level == "sequence" => "gspo",
            loss => loss,
        },
        estimator => estimator,
    };
    // a loss of no name is that of `grpo`
    serde_json::from_value(name.into()).unwrap_or_default()
}
