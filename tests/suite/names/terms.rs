//! The terms of five memory guides, as `tests/scripts/extract_terms.py` finds them, and which row of `docs/memory.md`
//! answers each.

use std::collections::{BTreeMap, BTreeSet};

/// Guide, line, kind and term, separated by tabs; a term stands once for each kind.
const TERMS: &str = include_str!("terms.tsv");

/// Terms without a row of their own, by reason.
const IGNORED: &str = include_str!("ignored.txt");

/// Parts of a path that say whose setting it is: the policy's row answers for no other model.
const MODELS: [&str; 2] = ["critic", "ref"];

/// A term and where it first stands.
pub struct Term {
    pub text: &'static str,
    pub place: String,
}

/// All terms of the guides.
pub fn terms() -> Vec<Term> {
    let read = |line: &'static str| {
        let cells: Vec<&str> = line.split('\t').collect();
        assert!(cells.len() == 4, "terms.tsv: {line:?}");
        Term { text: cells[3], place: format!("guide {}, line {}", cells[0], cells[1]) }
    };
    TERMS.lines().skip(1).map(read).collect()
}

/// Terms without a row of their own, and the name whose row answers them, where one does.
pub fn ignored() -> BTreeMap<&'static str, Option<&'static str>> {
    let mut all = BTreeMap::new();
    let mut reason = None;
    for line in IGNORED.lines().filter(|line| !line.is_empty()) {
        if let Some(words) = line.strip_prefix("## ") {
            reason = Some(words);
        } else if !line.starts_with("# ") {
            assert!(reason.is_some(), "ignored.txt: {line:?} has no reason");
            let (term, row) = match line.split_once(" -> ") {
                Some((term, row)) => (term, Some(row)),
                None => (line, None),
            };
            let twice = all.insert(term, row).is_some();
            assert!(!twice, "ignored.txt has {term:?} twice");
        }
    }
    all
}

/// As it is compared: words and options of one name are one term.
fn fold(name: &str) -> String {
    name.to_lowercase().replace(['_', '-'], " ")
}

/// The key of `key: value`, where it is one and no heading.
fn key(name: &str) -> Option<&str> {
    let is_key = |key: &str| {
        let mut bytes = key.bytes();
        bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_.".contains(&b))
    };
    let (key, _) = name.split_once(": ")?;
    is_key(key).then_some(key)
}

/// A path, and what is left of it without its first parts, the longest first.
fn tails(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(path), |rest| rest.split_once('.').map(|(_, tail)| tail))
}

/// Whether a part of a path is the name of a model.
fn is_of(path: &str, model: &str) -> bool {
    path.split('.').any(|part| part == model)
}

/// The names of rows.
pub struct Rows<'n>(BTreeMap<String, &'n str>);

impl<'n> Rows<'n> {
    /// Panics where a name has two rows.
    pub fn new(names: impl IntoIterator<Item = &'n str>) -> Self {
        let mut rows = BTreeMap::new();
        for name in names {
            let twice = rows.insert(fold(name), name);
            assert!(twice.is_none(), "{name} has two rows");
        }
        let keys: Vec<(String, &str)> =
            rows.values().filter_map(|&name| key(name).map(|key| (fold(key), name))).collect();
        for (key, name) in keys {
            rows.entry(key).or_insert(name);
        }
        Self(rows)
    }

    /// The row of exactly this name.
    pub fn named(&self, name: &str) -> Option<&'n str> {
        let row = self.0.get(&fold(name)).copied();
        row.filter(|row| fold(row) == fold(name))
    }

    /// The name of the row that answers a term: its own, or that of the longest end of its path, or of its key.
    pub fn answer(&self, term: &str) -> Option<&'n str> {
        let mut paths = tails(term).chain(key(term).into_iter().flat_map(tails));
        let row = paths.find_map(|path| self.0.get(&fold(path)).copied())?;
        let mut models = MODELS.into_iter();
        let same = models.all(|model| !is_of(term, model) || is_of(row, model));
        same.then_some(row)
    }
}

/// Terms that no row answers, rows that answer no term, and entries of `ignored.txt` that are none.
pub fn mismatches(rows: &Rows<'_>, names: &[&str]) -> Vec<String> {
    let (terms, ignored) = (terms(), ignored());
    let mut wrong = Vec::new();
    let mut used = BTreeSet::new();
    for term in &terms {
        match (rows.answer(term.text), ignored.get(term.text)) {
            (_, Some(_)) if rows.named(term.text).is_some() => {
                wrong.push(format!("{:?} is ignored and has a row", term.text));
            }
            (_, Some(None)) => {}
            (_, Some(Some(row))) => match rows.named(row) {
                Some(row) => {
                    used.insert(row);
                }
                None => wrong.push(format!("{:?} -> {row:?}, which is no row", term.text)),
            },
            (Some(row), None) => {
                used.insert(row);
            }
            (None, None) => wrong.push(format!("{:?} of {} has no row", term.text, term.place)),
        }
    }
    let known: BTreeSet<&str> = terms.iter().map(|term| term.text).collect();
    let stale = ignored.keys().filter(|term| !known.contains(*term));
    wrong.extend(stale.map(|term| format!("ignored.txt: {term:?} is no term of the guides")));
    let unused = names.iter().filter(|name| !used.contains(*name));
    wrong.extend(unused.map(|name| format!("{name} is no term of the guides")));
    wrong
}

#[test]
fn a_row_answers_for_its_name_in_other_spellings_and_for_paths_that_end_in_it() {
    let rows = Rows::new(["param_offload", "Dynamic Batching", "strategy: fsdp2"]);
    for (term, row) in [
        ("actor.fsdp_config.param_offload", Some("param_offload")),
        ("dynamic-batching", Some("Dynamic Batching")),
        ("actor.strategy", Some("strategy: fsdp2")),
        ("param_offload: 2", Some("param_offload")),
        ("other_param_offload", None),
        ("Dynamic Batching: 20-40%", None),
    ] {
        assert_eq!(rows.answer(term), row, "{term}");
    }
}

#[test]
fn the_row_of_the_policys_setting_does_not_answer_for_another_models() {
    let policy = Rows::new(["param_offload"]);
    assert_eq!(policy.answer("actor.ref.param_offload"), None);
    assert_eq!(policy.answer("critic.param_offload"), None);
    let both = Rows::new(["param_offload", "ref.param_offload"]);
    let found = both.answer("actor.ref.param_offload");
    assert_eq!(found, Some("ref.param_offload"));
}
