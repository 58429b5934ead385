//! Ways through a program: of a condition that only running decides, both outcomes are followed, one after the other.

use super::entry::{Candidate, Entry, Given, SourceLocation};
use super::error::ImportError;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Most ways through a program.
const MOST: usize = 512;

/// A key, and the lines that made its value.
pub(super) type Written = (Entry, BTreeSet<(String, usize)>);

/// The answers of one way.
#[derive(Debug, Default)]
pub(super) struct Ways {
    /// In the order of their questions.
    answers: Vec<bool>,
    asked: BTreeMap<String, bool>,
}

impl Ways {
    /// Answers a question that only running decides: the same question always alike.
    pub fn choose(&mut self, question: &str) -> bool {
        if let Some(answer) = self.asked.get(question) {
            return *answer;
        }
        let at = self.asked.len();
        if at == self.answers.len() {
            self.answers.push(true);
        }
        self.asked.insert(question.to_owned(), self.answers[at]);
        self.answers[at]
    }

    /// Follows all ways, one call each.
    pub fn follow(file: &str, mut way: impl FnMut(&mut Self) -> Result<(), ImportError>) -> Result<(), ImportError> {
        let mut ways = Self::default();
        for _ in 0..MOST {
            ways.asked.clear();
            way(&mut ways)?;
            // the next way answers the last question otherwise that has an answer left
            while ways.answers.pop_if(|answer| !*answer).is_some() {}
            match ways.answers.last_mut() {
                None => return Ok(()),
                Some(last) => *last = false,
            }
        }
        Err(ImportError::at(
            file,
            None,
            format!(
                "branches that only running decides make more than {MOST} ways through it; import it with the files that it \
                 sources, or delete the branches that your run does not take"
            ),
        ))
    }
}

/// The keys of several runs as those of one: what differs between them has candidates.
pub(super) fn united(runs: &[Vec<Written>]) -> Vec<Entry> {
    if let [only] = runs {
        return only.iter().map(|(entry, _)| entry.clone()).collect();
    }
    let mut keys: Vec<&str> = Vec::new();
    let mut all: BTreeMap<&str, Vec<Option<&Written>>> = BTreeMap::new();
    for (at, run) in runs.iter().enumerate() {
        for own in run {
            let values = all.entry(&own.0.key).or_insert_with(|| {
                keys.push(&own.0.key);
                vec![None; runs.len()]
            });
            values[at] = Some(own);
        }
    }
    keys.into_iter().filter_map(|key| one_of(&all[key])).collect()
}

/// A key that several runs have, or have not.
fn one_of(values: &[Option<&Written>]) -> Option<Entry> {
    let (first, lines) = values.iter().flatten().next()?;
    let same =
        |own: Option<&Written>| own.is_some_and(|(own, _)| own.given == first.given && own.removes == first.removes);
    if values.iter().copied().all(same) {
        return Some(first.clone());
    }
    let common = values.iter().flatten().fold(lines.clone(), |common, (_, own)| &common & own);
    let mut candidates: Vec<Candidate> = Vec::new();
    for value in values {
        let candidate = value.map_or(Candidate { value: None, place: None }, |(entry, lines)| {
            // the lines that only this one has say where it comes from
            let line = lines.difference(&common).last().or(lines.last());
            let place = line.map(|(file, line)| SourceLocation { file: file.clone(), line: Some(*line) });
            let value = match &entry.given {
                Given::Value(_) if entry.removes => Some(Value::Null),
                Given::Value(value) => Some(value.clone()),
                Given::Open { .. } => None,
            };
            Candidate { value, place: Some(place.unwrap_or_else(|| entry.place.clone())) }
        });
        if !candidates.contains(&candidate) {
            candidates.push(candidate);
        }
    }
    candidates.sort_by_key(|own| own.place.as_ref().map(|place| (place.file.clone(), place.line)));
    Some(Entry { given: Given::one_of(candidates), removes: false, ..first.clone() })
}
