//! Second names that serde reads (`#[serde(alias)]`), which the derive of a schema does not see.

use serde_json::{Value, json};

/// Keys of `model.lora`, and what PEFT and verl call them.
const KEYS: [(&str, &[&str]); 3] =
    [("rank", &["r", "lora_rank"]), ("alpha", &["lora_alpha"]), ("dropout", &["lora_dropout"])];

/// Keys of `objective`, a value of theirs, and its other names.
const VALUES: [(&str, &str, &[&str]); 16] = [
    ("kl_penalty", "k1", &["kl"]),
    ("kl_penalty", "k2", &["mse", "k2+", "mse+"]),
    ("kl_penalty", "k3", &["low_var_kl"]),
    ("kl_penalty", "k1+", &["kl+"]),
    ("kl_penalty", "k3+", &["low_var_kl+"]),
    ("kl_loss_type", "k1", &["kl"]),
    ("kl_loss_type", "k2", &["mse", "k2+", "mse+"]),
    ("kl_loss_type", "k3", &["low_var_kl"]),
    ("kl_loss_type", "k1+", &["kl+"]),
    ("kl_loss_type", "k3+", &["low_var_kl+"]),
    ("adv_estimator", "pass_at_k", &["grpo_passk"]),
    ("policy_loss", "clip", &["vanilla"]),
    ("policy_loss", "geo_mean", &["gmpo"]),
    ("policy_loss", "reinforce", &["gpg"]),
    ("rollout_is", "token_truncate", &["token"]),
    ("rollout_is", "sequence_truncate", &["sequence"]),
];

/// What marks a second name in a schema, with the first one.
pub const SAME_AS: &str = "x-same-as";

/// Adds the second names.
pub(super) fn add(schema: &mut Value) {
    let sections = &mut schema["properties"];
    if let Some(lora) = properties_mut(&mut sections["model"]["properties"]["lora"]) {
        for (key, others) in KEYS {
            for other in others {
                let mut same = lora[key].clone();
                same["description"] = format!("The same as `{key}`.").into();
                same[SAME_AS] = key.into();
                if let Some(same) = same.as_object_mut() {
                    same.remove("default");
                }
                lora[*other] = same;
            }
        }
    }
    if let Some(objective) = properties_mut(&mut sections["objective"]) {
        for (key, value, others) in VALUES {
            add_values(&mut objective[key], value, others);
        }
    }
}

/// The properties of a section that may be something else instead.
fn properties_mut(schema: &mut Value) -> Option<&mut Value> {
    if schema.get("properties").is_some() {
        return schema.get_mut("properties");
    }
    let all = schema.get_mut("anyOf").and_then(Value::as_array_mut);
    all.into_iter().flatten().find_map(properties_mut)
}

/// Puts other names of a value into the list that has it.
fn add_values(schema: &mut Value, value: &str, others: &[&str]) {
    if let Some(Value::Array(all)) = schema.get_mut("oneOf") {
        if all.iter().any(|one| one["const"] == value) {
            all.extend(others.iter().map(|other| {
                json!({"type": "string", "const": other, "description": format!("The same as `{value}`."), SAME_AS: value})
            }));
            return;
        }
        // values without a description of their own share a list
        for one in all {
            add_values(one, value, others);
        }
    } else if let Some(Value::Array(all)) = schema.get_mut("anyOf") {
        for one in all {
            add_values(one, value, others);
        }
    } else if let Some(Value::Array(all)) = schema.get_mut("enum")
        && all.iter().any(|one| one == value)
    {
        all.extend(others.iter().map(|&other| Value::from(other)));
    }
}
