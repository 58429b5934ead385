use super::*;
use crate::config::parse;
use firebrick_settings::violations;

/// A configuration with every section, in which no setting stands in the way of another.
const COMPLETE: &str = "
model: {path: m, lora: {}}
output: runs/x
task: {kind: arithmetic}
warmup: {sft: {train: rows.jsonl}}
sft: {train: rows.jsonl}
memory: {gradient_checkpointing: true, activation_offload: true, optimizer_offload: cpu}
";

/// Settings beside which a key is read, by what the schema says of it and of its sections.
fn companions(keys: &[Key], path: &str) -> Vec<String> {
    let mut settings = Vec::new();
    if path.starts_with("critic") || path.starts_with("memory.critic") {
        settings.push("objective=ppo".to_owned());
    } else if path.starts_with("rollout.dynamic_sampling") {
        settings.push("rollout.dynamic_sampling.enable=true".to_owned());
    }
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    for key in ends.filter_map(|end| keys.iter().find(|key| key.path == path[..end])) {
        let Some((name, values)) = &key.with else { continue };
        let section = key.path.rsplit_once('.').map_or(String::new(), |(section, _)| format!("{section}."));
        let other = format!("{section}{name}");
        settings.extend(companions(keys, &other));
        let named = keys.iter().find(|key| key.path == other).and_then(|key| key.values.first());
        let value = values.first().or(named.map(|(name, _)| name)).map_or("true", String::as_str);
        settings.push(format!("{other}={value}"));
    }
    settings
}

fn validator() -> jsonschema::Validator {
    jsonschema::validator_for(&schema()).expect("a schema")
}

fn is_valid(text: &str) -> bool {
    let config: Value = serde_saphyr::from_str(text).expect("YAML");
    let valid = validator().is_valid(&config);
    assert_eq!(violations(&SCHEMA, &config).is_empty(), valid, "{text}");
    valid
}

#[test]
fn the_schema_is_one_without_references_or_numbers_of_rust() {
    let schema = schema();
    assert!(jsonschema::meta::is_valid(&schema));
    let text = schema.to_string();
    // a key may be named so: of a number it is a text
    for absent in ["$ref", "\"format\":\"", "]("] {
        assert!(!text.contains(absent), "{absent}");
    }
    assert!(text.len() < 200_000, "{} bytes", text.len());
}

#[test]
fn sections_may_be_null_and_an_objective_a_name() {
    for ok in [
        "model: {path: m}\noutput: o\nobjective: grpo\nmemory:\ncritic: null\n",
        "model: {path: m}\noutput: o\nobjective: {name: dapo, kl_loss_type: low_var_kl}\n",
        "model: {path: m, lora: {r: 8, lora_alpha: 16, target_modules: [q_proj]}}\noutput: o\n",
        "model: {path: m}\noutput: o\nmemory: {budget: 8GiB, limit: 4096}\noptim: {loss_scale: dynamic}\n",
    ] {
        assert!(is_valid(ok), "{ok}");
    }
    for wrong in [
        "model: {path: m}\noutput: o\nobjective: gpro\n",
        "model: {path: m}\noutput: o\nmemory: {budget: 8 parsecs}\n",
        "model: {path: m}\noutput: o\nrollout: {n: 0}\n",
        "model: {path: m}\noutput: o\nrollout: {m: 8}\n",
        "model: {path: m}\noutput: o\ntask: {kind: arithmetic, train: x}\n",
        "model: {path: m}\noutput: o\ntask: {kind: jsonl, train: x, rewards: [{kind: exact, pattern: x}]}\n",
        "model: {path: m}\n",
        "model: null\noutput: o\n",
    ] {
        assert!(!is_valid(wrong), "{wrong}");
    }
}

#[test]
fn what_is_written_back_complete_is_valid() {
    for objective in ["grpo", "ppo", "gspo"] {
        let text = format!("model: {{path: m}}\noutput: o\ntask: {{kind: arithmetic}}\nobjective: {objective}\n");
        let config = parse(&text, &[]).expect("a configuration");
        let yaml = config.to_yaml().expect("YAML");
        let value: Value = serde_saphyr::from_str(&yaml).expect("YAML");
        let errors: Vec<String> =
            validator().iter_errors(&value).map(|e| format!("{}: {e}", e.instance_path())).collect();
        assert!(errors.is_empty(), "{errors:#?}\n{yaml}");
    }
}

