//! `docs/reference/configuration.md`, from the configuration's schema.

use super::fill;
use crate::explain::{summary, written};
use firebrick::engine::config::{Key, keys};
use firebrick::engine::objective::Algorithm;
use std::fmt::Write;

const INTRODUCTION: &str = "# Configuration\n\n\
A configuration is a YAML file of the keys below. `key.path=value` on the command line overrides a key. Relative paths are \
relative to the file, or on the command line to the working folder; `~/` is the home folder. `firebrick config explain KEY` prints one key with its \
names in verl and TRL, `firebrick config check FILE` finds all mistakes of a file, and `firebrick config schema` prints the \
JSON Schema that editors read.\n\n\
This page is generated from the schema. An entry is a key, its type and default, and what the key does. `int ≥1` is an \
integer of at least 1, `?` allows `null`, and `[dataset|jsonl]` names the kinds of section that have the key. Without a default, the key is off or follows from other keys.\n";

/// Sections whose keys another section describes: prefix, and the prefix of the keys that are the same.
const SAME: [(&str, &str); 5] = [
    ("warmup.sft.", "sft."),
    ("critic.optim.", "optim."),
    ("sft.optim.", "optim."),
    ("memory.critic.", "memory."),
    ("memory.reference.", "memory."),
];

pub fn render() -> String {
    let all = keys();
    let mut page = String::new();
    for paragraph in INTRODUCTION.split("\n\n") {
        page.push_str(&fill("", paragraph));
        page.push('\n');
    }
    page.push_str("## Top level\n\n");
    let top = all.iter().filter(|key| !key.path.contains('.'));
    for key in top.clone().filter(|key| !key.is_section) {
        page.push_str(&entry(key, &key.path, &all));
    }
    for section in top.filter(|key| key.is_section) {
        let _ = write!(page, "\n## {}\n\n{}\n", section.path, fill("", &section.description));
        if section.path == "objective" {
            page.push_str(&algorithms(&all));
        }
        let inside = format!("{}.", section.path);
        for key in all.iter().filter(|key| key.path.starts_with(&inside)) {
            if described_elsewhere(key, &all) {
                continue;
            }
            page.push_str(&entry(key, &key.path[inside.len()..], &all));
        }
    }
    page
}

/// Whether another section has the key, with the default and the words of this one.
fn described_elsewhere(key: &Key, all: &[Key]) -> bool {
    SAME.iter().any(|(prefix, other)| {
        let rest = key.path.strip_prefix(prefix);
        let twin = rest.and_then(|rest| all.iter().find(|twin| twin.path == format!("{other}{rest}")));
        twin.is_some_and(|twin| twin.description == key.description && twin.default == key.default)
    })
}

fn entry(key: &Key, name: &str, all: &[Key]) -> String {
    let mut facts = Vec::new();
    if !key.kinds.is_empty() {
        facts.push(format!("[{}]", key.kinds.join("|")));
    }
    if !key.is_section {
        facts.extend(Some(short(&key.takes)).filter(|_| key.values.is_empty()));
        let default = key.default.as_ref().filter(|default| !default.is_null());
        facts.extend(default.map(|default| format!("`{}`", written(default))));
    }
    if key.is_required {
        facts.push("required".to_owned());
    }
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    let mut text = format!("`{name}`{facts}: {}", summary(key, all));
    if let Some((_, other)) = SAME.iter().find(|(prefix, _)| key.is_section && format!("{}.", key.path) == *prefix) {
        let _ = write!(text, " Keys as in `{}`; other defaults are listed here.", other.trim_end_matches('.'));
    }
    let twin = all.iter().take_while(|other| other.path != key.path).find(|other| {
        other.values.len() > 1 && other.values == key.values && key.values.iter().any(|(_, what)| what.is_some())
    });
    if let Some(twin) = twin {
        let _ = write!(text, " Values as in `{}`.", twin.path);
        return fill("- ", &text);
    }
    let (described, plain): (Vec<_>, Vec<_>) = key.values.iter().partition(|(_, what)| what.is_some());
    if !plain.is_empty() {
        let names: Vec<String> = plain.iter().map(|(value, _)| format!("`{value}`")).collect();
        let _ = write!(text, " One of {}.", names.join(", "));
    }
    let mut lines = fill("- ", &text);
    for (value, what) in described {
        lines.push_str(&fill("  - ", &format!("`{value}`: {}", what.as_deref().unwrap_or_default())));
    }
    lines
}

/// What a key takes, in the words of a type: `int ≥1`, `bool?`.
fn short(takes: &str) -> String {
    let (types, ranges) = takes.split_once(", ").unwrap_or((takes, ""));
    let mut types: Vec<&str> = types.split(" or ").filter(|word| *word != "false").collect();
    let optional = if types.contains(&"null") { "?" } else { "" };
    types.retain(|word| *word != "null");
    let name = |word: &str| match word {
        "integer" => "int".to_owned(),
        "true" => "bool".to_owned(),
        "text" => "string".to_owned(),
        other => other.replace(' ', "_"),
    };
    let mut text = types.into_iter().map(name).collect::<Vec<_>>().join("|") + optional;
    for range in ranges.split(", ").filter(|range| !range.is_empty()) {
        let signs = [("at least ", "≥"), ("at most ", "≤"), ("above ", ">"), ("below ", "<")];
        let sign = signs.iter().find_map(|(word, sign)| Some(format!(" {sign}{}", range.strip_prefix(word)?)));
        text.push_str(&sign.unwrap_or_else(|| format!(" {range}")));
    }
    text
}

/// The settings of each algorithm that are not GRPO's.
fn algorithms(all: &[Key]) -> String {
    let mut text = fill("", "`objective.name` sets the defaults of the section's other keys. Compared with GRPO:");
    text.push('\n');
    for algorithm in Algorithm::ALL.into_iter().skip(1) {
        let settings = serde_json::to_value(algorithm.settings()).unwrap_or_default();
        let unlike = all.iter().filter_map(|key| {
            let path = key.path.strip_prefix("objective.").filter(|path| *path != "name")?;
            let value = settings.pointer(&format!("/{}", path.replace('.', "/")))?;
            let is_other = !key.is_section && key.default.as_ref() != Some(value);
            is_other.then(|| format!("`{path}: {}`", written(value)))
        });
        let unlike: Vec<String> = unlike.collect();
        let name = settings["name"].as_str().unwrap_or_default();
        let list = if unlike.is_empty() { "no other default".to_owned() } else { unlike.join(", ") };
        text.push_str(&fill("- ", &format!("`{name}`: {list}")));
    }
    text.push('\n');
    text
}

#[test]
fn types_are_short() {
    for (takes, expected) in [
        ("integer, at least 1", "int ≥1"),
        ("number or null, above 0, at most 1", "number? >0 ≤1"),
        ("true or false or null", "bool?"),
        ("number or text or null", "number|string?"),
    ] {
        assert_eq!(short(takes), expected);
    }
}
