//! The `objective` section: named by the algorithm that it is nearest to, with what differs from it.

use super::assembly::Assembly;
use firebrick_engine::objective::{Algorithm, ObjectiveConfig};
use serde_json::Value;

/// Settings that only some objectives read: prefix of the key, and the values of another setting that they go with.
const GOES_WITH: [(&str, &str, &[&str]); 12] = [
    ("scale_rewards", "adv_estimator", &["grpo", "grpo_leave_one_out", "pass_at_k"]),
    ("gamma", "adv_estimator", &["reinforce_plus_plus", "gae"]),
    ("lam", "adv_estimator", &["gae"]),
    ("importance_sampling_level", "policy_loss", &["clip", "cispo", "sapo"]),
    ("clip_ratio_low", "policy_loss", &["clip", "cispo", "geo_mean", "clip_cov"]),
    ("clip_ratio_high", "policy_loss", &["clip", "cispo", "geo_mean", "clip_cov"]),
    ("clip_ratio_c", "policy_loss", &["clip"]),
    ("tau_", "policy_loss", &["sapo"]),
    ("vespo_", "policy_loss", &["vespo"]),
    ("ppo_kl_coef", "policy_loss", &["kl_cov"]),
    ("kl_cov_ratio", "policy_loss", &["kl_cov"]),
    ("clip_cov_", "policy_loss", &["clip_cov"]),
];

/// The same for settings that a switch turns on: prefix of the key, the switch.
const SWITCHED: [(&str, &str); 6] = [
    ("kl_ctrl", "use_kl_in_reward"),
    ("kl_penalty", "use_kl_in_reward"),
    ("entropy_target", "use_adaptive_entropy"),
    ("entropy_coef_", "use_adaptive_entropy"),
    ("rollout_is_", "rollout_is"),
    ("rollout_rs_", "rollout_rs"),
];

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
    let goes = GOES_WITH.iter().find(|(start, _, _)| own.starts_with(start));
    if let Some((_, other, values)) = goes {
        let default = if *other == "adv_estimator" { "grpo" } else { "clip" };
        let value = text(assembly, other, default);
        if !values.contains(&value) {
            let with = values.join(", ");
            return Some(format!("ignored with {other}: {value}; it applies with {with}"));
        }
    }
    let switched = SWITCHED.iter().find(|(start, _)| own.starts_with(start));
    if let Some((_, switch)) = switched {
        let on = assembly.get(&format!("objective.{switch}"));
        if on.is_none_or(|on| on.is_null() || on == false) {
            return Some(format!("ignored: {switch} is off"));
        }
    }
    let scaled = text(assembly, "loss_agg_mode", "token-mean") == "seq-mean-token-sum-norm";
    if own == "loss_scale_factor" && !scaled {
        return Some("ignored: it applies with loss_agg_mode: seq-mean-token-sum-norm".into());
    }
    let kl = assembly.get("objective.kl_loss_coef").and_then(Value::as_f64).unwrap_or(0.0);
    (own == "use_bias_correction_kl" && kl == 0.0).then(|| "ignored: there is no KL in the loss".into())
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
