//! What a file of another engine says: keys with values, and where they stand.

use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// The key of the program that a command starts: a module, or a file.
pub(super) const PROGRAM: &str = "(program)";

/// The value of an environment variable, for scripts that read one.
pub(super) type EnvironmentLookup<'e> = &'e dyn Fn(&str) -> Option<String>;

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

    /// Entries of a value: a mapping is its parts, with dotted keys.
    pub fn flatten(key: &str, value: Value, place: &SourceLocation, into: &mut Vec<Self>) {
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
