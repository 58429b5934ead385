//! A run's configuration as pairs of key and value, and which runs repeat each other.

use firebrick_engine::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Keys and values of a configuration, as written.
pub type Settings = BTreeMap<String, String>;

/// Flattens a configuration: `optim.lr` → `0.001`.
pub fn settings(yaml: &str) -> Result<Settings> {
    let root: Value =
        serde_saphyr::from_str(yaml).map_err(|e| Error::Config(format!("config.yaml is not YAML: {e}")))?;
    let mut found = Settings::new();
    if let Value::Object(root) = &root {
        flatten(root, "", &mut found);
    }
    Ok(found)
}

fn flatten(section: &Map<String, Value>, prefix: &str, into: &mut Settings) {
    for (key, value) in section {
        let path = format!("{prefix}{key}");
        match value {
            Value::Object(inner) if !inner.is_empty() => flatten(inner, &format!("{path}."), into),
            Value::String(text) => {
                into.insert(path, text.clone());
            }
            other => {
                into.insert(path, other.to_string());
            }
        }
    }
}

/// The index of the first run that each one repeats: itself, or one whose settings differ only in seeds and in
/// `output`.
pub fn repeats(runs: &[Settings]) -> Vec<usize> {
    let own = |settings: &Settings| -> Settings {
        let mut own = settings.clone();
        own.retain(|key, _| key != "output" && key.rsplit('.').next() != Some("seed"));
        own
    };
    let own: Vec<Settings> = runs.iter().map(own).collect();
    let first = |at: usize| own.iter().position(|other| *other == own[at]);
    (0..own.len()).map(|at| first(at).unwrap_or(at)).collect()
}

#[cfg(test)]
mod tests {
    use super::{repeats, settings};

    #[test]
    fn runs_that_differ_in_a_seed_repeat_each_other() {
        let yaml = |seed: u32, lr: f64| {
            let text = format!("output: runs/{seed}\noptim: {{lr: {lr}}}\ntrainer: {{seed: {seed}}}\n");
            settings(&text).unwrap()
        };
        let runs = [yaml(1, 0.1), yaml(2, 0.2), yaml(3, 0.1)];
        assert_eq!(runs[0]["optim.lr"], "0.1");
        assert_eq!(repeats(&runs), [0, 1, 0]);
    }
}
