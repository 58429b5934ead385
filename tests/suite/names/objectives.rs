//! `docs/objectives.md` and the code: every algorithm has its section and sets what the page says, and every key and
//! value of `objective` is on the page and in the reference.

use std::collections::BTreeSet;

use firebrick_engine::config::parse;
use firebrick_engine::objective::{Algorithm, ObjectiveConfig};
use serde_json::Value;

use super::{code_spans, keys, page, rows, variants};
use crate::support::checked;

fn written(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).expect("JSON")
}

/// A value as the page writes it.
fn word(value: &Value) -> String {
    match value {
        Value::String(word) => word.clone(),
        other => other.to_string(),
    }
}

/// Keys of `objective`, those of its sections without the section.
fn objective_keys() -> Vec<String> {
    let all = keys();
    let own = all.iter().filter_map(|key| key.strip_prefix("objective."));
    own.map(str::to_owned).collect()
}

#[test]
fn every_algorithm_sets_what_the_page_says() {
    let text = page("objectives.md");
    let table = rows(&text, "algorithm");
    assert_eq!(table.len(), Algorithm::ALL.len() + 1, "a row an algorithm");
    for (algorithm, row) in Algorithm::ALL.iter().zip(&table[1..]) {
        let name = word(&written(algorithm));
        assert_eq!(row[0], format!("`{name}`"));
        let (own, base) = (written(&algorithm.settings()), written(&ObjectiveConfig::default()));
        let own = own.as_object().expect("a mapping");
        let sets: BTreeSet<String> = own
            .iter()
            .filter(|(key, value)| *key != "name" && base[*key] != **value)
            .map(|(key, value)| format!("{key}: {}", word(value)))
            .collect();
        let shown: BTreeSet<String> = code_spans(row[1]).into_iter().map(str::to_owned).collect();
        assert_eq!(shown, sets, "{name}");
        let (_, section) = text
            .split_once(&format!("\n### `{name}`\n"))
            .unwrap_or_else(|| panic!("docs/objectives.md has no section `{name}`"));
        let section = section.split("\n##").next().unwrap_or_default();
        for part in ["arxiv.org/abs/", "\nverl: ", "TRL:"] {
            assert!(section.contains(part), "{name}: its section has no {part:?}");
        }
    }
    checked("algorithms on the page of objectives", Algorithm::ALL.len());
}

#[test]
fn every_objective_key_and_value_is_on_the_page_and_in_the_reference() {
    let (text, reference) = (page("objectives.md"), page("configuration.md"));
    let (_, section) = reference.split_once("## `objective`").expect("a section on objectives");
    let section = section.split("\n## ").next().unwrap_or_default();
    let spans: BTreeSet<&str> = code_spans(&text).into_iter().collect();
    let short: BTreeSet<&str> = code_spans(section).into_iter().collect();
    let keys = objective_keys();
    for key in keys.iter().filter(|key| *key != "name") {
        let own = key.rsplit('.').next().unwrap_or(key);
        assert!(spans.contains(own), "docs/objectives.md does not name `{own}`");
        assert!(
            short.contains(own) || short.contains(key.as_str()),
            "docs/configuration.md does not list `{key}` under objective"
        );
        for value in variants(&format!("objective.{key}")) {
            assert!(spans.contains(value.as_str()), "docs/objectives.md: `{key}` can be `{value}`");
        }
    }
    checked("objective keys in the docs", keys.len());
}

#[test]
fn every_key_in_the_tables_of_the_page_is_one_and_every_example_is_read() {
    let text = page("objectives.md");
    let known: BTreeSet<String> = objective_keys().into_iter().collect();
    for row in rows(&text, "key").into_iter().filter(|row| row[0] != "key") {
        for key in code_spans(row[0]) {
            assert!(known.contains(key), "docs/objectives.md names `{key}`, which is no key");
        }
    }
    let examples = text.split("```yaml\n").skip(1);
    let examples: Vec<&str> = examples.filter_map(|e| e.split("```").next()).collect();
    for example in &examples {
        let least = "model: {path: m}\ntask: {kind: arithmetic}\noutput: runs/x\n";
        parse(&format!("{least}{example}"), &[])
            .unwrap_or_else(|error| panic!("docs/objectives.md: {error}\n{example}"));
    }
    checked("examples on the page of objectives", examples.len());
}
