//! The `objective` section: named by the algorithm that it is nearest to, with what differs from it.

use super::assembly::Assembly;
use firebrick_engine::config::keys;
use firebrick_engine::objective::{Algorithm, ObjectiveConfig};
use firebrick_settings::is_on;
use serde_json::Value;

/// Names the objective, and takes out what it does not read and what its name sets. Gives the keys that nothing reads,
/// and why.
pub(super) fn resolve(assembly: &mut Assembly) -> Vec<(String, String)> {
    if assembly.keys_of("objective").is_empty() {
        return Vec::new();
    }
    let unread = unread(assembly);
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
        let own = assembly.get(&key);
        if own.is_some_and(|own| base.pointer(&pointer).is_some_and(|base| same(own, base))) {
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

/// Why nothing reads a setting, where nothing does.
fn idle(assembly: &Assembly, own: &str) -> Option<String> {
    let all = keys();
    let find = |name: &str| all.iter().find(|key| key.path == format!("objective.{name}"));
    let (other, values) = find(own.split('.').next()?)?.with.as_ref()?;
    let default = find(other)?.default.clone().unwrap_or_default();
    let current = assembly.get(&format!("objective.{other}")).unwrap_or(&default);
    if values.is_empty() {
        return (!is_on(current)).then(|| format!("ignored: {other} is off"));
    }
    let current = current.as_str().unwrap_or_default();
    let is_one = values.iter().any(|value| value == current);
    (!is_one).then(|| format!("ignored with {other}: {current}; it applies with {}", values.join(", ")))
}

fn unread(assembly: &Assembly) -> Vec<(String, String)> {
    let keys = assembly.keys_of("objective").into_iter();
    let idle = |key: String| {
        let why = idle(assembly, &key["objective.".len()..])?;
        Some((key, why))
    };
    keys.filter_map(idle).collect()
}

/// The algorithm with these parts.
fn algorithm(assembly: &Assembly) -> Algorithm {
    let by_sequence = text(assembly, "importance_sampling_level", "token");
    match text(assembly, "adv_estimator", "grpo") {
        "gae" => Algorithm::Ppo,
        "rloo" | "rloo_vectorized" => Algorithm::Rloo,
        "reinforce_plus_plus" => Algorithm::ReinforcePlusPlus,
        "reinforce_plus_plus_baseline" => Algorithm::ReinforcePlusPlusBaseline,
        "remax" => Algorithm::Remax,
        "opo" => Algorithm::Opo,
        "pass_at_k" => Algorithm::PassAtK,
        "gpg" => Algorithm::Gpg,
        _ => match text(assembly, "policy_loss", "clip") {
            "cispo" => Algorithm::Cispo,
            "sapo" => Algorithm::Sapo,
            "geo_mean" => Algorithm::Gmpo,
            "vespo" => Algorithm::Vespo,
            "kl_cov" => Algorithm::KlCov,
            "clip_cov" => Algorithm::ClipCov,
            _ if by_sequence == "sequence_token" => Algorithm::GspoToken,
            _ if by_sequence == "sequence" => Algorithm::Gspo,
            _ => Algorithm::Grpo,
        },
    }
}
