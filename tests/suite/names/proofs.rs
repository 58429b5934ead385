//! The column *proven by* of `docs/memory.md`: every name in it is a test of this project.

use std::collections::BTreeSet;
use std::path::Path;

use super::code_spans;

/// Folders with the project's sources.
const FOLDERS: [&str; 7] = ["backends", "benches", "engine", "examples", "models", "src", "tests"];

/// Macros that make tests of the functions that they are given.
const MACROS: [&str; 3] = ["on_devices!", "on_gpus!", "in_own_process!"];

/// What stands in the column where a row claims nothing that a program could prove.
const NOTHING: &str = "—";

/// The names of the project's tests.
pub fn tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for folder in FOLDERS {
        collect(&crate::support::project().join(folder), &mut found);
    }
    found
}

fn collect(folder: &Path, found: &mut BTreeSet<String>) {
    let entries = std::fs::read_dir(folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = std::fs::read_to_string(&path).expect("a readable file");
            found.extend(tests_of(&text));
        }
    }
}

/// The name of the function that a line begins; empty where a macro fills it in.
fn function(line: &str) -> Option<&str> {
    let rest = line.trim_start();
    let rest = rest.strip_prefix("pub ").unwrap_or(rest);
    let rest = rest.strip_prefix("fn ")?;
    rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next()
}

/// The tests of a file: functions under `#[test]` that are not ignored, and those that a macro makes tests of.
fn tests_of(text: &str) -> BTreeSet<String> {
    let functions: BTreeSet<&str> = text.lines().filter_map(function).collect();
    let mut tests = BTreeSet::new();
    let (mut marked, mut left_out) = (false, false);
    for line in text.lines() {
        match (function(line), line.trim_start()) {
            (Some(name), _) => {
                if marked && !left_out && !name.is_empty() {
                    tests.insert(name.to_owned());
                }
                (marked, left_out) = (false, false);
            }
            (None, "#[test]") => marked = true,
            (None, attribute) if attribute.starts_with("#[ignore") => left_out = true,
            (None, _) => {}
        }
    }
    for called in MACROS.iter().flat_map(|name| text.split(*name).skip(1)) {
        let called = called.trim_start();
        if called.starts_with(['(', '{']) {
            let list = called.split([')', '}']).next().unwrap_or_default();
            let names = list.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            let own = names.filter(|name| !name.is_empty() && functions.contains(name));
            tests.extend(own.map(str::to_owned));
        }
    }
    tests
}

/// What is wrong with a cell of the column; `claims` says that its row names a setting or what is built in.
pub fn wrong(cell: &str, claims: bool, tests: &BTreeSet<String>) -> Option<String> {
    let names = code_spans(cell);
    if names.is_empty() && (claims || cell != NOTHING) {
        return Some(format!("{cell:?} names no test"));
    }
    let missing = names.into_iter().find(|name| !tests.contains(*name));
    missing.map(|name| format!("`{name}` is no test of this project"))
}

/// Sources with a test, one that is left out, a helper, and functions that macros make tests of. No `.rs`, for it is
/// not compiled.
const SOURCES: &str = include_str!("sample.txt");

#[test]
fn tests_are_functions_that_the_runner_runs() {
    let found = tests_of(SOURCES);
    let expected = ["a_test", "also_on_one", "of_any_number", "on_a_gpu"];
    assert!(found.iter().eq(expected), "{found:?}");
}

#[test]
fn a_name_that_is_no_test_and_a_claim_without_a_name_are_wrong() {
    let tests = tests_of(SOURCES);
    let verdict = |cell: &str, claims| wrong(cell, claims, &tests);
    assert_eq!(verdict("`a_test`, `on_a_gpu`; not the rest", true), None);
    assert_eq!(verdict("—", false), None);
    for (cell, claims, part) in [
        ("`no_such_test`", true, "`no_such_test` is no test"),
        ("`a_test`, `helper`", true, "`helper` is no test"),
        ("`left_out`", false, "`left_out` is no test"),
        ("—", true, "names no test"),
        ("", false, "names no test"),
        ("obvious", false, "names no test"),
    ] {
        let message = verdict(cell, claims).expect("wrong");
        assert!(message.contains(part), "{cell}: {message}");
    }
}

#[test]
fn the_projects_own_tests_are_found_in_every_kind_of_place() {
    let tests = tests();
    for name in [
        "the_projects_own_tests_are_found_in_every_kind_of_place",
        "predictions_are_within_15_percent_of_what_is_counted",
        "predictions_are_within_15_percent_of_what_the_pool_counts",
        "a_larger_budget_never_gives_a_slower_plan",
    ] {
        assert!(tests.contains(name), "{name}");
    }
    assert!(!tests.contains("fixtures") && !tests.contains("run"));
}
