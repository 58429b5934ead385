//! A run's configuration as pairs of key and value, and repeated runs.

use firebrick_engine::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Keys and values of a configuration, as written.
pub type Settings = BTreeMap<String, String>;

/// Flattens a configuration: `optim.lr` → `0.001`.
pub fn settings(yaml: &str) -> Result<Settings> {
    let root: Value =
        serde_saphyr::from_str(yaml).map_err(|e| Error::Config(format!("config.yaml is not YAML: {e}")))?;
    let mut settings = Settings::new();
    if let Value::Object(root) = &root {
        flatten(root, "", &mut settings);
    }
    Ok(settings)
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

/// The index of the first run that each run repeats: itself, or one with equal settings except seeds and
/// `output`.
pub fn repeats(runs: &[Settings]) -> Vec<usize> {
    let comparable = |settings: &Settings| -> Settings {
        let is_compared = |key: &str| key != "output" && key.rsplit('.').next() != Some("seed");
        settings.iter().filter(|(key, _)| is_compared(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    let runs: Vec<Settings> = runs.iter().map(comparable).collect();
    let first = |(at, run): (usize, &Settings)| runs.iter().position(|other| other == run).unwrap_or(at);
    runs.iter().enumerate().map(first).collect()
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
