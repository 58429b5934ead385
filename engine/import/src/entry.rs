//! What a file of another engine says: keys with values, and where they stand.

use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// The key of the program that a command starts: a module, or a file.
pub(super) const PROGRAM: &str = "(program)";

/// The value of an environment variable, for scripts that read one.
pub(super) type EnvironmentLookup<'e> = &'e (dyn Fn(&str) -> Option<String> + Sync);

/// Where a key stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceLocation {
    /// The file's name, as it was given.
    pub file: String,
    /// Line, counted from 1, where it is known.
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
pub(super) enum Given {
    /// A value.
    Value(Value),
    /// A text that stands for a value, and what it would take to know it.
    Open {
        /// What is written.
        text: String,
        /// A variable, a command's output, an expression.
        needs: String,
        /// The values that it may have, of branches and loops.
        candidates: Vec<Candidate>,
    },
}

/// A value that a key may have.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    /// Nothing where the key may be absent.
    pub value: Option<Value>,
    /// Where it is given; nothing where the key is absent.
    pub place: Option<SourceLocation>,
}

impl Given {
    /// What is written, and what it would take to know its value.
    pub fn open(text: impl Into<String>, needs: impl Into<String>) -> Self {
        Self::Open { text: text.into(), needs: needs.into(), candidates: Vec::new() }
    }

    /// One of several values, which only a run decides.
    pub fn one_of(candidates: Vec<Candidate>) -> Self {
        let each = candidates.iter().map(|own| match (&own.value, &own.place) {
            (Some(Value::String(text)), _) => text.clone(),
            (Some(value), _) => value.to_string(),
            (None, Some(_)) => "an unknown value".to_owned(),
            (None, None) => "nothing".to_owned(),
        });
        let text = each.collect::<Vec<_>>().join(" | ");
        let each: Vec<String> = candidates.iter().map(ToString::to_string).collect();
        Self::Open { text, needs: format!("one of {}", each.join(", ")), candidates }
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.value, &self.place) {
            (Some(Value::String(text)), _) => f.write_str(text)?,
            (Some(value), _) => write!(f, "{value}")?,
            (None, Some(_)) => f.write_str("an unknown value")?,
            (None, None) => f.write_str("no value")?,
        }
        match &self.place {
            Some(SourceLocation { line: Some(line), .. }) => write!(f, " (line {line})"),
            _ => Ok(()),
        }
    }
}

/// A file that another names and that is not among those given.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Absent {
    /// The command or option that names it; empty where a key's own row says that it is not given.
    pub by: String,
    pub file: String,
    pub place: SourceLocation,
    /// Whether it may have any setting.
    pub has_settings: bool,
}

/// What a file says, and what there is to say of it.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// Keys with values, in the order in which they count.
    pub entries: Vec<Entry>,
    /// Functions and classes that a program defines, by name.
    pub definitions: Vec<(String, SourceLocation)>,
    /// What was passed over.
    pub notes: Vec<String>,
    /// Files that it needs and that are not given.
    pub absent: Vec<Absent>,
    /// Files that were read with it.
    pub used: Vec<String>,
}

impl Reading {
    /// Takes what another has to say besides its entries.
    pub fn join(&mut self, other: Self) {
        let notes = other.notes.into_iter().filter(|note| !self.notes.contains(note));
        self.notes.extend(notes.collect::<Vec<_>>());
        let absent = other.absent.into_iter().filter(|own| !self.absent.contains(own));
        self.absent.extend(absent.collect::<Vec<_>>());
        self.used.extend(other.used);
        self.definitions.extend(other.definitions);
    }
}

impl From<Vec<Entry>> for Reading {
    fn from(entries: Vec<Entry>) -> Self {
        Self { entries, ..Self::default() }
    }
}

/// A key with its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// Dotted path.
    pub key: String,
    pub given: Given,
    pub place: SourceLocation,
    /// Hydra's `~key`: the key is taken out.
    pub removes: bool,
}

impl Entry {
    pub fn new(key: impl Into<String>, given: Given, place: &SourceLocation) -> Self {
        Self { key: key.into(), given, place: place.clone(), removes: false }
    }

    /// Entries of what is given.
    pub fn all(key: &str, given: Given, place: &SourceLocation) -> Vec<Self> {
        let Given::Value(value) = given else {
            return vec![Self::new(key, given, place)];
        };
        let mut entries = Vec::new();
        Self::flatten(key, value, place, &mut entries);
        entries
    }

    /// Entries of a value: a mapping is its parts, with dotted keys.
    fn flatten(key: &str, value: Value, place: &SourceLocation, into: &mut Vec<Self>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                for (part, value) in map {
                    let key = if key.is_empty() { part } else { format!("{key}.{part}") };
                    Self::flatten(&key, value, place, into);
                }
            }
            value => into.push(Self::new(key, Given::Value(value), place)),
        }
    }
}
