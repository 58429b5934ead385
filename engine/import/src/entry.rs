//! Contents of another engine's file: keys, values and their places.

use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// The key of the program that a command starts: a module, or a file.
pub(super) const PROGRAM: &str = "(program)";

/// Marks a section of `NeMo RL` that replaces its base.
pub(super) const OVERRIDE: &str = "_override_";

/// The value of an environment variable, for scripts that read one.
pub(super) type EnvironmentLookup<'e> = &'e (dyn Fn(&str) -> Option<String> + Sync);

/// Place of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceLocation {
    /// The file's name as given.
    pub file: String,
    /// Line, counted from 1, if known.
    pub line: Option<usize>,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}", self.file),
            None => f.write_str(&self.file),
        }
    }
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SourceValue {
    /// A value.
    Known(Value),
    /// A value that depends on the running program.
    Unresolved {
        /// Source text.
        text: String,
        /// The variable, command output or expression that it depends on.
        needs: String,
        /// Possible values, from branches and loops.
        candidates: Vec<Candidate>,
    },
}

/// A value that a key may have.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    /// `None` if the key may be absent or its value is unknown.
    pub value: Option<Value>,
    /// Its place; `None` if the key is absent.
    pub place: Option<SourceLocation>,
}

impl SourceValue {
    /// A value that depends on `needs`.
    pub fn unresolved(text: impl Into<String>, needs: impl Into<String>) -> Self {
        Self::Unresolved { text: text.into(), needs: needs.into(), candidates: Vec::new() }
    }

    /// One of several values; only a run decides which.
    pub fn one_of(candidates: Vec<Candidate>) -> Self {
        let labels: Vec<String> = candidates.iter().map(|candidate| candidate.label("nothing")).collect();
        let text = labels.join(" | ");
        let labels: Vec<String> = candidates.iter().map(ToString::to_string).collect();
        Self::Unresolved { text, needs: format!("one of {}", labels.join(", ")), candidates }
    }
}

impl Candidate {
    fn label(&self, absent: &str) -> String {
        match (&self.value, &self.place) {
            (Some(Value::String(text)), _) => text.clone(),
            (Some(value), _) => value.to_string(),
            (None, Some(_)) => "an unknown value".to_owned(),
            (None, None) => absent.to_owned(),
        }
    }

    /// Its line in parentheses after a space; empty if unknown.
    pub fn line(&self) -> String {
        let line = self.place.as_ref().and_then(|place| place.line);
        line.map_or_else(String::new, |line| format!(" (line {line})"))
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.label("no value"), self.line())
    }
}

/// A file that another names and that is not among the inputs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MissingFile {
    /// The command or option that names it; empty if a key's row reports it.
    pub by: String,
    pub file: String,
    pub place: SourceLocation,
    /// True if it may hold settings.
    pub has_settings: bool,
}

/// Parsed file: entries, notes and missing files.
#[derive(Debug, Default)]
pub(super) struct ParsedSource {
    /// Keys with values, in order of precedence, lowest first.
    pub entries: Vec<Entry>,
    /// Functions and classes defined by a program, by name.
    pub definitions: Vec<(String, SourceLocation)>,
    /// Notes on skipped parts.
    pub notes: Vec<String>,
    /// Files that it needs and that are missing.
    pub absent: Vec<MissingFile>,
    /// Files that were read with it.
    pub used: Vec<String>,
}

impl ParsedSource {
    /// Adds all of another but its entries.
    pub fn merge(&mut self, other: Self) {
        let notes = other.notes.into_iter().filter(|note| !self.notes.contains(note));
        self.notes.extend(notes.collect::<Vec<_>>());
        let absent = other.absent.into_iter().filter(|file| !self.absent.contains(file));
        self.absent.extend(absent.collect::<Vec<_>>());
        self.used.extend(other.used);
        self.definitions.extend(other.definitions);
    }
}

impl From<Vec<Entry>> for ParsedSource {
    fn from(entries: Vec<Entry>) -> Self {
        Self { entries, ..Self::default() }
    }
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// Dotted path.
    pub key: String,
    pub value: SourceValue,
    pub place: SourceLocation,
    /// Hydra's `~key`: the key is removed.
    pub removes: bool,
}

impl Entry {
    pub fn new(key: impl Into<String>, value: SourceValue, place: &SourceLocation) -> Self {
        Self { key: key.into(), value, place: place.clone(), removes: false }
    }

    /// Entries of a key with its value.
    pub fn flattened(key: &str, value: SourceValue, place: &SourceLocation) -> Vec<Self> {
        let SourceValue::Known(value) = value else {
            return vec![Self::new(key, value, place)];
        };
        let mut entries = Vec::new();
        Self::flatten(key, "", value, &|_| place.clone(), &mut entries);
        entries
    }

    /// Flattens a mapping into entries with dotted keys; `place` gives the place of a JSON pointer.
    pub fn flatten(
        key: &str,
        pointer: &str,
        value: Value,
        place: &dyn Fn(&str) -> SourceLocation,
        into: &mut Vec<Self>,
    ) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                let mut parts: Vec<(String, Value)> = map.into_iter().collect();
                parts.sort_by_key(|(part, _)| part != OVERRIDE);
                for (part, value) in parts {
                    let pointer = format!("{pointer}/{}", part.replace('~', "~0").replace('/', "~1"));
                    let key = if key.is_empty() { part } else { format!("{key}.{part}") };
                    Self::flatten(&key, &pointer, value, place, into);
                }
            }
            value => into.push(Self::new(key, SourceValue::Known(value), &place(pointer))),
        }
    }
}
