//! YAML plus `key.path=value` overrides into a [`RunConfig`], with unknown keys refused and the nearest one named.

use super::RunConfig;
use crate::task::TaskConfig;
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// Reads a configuration file and applies overrides. Relative paths in it are relative to its folder, except `output`,
/// which is relative to where the program runs.
pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let mut config = parse(&text, overrides).map_err(|e| match e {
        Error::Config(detail) => Error::Config(format!("{}: {detail}", path.display())),
        other => other,
    })?;
    // made absolute, so that the config.yaml written into the run folder reproduces the run from anywhere
    let base = path.parent().unwrap_or(Path::new("."));
    let mut files: Vec<_> = [&mut config.model.path, &mut config.model.tokenizer]
        .into_iter()
        .flatten()
        .collect();
    if let Some(TaskConfig::Jsonl(jsonl)) = &mut config.task {
        files.push(&mut jsonl.train);
        files.extend(&mut jsonl.validation);
    }
    for file in files {
        *file = std::path::absolute(base.join(&file)).map_err(Error::io("resolve", &*file))?;
    }
    Ok(config)
}

/// Reads a configuration from text and applies overrides.
pub fn parse(text: &str, overrides: &[String]) -> Result<RunConfig> {
    let value: Value =
        serde_saphyr::from_str(text).map_err(|e| Error::Config(format!("is not YAML: {e}")))?;
    let Value::Object(mut root) = value else {
        return Err(Error::Config(
            "should be a mapping of sections (model, task, output, …)".into(),
        ));
    };
    for text in overrides {
        // before each, so that `objective.x=…` finds a section where the file has a name alone
        name_objective(&mut root);
        apply(&mut root, text)?;
    }
    name_objective(&mut root);
    let config: RunConfig = serde_path_to_error::deserialize(Value::Object(root)).map_err(|e| {
        let path = e.path().to_string();
        Error::Config(describe(&path, &e.into_inner().to_string()))
    })?;
    config.check()?;
    Ok(config)
}

/// `objective: grpo` is short for `objective: {name: grpo}`, and a section without a name is GRPO's.
fn name_objective(root: &mut Map<String, Value>) {
    match root.get_mut("objective") {
        Some(section @ Value::String(_)) => *section = serde_json::json!({"name": section.take()}),
        Some(Value::Object(section)) => {
            section.entry("name").or_insert_with(|| "grpo".into());
        }
        _ => {}
    }
}

/// Sets one value: `a.b.c=1`. The value is read as YAML, so that numbers, lists and `null` work.
fn apply(root: &mut Map<String, Value>, text: &str) -> Result<()> {
    let Some((path, value)) = text.split_once('=') else {
        return Err(Error::Config(format!(
            "override {text:?} should be key.path=value"
        )));
    };
    let value: Value = serde_saphyr::from_str(value)
        .map_err(|e| Error::Config(format!("override {text:?}: the value is not YAML: {e}")))?;
    let mut keys: Vec<&str> = path.split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut at = root;
    for key in keys {
        let next = at.entry(key).or_insert_with(|| Value::Object(Map::new()));
        if next.is_null() {
            *next = Value::Object(Map::new());
        }
        at = match next {
            Value::Object(map) => map,
            _ => {
                return Err(Error::Config(format!(
                    "override {text:?}: `{key}` is a value, not a section"
                )));
            }
        };
    }
    at.insert(last.to_owned(), value);
    Ok(())
}

/// Adds the place and, for an unknown key, the nearest known one to serde's message.
fn describe(path: &str, message: &str) -> String {
    let place = if path == "." {
        String::new()
    } else {
        format!("{path}: ")
    };
    let unknown = ["unknown field `", "unknown variant `"];
    let Some(rest) = unknown
        .iter()
        .find_map(|prefix| message.strip_prefix(prefix))
    else {
        return format!("{place}{message}");
    };
    let mut names = rest.split('`').step_by(2).map(str::to_owned);
    let found = names.next().unwrap_or_default();
    let known: Vec<String> = rest
        .split('`')
        .skip(2)
        .step_by(2)
        .map(str::to_owned)
        .collect();
    let nearest = known
        .iter()
        .max_by(|a, b| strsim::jaro_winkler(a, &found).total_cmp(&strsim::jaro_winkler(b, &found)));
    let what = if message.starts_with(unknown[0]) {
        "unknown key"
    } else {
        "unknown value"
    };
    match nearest {
        Some(nearest) => format!(
            "{place}{what} `{found}`; did you mean `{nearest}`? Known: {}",
            known.join(", ")
        ),
        None => format!("{place}{what} `{found}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "model: {path: m}\ntask: {kind: arithmetic}\noutput: runs/x\n";

    fn error(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|&s| s.to_owned()).collect();
        parse(text, &overrides).unwrap_err().to_string()
    }

    #[test]
    fn a_handful_of_keys_is_enough() {
        let config = parse(MINIMAL, &[]).unwrap();
        assert_eq!(config.rollout.n, 8);
        assert_eq!(config.objective, crate::config::ObjectiveConfig::default());
    }

    #[test]
    fn overrides_set_any_value_and_the_resolved_config_reads_back_the_same() {
        let overrides = [
            "trainer.steps=7",
            "objective=grpo",
            "objective.kl_loss_coef=0.01",
            "optim.clip_grad=null",
        ];
        let config = parse(MINIMAL, &overrides.map(str::to_owned)).unwrap();
        assert_eq!(config.trainer.steps, 7);
        assert_eq!(config.optim.clip_grad, None);
        assert_eq!(parse(&config.to_yaml().unwrap(), &[]).unwrap(), config);
        assert!(
            parse(MINIMAL, &["objective.adv_eps=0.1".to_owned()]).is_ok(),
            "GRPO needs no name"
        );
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_place_and_the_nearest_known_one() {
        let message = error(&format!("{MINIMAL}trainer: {{stepz: 3}}\n"), &[]);
        assert!(
            message.contains("trainer") && message.contains("`stepz`; did you mean `steps`?"),
            "{message}"
        );
        let message = error(MINIMAL, &["rolout.n=4"]);
        assert!(message.contains("did you mean `rollout`?"), "{message}");
    }

    #[test]
    fn a_wrong_type_names_the_key() {
        let message = error(&format!("{MINIMAL}trainer: {{steps: many}}\n"), &[]);
        assert!(
            message.contains("trainer.steps") && message.contains("many"),
            "{message}"
        );
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_key() {
        for (overrides, key) in [
            (&["rollout.n=0"][..], "rollout.n"),
            (&["rollout.temperature=0"], "rollout.temperature"),
            (&["rollout.top_p=0"], "top_p"),
            (&["optim.betas=[1.0, 0.9]"], "optim.betas"),
            (
                &["update.ppo_mini_batch_size=5"],
                "update.ppo_mini_batch_size",
            ),
            (&["objective.clip_ratio_c=0.5"], "clip_ratio_c"),
            (&["trainer.steps"], "key.path=value"),
        ] {
            let message = error(MINIMAL, overrides);
            assert!(message.contains(key), "{message}");
        }
    }
}
