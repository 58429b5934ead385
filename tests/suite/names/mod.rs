//! `docs/memory.md` and the code: every key that the page names is one, every key of `memory` is on the page, and so is
//! every option, technique and figure of the guides that it answers, with tests that prove the answer.

mod objectives;
mod proofs;
mod schema;
mod terms;

use std::collections::{BTreeMap, BTreeSet};

use firebrick_engine::config::{load, parse};
use firebrick_engine::plan::Preset;
use firebrick_engine::planning;
use firebrick_models::Checkpoint;
use serde_json::{Map, Value};

use crate::support::{checked, fixtures};
use terms::{Rows, mismatches, terms};

/// The least configuration, with every section that may be absent, so that all keys exist.
const COMPLETE: &str = "model: {path: m}\noutput: runs/x\ntask: {kind: arithmetic}\nobjective: ppo\ncritic: {}\nwarmup: {sft: {}}\nsft: {}\n";

/// Sections of a configuration whose keys the page may name.
const SECTIONS: [&str; 12] = [
    "device",
    "memory",
    "model",
    "objective",
    "optim",
    "output",
    "rollout",
    "sft",
    "task",
    "trainer",
    "update",
    "warmup",
];

/// A file of the run folder that looks like a key.
const FILES: [&str; 1] = ["memory.jsonl"];

/// Settings that others go with.
const COMPANIONS: [&[&str]; 4] = [
    &[],
    &["memory.gradient_checkpointing=true", "memory.activation_offload=true"],
    &["memory.gradient_checkpointing=true", "memory.param_offload=streamed"],
    &["memory.optimizer_offload=cpu", "optim.clip_grad=null"],
];

/// What a row says where it names no key.
const ANSWERS: [&str; 3] = ["built in", "estimator", NOT_HERE];

/// What there is no counterpart of, so that nothing need be proven.
const NOT_HERE: &str = "not here";

/// Marks a row whose word comes from elsewhere.
const IN_NO_GUIDE: &str = "in no guide";

fn page(name: &str) -> String {
    let path = crate::support::project().join("docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every key of a complete configuration, as a path.
fn keys() -> BTreeSet<String> {
    fn walk(value: &Map<String, Value>, prefix: &str, keys: &mut BTreeSet<String>) {
        for (key, value) in value {
            let path = format!("{prefix}{key}");
            if let Value::Object(section) = value {
                walk(section, &format!("{path}."), keys);
            }
            keys.insert(path);
        }
    }
    let config = parse(COMPLETE, &[]).expect("the least configuration");
    let mut keys = BTreeSet::new();
    match serde_json::to_value(config).expect("JSON") {
        Value::Object(config) => walk(&config, "", &mut keys),
        other => panic!("a configuration is a mapping: {other}"),
    }
    keys
}

/// Keys of `memory` that hold a value.
fn memory_keys() -> Vec<String> {
    let all = keys();
    let section = |key: &String| all.range(format!("{key}.")..).any(|k| k.starts_with(&format!("{key}.")));
    let own = all.iter().filter(|key| key.starts_with("memory."));
    own.filter(|key| !section(key)).cloned().collect()
}

/// The values that a key knows by name; none where it takes numbers, switches or lists.
fn variants(key: &str) -> Vec<String> {
    let error = parse(COMPLETE, &[format!("{key}=no_such_value")]).map(|_| ());
    let message = error.err().map(|e| e.to_string()).unwrap_or_default();
    match message.split_once("Known: ") {
        Some((_, known)) => known.split(", ").map(str::to_owned).collect(),
        None => Vec::new(),
    }
}

/// Whether the program reads a key with a value, by itself or with others that it goes with.
fn is_read(key: &str, value: &str) -> bool {
    COMPANIONS.iter().any(|with| {
        let mut overrides: Vec<String> = with.iter().map(|&o| o.to_owned()).collect();
        overrides.push(format!("{key}={value}"));
        parse(COMPLETE, &overrides).is_ok()
    })
}

/// What stands between backticks, fenced blocks apart.
fn code_spans(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let lines = text.lines().filter(|line| {
        let fence = line.starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    });
    lines.flat_map(|line| line.split('`').skip(1).step_by(2)).collect()
}

/// A key and the value that is given to it, if a code span names one.
fn setting(span: &str) -> Option<(&str, Option<&str>)> {
    let (key, value) = match span.split_once(": ").or_else(|| span.split_once('=')) {
        Some((key, value)) => (key, Some(value)),
        None => (span, None),
    };
    let is_word = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let mut parts = key.split('.');
    let ours = parts.next().is_some_and(|first| SECTIONS.contains(&first));
    let path = key.contains('.') && parts.all(is_word);
    (ours && path && !FILES.contains(&key)).then_some((key, value))
}

/// Rows of every table whose first header is `first`, as cells.
fn rows<'t>(text: &'t str, first: &str) -> Vec<Vec<&'t str>> {
    let mut wanted = false;
    let mut rows = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let Some(row) = line.trim().strip_prefix('|') else {
            inside = false;
            continue;
        };
        let cells: Vec<&str> = row.trim_end_matches('|').split('|').map(str::trim).collect();
        if !inside {
            (inside, wanted) = (true, cells[0] == first);
            if wanted {
                rows.push(cells);
            }
        } else if wanted && !cells[0].starts_with("--") {
            rows.push(cells);
        }
    }
    rows
}

