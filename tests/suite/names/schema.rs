//! The schema of configurations, the examples and the documents.

use std::path::{Path, PathBuf};

use firebrick_engine::config::{keys, schema};
use serde_json::{Map, Value, json};

use super::{code_spans, page, rows};
use crate::support::{checked, project};

fn validator() -> jsonschema::Validator {
    jsonschema::validator_for(&schema()).expect("a schema")
}

fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(project().join(folder)).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect()
}

/// What the schema says against a configuration.
fn errors(validator: &jsonschema::Validator, config: &Value) -> Vec<String> {
    let errors = validator.iter_errors(config);
    errors.map(|e| format!("{}: {e}", e.instance_path())).collect()
}

fn yaml(text: &str, of: &Path) -> Map<String, Value> {
    match serde_saphyr::from_str(text) {
        Ok(Value::Object(map)) => map,
        other => panic!("{}: {other:?}\n{text}", of.display()),
    }
}

#[test]
fn every_example_is_valid_and_a_wrong_key_in_it_is_not() {
    let validator = validator();
    let examples = files("examples", "yaml");
    for path in &examples {
        let text = std::fs::read_to_string(path).expect("a readable file");
        let config = yaml(&text, path);
        let found = errors(&validator, &Value::Object(config.clone()));
        assert!(found.is_empty(), "{}: {found:#?}", path.display());
        for section in config.keys().filter(|key| config[*key].is_object()) {
            let mut wrong = config.clone();
            wrong[section]["no_such_key"] = json!(1);
            // a model's `arch` alone has the keys of others
            assert!(!validator.is_valid(&Value::Object(wrong)), "{section}.no_such_key");
        }
    }
    checked("examples under the schema", examples.len());
}

#[test]
fn every_yaml_block_of_the_documents_is_valid() {
    let validator = validator();
    let mut blocks = 0;
    for path in files("docs", "md") {
        let text = std::fs::read_to_string(&path).expect("a readable file");
        for block in text.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()) {
            let mut config = yaml(block, &path);
            // a list of rewards stands for itself, as part of a task
            if let Some(rewards) = config.remove("rewards") {
                config.insert("task".into(), json!({"kind": "jsonl", "train": "rows", "rewards": rewards}));
            }
            config.entry("model").or_insert_with(|| json!({"path": "m"}));
            config.entry("output").or_insert_with(|| json!("runs/x"));
            let found = errors(&validator, &Value::Object(config));
            assert!(found.is_empty(), "{}: {found:#?}\n{block}", path.display());
            blocks += 1;
        }
    }
    checked("blocks of documents under the schema", blocks);
}

/// The default of a row is what the schema has, wherever both say one as a value.
#[test]
fn defaults_in_the_tables_of_the_reference_are_those_of_the_schema() {
    let text = page("configuration.md");
    let all = keys();
    let mut compared = 0;
    let sections = ["rollout", "update", "trainer", "memory", "critic", "optim", "objective"];
    for section in sections {
        let (_, part) = text.split_once(&format!("\n## `{section}`\n")).expect("a section");
        let part = part.split("\n## ").next().unwrap_or_default();
        for row in rows(part, "key").into_iter().filter(|row| row.len() >= 3) {
            let (names, defaults) = (code_spans(row[0]), code_spans(row[1]));
            if names.len() != defaults.len() {
                continue;
            }
            for (name, default) in names.into_iter().zip(defaults) {
                let path = format!("{section}.{name}");
                let Some(own) = all.iter().find(|key| key.path == path && !key.is_section) else {
                    continue;
                };
                let shown: Value = serde_saphyr::from_str(default).expect("a value");
                let Some(known) = own.default.as_ref().filter(|known| !known.is_null()) else {
                    continue;
                };
                let equal = match (shown.as_f64(), known.as_f64()) {
                    (Some(shown), Some(known)) => (shown - known).abs() <= 1e-12 * known.abs(),
                    _ => shown == *known,
                };
                assert!(equal, "docs/configuration.md: `{path}` is {default}, the schema has {known}");
                compared += 1;
            }
        }
    }
    assert!(compared > 60, "{compared}");
    checked("defaults in the reference", compared);
}
