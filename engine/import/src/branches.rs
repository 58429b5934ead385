//! Paths through a program: both outcomes of an undecided condition are followed, one after the other.

use super::entry::{Candidate, Entry, SourceLocation, SourceValue};
use super::error::{ImportError, ImportResult};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Most paths through a program.
const MAX_PATHS: usize = 512;

/// A key, and the lines that produced its value.
pub(super) type TracedEntry = (Entry, BTreeSet<(String, usize)>);

/// Answers of one path.
#[derive(Debug, Default)]
pub(super) struct Branches {
    /// Answers in the order of their questions.
    answers: Vec<bool>,
    questions: BTreeMap<String, bool>,
}

impl Branches {
    /// Answers an undecided question; the same question always gets the same answer.
    pub fn choose(&mut self, question: &str) -> bool {
        if let Some(answer) = self.questions.get(question) {
            return *answer;
        }
        let at = self.questions.len();
        if at == self.answers.len() {
            self.answers.push(true);
        }
        self.questions.insert(question.to_owned(), self.answers[at]);
        self.answers[at]
    }

    /// Follows all paths, one call per path.
    pub fn explore(file: &str, mut path: impl FnMut(&mut Self) -> ImportResult) -> ImportResult {
        let mut branches = Self::default();
        for _ in 0..MAX_PATHS {
            branches.questions.clear();
            path(&mut branches)?;
            // the next path changes the last answer that can change
            while branches.answers.pop_if(|answer| !*answer).is_some() {}
            match branches.answers.last_mut() {
                None => return Ok(()),
                Some(last) => *last = false,
            }
        }
        Err(ImportError::at(
            file,
            None,
            format!(
                "branches that only running decides make more than {MAX_PATHS} ways through it; import it with the files that it \
                 sources, or delete the branches that your run does not take"
            ),
        ))
    }
}

/// Merges the keys of several paths: keys that differ between them get candidates.
pub(super) fn merge_paths(runs: &[Vec<TracedEntry>]) -> Vec<Entry> {
    if let [only] = runs {
        return only.iter().map(|(entry, _)| entry.clone()).collect();
    }
    let mut keys: Vec<&str> = Vec::new();
    let mut entries: BTreeMap<&str, Vec<Option<&TracedEntry>>> = BTreeMap::new();
    for (at, run) in runs.iter().enumerate() {
        for entry in run {
            let values = entries.entry(&entry.0.key).or_insert_with(|| {
                keys.push(&entry.0.key);
                vec![None; runs.len()]
            });
            values[at] = Some(entry);
        }
    }
    keys.into_iter().filter_map(|key| merge_entries(&entries[key])).collect()
}

/// Merges the entries of a key; paths without the key have `None`.
fn merge_entries(values: &[Option<&TracedEntry>]) -> Option<Entry> {
    let (first, lines) = values.iter().flatten().next()?;
    let is_same = |(entry, _): &TracedEntry| entry.value == first.value && entry.removes == first.removes;
    if values.iter().all(|value| value.is_some_and(is_same)) {
        return Some(first.clone());
    }
    let common = values.iter().flatten().fold(lines.clone(), |common, (_, lines)| &common & lines);
    let mut candidates: Vec<Candidate> = Vec::new();
    for value in values {
        let candidate = value.map_or(Candidate { value: None, place: None }, |(entry, lines)| {
            // the lines of this entry alone give its place
            let line = lines.difference(&common).last().or(lines.last());
            let place = line.map(|(file, line)| SourceLocation { file: file.clone(), line: Some(*line) });
            let value = match &entry.value {
                SourceValue::Known(_) if entry.removes => Some(Value::Null),
                SourceValue::Known(value) => Some(value.clone()),
                SourceValue::Unresolved { .. } => None,
            };
            Candidate { value, place: Some(place.unwrap_or_else(|| entry.place.clone())) }
        });
        if !candidates.contains(&candidate) {
            candidates.push(candidate);
        }
    }
    candidates.sort_by_key(|candidate| candidate.place.as_ref().map(|place| (place.file.clone(), place.line)));
    Some(Entry { value: SourceValue::one_of(candidates), removes: false, ..first.clone() })
}