/// A row of the tables of names.
struct Answer<'t> {
    names: Vec<&'t str>,
    whose: &'t str,
    here: &'t str,
    proven_by: &'t str,
}

/// The rows of the tables of names.
fn answers(text: &str) -> Vec<Answer<'_>> {
    let rows = rows(text, "their word").into_iter();
    let answers = rows.filter(|cells| cells[0] != "their word");
    answers
        .map(|cells| {
            assert!(cells.len() == 5, "five columns: {cells:?}");
            Answer { names: code_spans(cells[0]), whose: cells[1], here: cells[2], proven_by: cells[4] }
        })
        .collect()
}

#[test]
fn every_key_on_the_page_is_one_and_takes_the_value_it_is_shown_with() {
    let (text, known) = (page("memory.md"), keys());
    let settings: Vec<_> = code_spans(&text).into_iter().filter_map(setting).collect();
    for &(key, value) in &settings {
        assert!(known.contains(key), "docs/memory.md names `{key}`, which is no key");
        if let Some(value) = value {
            assert!(is_read(key, value), "docs/memory.md: `{key}: {value}` is not read");
        }
    }
    checked("keys on the page of memory", settings.len());
}

#[test]
fn every_example_on_the_page_is_read() {
    let text = page("memory.md");
    let blocks: Vec<&str> = text.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    for block in &blocks {
        let example = format!("model: {{path: m}}\ntask: {{kind: arithmetic}}\noutput: runs/x\n{block}");
        parse(&example, &[]).unwrap_or_else(|error| panic!("docs/memory.md: {error}\n{block}"));
    }
    checked("examples on the page of memory", blocks.len());
}

#[test]
fn every_example_of_the_project_is_read() {
    let folder = crate::support::project().join("examples");
    let files = std::fs::read_dir(&folder).expect("examples");
    let files = files.map(|entry| entry.expect("an entry").path());
    let yaml: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    for path in &yaml {
        load(path, &[]).unwrap_or_else(|error| panic!("{error}"));
    }
    checked("examples", yaml.len());
}

#[test]
fn every_memory_key_and_value_is_on_the_page_and_in_the_reference() {
    let (page, reference) = (page("memory.md"), page("configuration.md"));
    let (_, section) = reference.split_once("## `memory`").expect("a section on memory");
    let section = section.split("\n## ").next().unwrap_or_default();
    let spans: BTreeSet<&str> = code_spans(&page).into_iter().collect();
    let short: BTreeSet<&str> = code_spans(section).into_iter().collect();
    let keys = memory_keys();
    for key in &keys {
        let own = key.trim_start_matches("memory.");
        let named = |span: &&str| setting(span).is_some_and(|(k, _)| k == key);
        assert!(spans.iter().any(named), "docs/memory.md does not name `{key}`");
        assert!(short.contains(own), "docs/configuration.md does not list `{own}` under memory");
        for value in variants(key) {
            let span = format!("{key}: {value}");
            assert!(spans.contains(span.as_str()), "docs/memory.md does not name `{span}`");
            assert!(short.contains(value.as_str()), "docs/configuration.md: `{own}` can be `{value}`");
        }
    }
    checked("memory keys in the docs", keys.len());
}