/// A number beyond each bound of a key.
fn beyond(key: &Key) -> Vec<f64> {
    let bound =
        |prefix: &str| key.takes.split(", ").find_map(|part| part.strip_prefix(prefix)?.trim().parse::<f64>().ok());
    let steps = [("at least", -1.0), ("at most", 1.0), ("above", 0.0), ("below", 0.0)];
    steps.iter().filter_map(|(prefix, step)| Some(bound(prefix)? + step)).collect()
}

#[test]
fn numbers_beyond_a_bound_are_refused_with_the_key_in_files_and_in_code() {
    let (keys, mut checked) = (keys(), 0);
    for key in keys.iter().filter(|key| key.kinds.is_empty() && !key.path.starts_with("task.")) {
        for number in beyond(key) {
            let mut overrides = companions(&keys, &key.path);
            overrides.push(format!("{}={number}", key.path));
            let error = parse(COMPLETE, &overrides).expect_err(&key.path).to_string();
            assert!(error.contains(&key.path) && error.contains("must be "), "{}={number}: {error}", key.path);
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}

/// Second names in the sources that a configuration is read by.
#[test]
fn every_second_name_that_is_read_is_in_the_schema() {
    let text = schema().to_string();
    let mut count = 0;
    for source in [
        include_str!("../lora.rs"),
        include_str!("../../../objectives/src/advantage/estimator.rs"),
        include_str!("../../../objectives/src/correction.rs"),
        include_str!("../../../objectives/src/kl.rs"),
        include_str!("../../../objectives/src/policy/mod.rs"),
    ] {
        for name in source.split("alias = \"").skip(1) {
            let name = name.split('"').next().unwrap_or_default();
            assert!(text.contains(&format!("\"{name}\"")), "{name}");
            count += 1;
        }
    }
    assert!(count >= 15, "{count}");
}

fn key<'k>(keys: &'k [Key], path: &str) -> &'k Key {
    let key = keys.iter().find(|key| key.path == path);
    key.unwrap_or_else(|| panic!("no key {path}"))
}

#[test]
fn a_key_is_told_with_its_default_its_range_and_its_values() {
    let keys = keys();
    let n = key(&keys, "rollout.n");
    assert_eq!((n.takes.as_str(), n.default.as_ref()), ("integer, at least 1", Some(&8.into())));
    let home = key(&keys, "memory.param_offload");
    let names: Vec<&str> = home.values.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["none", "idle", "streamed"]);
    assert!(home.values[2].1.as_ref().is_some_and(|what| what.contains("segment by segment")));
    assert_eq!(home.default, Some("none".into()));
    assert!(key(&keys, "output").is_required && !n.is_required);
    assert!(key(&keys, "memory.reference").is_section);
    assert!(!key(&keys, "model.arch").is_section, "its keys are transformers'");
    let tau = key(&keys, "objective.tau_pos").with.clone();
    assert_eq!(tau, Some(("policy_loss".to_owned(), vec!["sapo".to_owned()])));
}

#[test]
fn keys_of_some_kinds_of_task_or_reward_say_so() {
    let keys = keys();
    assert_eq!(key(&keys, "task.difficulty").kinds, ["arithmetic"]);
    assert_eq!(key(&keys, "task.rewards.tolerance").kinds, ["number", "math"]);
    assert!(key(&keys, "task.rewards.weight").kinds.is_empty());
    let kinds = &key(&keys, "task.rewards.kind").values;
    assert!(kinds.len() >= 7, "{kinds:?}");
}

#[test]
fn every_key_is_described_and_says_what_it_takes() {
    let keys = keys();
    assert!(keys.len() > 180, "{}", keys.len());
    for key in &keys {
        assert!(key.description.len() > 10, "{}: {:?}", key.path, key.description);
        assert!(!key.takes.is_empty(), "{} takes nothing", key.path);
    }
}