#[test]
fn the_table_of_presets_is_what_they_set() {
    fn flatten(settings: &Map<String, Value>, prefix: &str, into: &mut BTreeMap<String, String>) {
        for (key, value) in settings {
            let path = format!("{prefix}{key}");
            match value {
                Value::Object(section) => flatten(section, &format!("{path}."), into),
                Value::String(word) => drop(into.insert(path, word.clone())),
                other => drop(into.insert(path, other.to_string())),
            }
        }
    }
    let text = page("memory.md");
    let table = rows(&text, "set by a preset");
    let plain = |cell: &str| cell.replace('`', "");
    let presets = variants("memory.preset");
    assert!(!presets.is_empty());
    let columns: Vec<String> = table[0][1..].iter().map(|c| plain(c)).collect();
    assert_eq!(columns, presets, "one column a preset");
    for (column, name) in presets.iter().enumerate() {
        let preset: Preset = serde_json::from_value(Value::String(name.clone())).expect("a preset");
        let mut expected = BTreeMap::new();
        flatten(&preset.settings(), "memory.", &mut expected);
        flatten(&preset.run_settings(), "", &mut expected);
        let shown = table[1..].iter().map(|row| (plain(row[0]), plain(row[column + 1])));
        let shown: BTreeMap<String, String> = shown.filter(|(_, value)| !value.is_empty()).collect();
        assert_eq!(shown, expected, "memory.preset: {name}");
    }
    checked("presets on the page", presets.len());
}

#[test]
fn every_term_of_the_guides_has_its_row_and_every_row_its_terms() {
    let text = page("memory.md");
    let answers = answers(&text);
    let names = |elsewhere: bool| -> Vec<&str> {
        let rows = answers.iter();
        rows.filter(|row| elsewhere || !row.whose.contains(IN_NO_GUIDE))
            .flat_map(|row| row.names.iter().copied())
            .collect()
    };
    let rows = Rows::new(names(true));
    let wrong = mismatches(&rows, &names(false));
    assert!(wrong.is_empty(), "docs/memory.md and the guides: {wrong:#?}");
    checked("terms of the guides", terms().len());
}

#[test]
fn every_row_has_an_answer_and_names_the_tests_that_prove_it() {
    let text = page("memory.md");
    let (answers, tests) = (answers(&text), proofs::tests());
    for row in &answers {
        let (names, here) = (&row.names, row.here);
        let mut spans = code_spans(here).into_iter();
        let keyed = spans.any(|span| setting(span).is_some());
        let said = ANSWERS.iter().any(|words| here.starts_with(words));
        assert!(keyed || said, "{names:?}: {here:?} names no key and says none of {ANSWERS:?}");
        let wrong = proofs::wrong(row.proven_by, !here.starts_with(NOT_HERE), &tests);
        assert_eq!(wrong, None, "docs/memory.md, {names:?}");
    }
    checked("rows with their tests", answers.len());
}

#[test]
fn every_refusal_on_the_page_is_one_and_what_it_wants_mends_it() {
    let checkpoint = Checkpoint::open(&fixtures().join("models/llama-gqa")).expect("a fixture");
    let plan = |settings: &[&str]| {
        let overrides = settings.iter().map(|span| span.replacen(": ", "=", 1));
        let config = parse(COMPLETE, &overrides.collect::<Vec<_>>())?;
        let plan = config.memory.plan(checkpoint.arch())?;
        planning::check_optimizer(&plan, &config.optim, config.precision, "optim")
    };
    let settings = |cell: &'static str| -> Vec<&'static str> {
        let spans = code_spans(cell).into_iter();
        spans.filter(|span| setting(span).is_some_and(|(_, value)| value.is_some())).collect()
    };
    let text: &'static str = page("memory.md").leak();
    let mut cases = 0;
    for row in rows(text, "refused by itself").into_iter().skip(1) {
        let (refused, wanted) = (settings(row[0]), settings(row[1]));
        assert!(!refused.is_empty(), "{row:?}");
        // a pair that does not go together, or settings that each want something
        let together = row[0].contains(" and `");
        for alone in refused.chunks(if together { refused.len() } else { 1 }) {
            let message = plan(alone).map_or_else(|e| e.to_string(), |()| String::new());
            let key = alone[0].split(": ").next().unwrap_or_default();
            let key = key.trim_start_matches("memory.");
            assert!(message.contains(key), "{alone:?} is not refused: {message:?}");
            if !together {
                plan(&[&wanted, alone].concat()).unwrap_or_else(|e| panic!("{alone:?} with {wanted:?}: {e}"));
            }
            cases += 1;
        }
    }
    checked("refusals on the page", cases);
}
