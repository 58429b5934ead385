//! Everything that is wrong with a configuration file, at once and each with its place.

mod violations;

use super::keys::keys;
use super::load::{mapping, overridden, override_all, read, resolve_files};
use super::run::RunConfig;
use super::spans::{Place, Spans};
use super::yaml::mistake;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use violations::{Violation, violations};

/// A mistake in a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// What was expected, what was found, what to do.
    pub message: String,
    /// Where it is in the file; none where it is about no line: what is missing altogether, or set on the command line.
    pub place: Option<Place>,
}

/// A configuration file that was read and checked.
#[derive(Debug)]
pub struct CheckedFile {
    /// What is wrong with it, in the order of its lines.
    pub problems: Vec<Problem>,
    /// The configuration, resolved, where nothing is.
    pub config: Option<RunConfig>,
    /// Where something is: what can be read of it without what is wrong, neither checked nor resolved, for a look at
    /// the files that it names.
    pub rest: Option<RunConfig>,
    source: FileKeys,
}

/// A file's text as places in it are looked up.
#[derive(Debug, Default)]
struct FileKeys {
    spans: Spans,
    /// Paths that were set on the command line, as pointers.
    overridden: Vec<String>,
    /// All keys that there are.
    known: BTreeSet<String>,
    /// Sections with something that their schema does not allow.
    wrong: BTreeSet<String>,
}

impl CheckedFile {
    /// Reads a file with overrides and collects what is wrong: unknown keys, wrong types and values, numbers out of
    /// their range, keys that exclude each other. No other file is read.
    ///
    /// # Errors
    /// A file that cannot be read, and an override that is none.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        Self::of_text(&text, path.parent().unwrap_or(Path::new(".")), overrides)
    }

    /// The same for a text whose relative paths are below `folder`.
    ///
    /// # Errors
    /// `Error::Config` for an invalid override. Problems in the text are returned, not raised.
    pub fn of_text(text: &str, folder: &Path, overrides: &[String]) -> Result<Self> {
        let mut root = match mapping(text) {
            Ok(root) => root,
            Err(error) => return Ok(Self::unreadable(text, &error)),
        };
        let source = FileKeys {
            spans: Spans::of(text),
            overridden: overridden(overrides),
            known: keys().into_iter().map(|key| key.path).collect(),
            wrong: BTreeSet::new(),
        };
        resolve_files(&mut root, folder)?;
        override_all(&mut root, overrides)?;
        resolve_files(&mut root, Path::new("."))?;
        let mut this = Self { problems: Vec::new(), config: None, rest: None, source };
        this.collect(Value::Object(root));
        this.problems.sort_by_key(|problem| problem.place);
        Ok(this)
    }

    /// A mistake that was found later, with its place if its message names a key that the file has.
    #[must_use]
    pub fn problem(&self, message: &str) -> Problem {
        let pointer = self.source.named_in(message);
        Problem { place: pointer.and_then(|pointer| self.source.place(&pointer, true)), message: message.to_owned() }
    }

    /// A mistake that was found later, in the value of a key: a dotted path, entries of lists by their number. Its
    /// place is that of the key, or of the section that would hold it.
    #[must_use]
    pub fn problem_of(&self, key: &str, message: &str) -> Problem {
        let pointer = format!("/{}", key.replace('.', "/"));
        Problem { place: self.source.place(&pointer, true), message: message.to_owned() }
    }

    /// Whether something below a section, as its schema is, was found wrong: what is left of it in [`rest`](Self::rest)
    /// may say other things than the file.
    #[must_use]
    pub fn lacks_parts_of(&self, section: &str) -> bool {
        self.source.wrong.contains(section)
    }

    /// A text that is no YAML, or no mapping.
    fn unreadable(text: &str, error: &Error) -> Self {
        let problem = match serde_saphyr::from_str::<Value>(text) {
            Err(yaml) => {
                let (place, said) = mistake(text, &yaml);
                Problem { place, message: format!("is not YAML: {said}") }
            }
            Ok(_) => Problem { place: None, message: detail(error) },
        };
        Self { problems: vec![problem], config: None, rest: None, source: FileKeys::default() }
    }

    fn collect(&mut self, mut root: Value) {
        let found = violations(&root);
        for violation in &found {
            self.problems.push(Problem {
                message: violation.message.clone(),
                place: self.source.place(&violation.pointer, violation.at_key),
            });
            violation.take_out(&mut root);
        }
        let Value::Object(root) = root else {
            return;
        };
        self.source.wrong = found.iter().map(Violation::section).collect();
        if !found.is_empty() {
            self.rest = rest(root.clone(), &self.source.wrong);
        }
        match read(root) {
            Ok(config) => self.check(config, &found),
            // where something was taken out, what is missing now is no mistake of its own
            Err(error) if found.is_empty() => self.problems.push(self.problem(&detail(&error))),
            Err(_) => {}
        }
    }

    /// What the keys of a configuration say together, apart from what was taken out of it.
    fn check(&mut self, mut config: RunConfig, found: &[Violation]) {
        config.complete();
        for error in config.problems() {
            let problem = self.problem(&detail(&error));
            let about = self.source.named_in(&problem.message).unwrap_or_default();
            let follows = found.iter().any(|own| own.pointer.starts_with(&about));
            if found.is_empty() || !(about.is_empty() || follows) {
                self.problems.push(problem);
            }
        }
        if !self.problems.is_empty() {
            self.rest.get_or_insert(config);
            return;
        }
        let written = config.clone();
        match config.resolve() {
            Ok(config) => self.config = Some(config),
            Err(error) => {
                self.problems.push(self.problem(&detail(&error)));
                self.rest = Some(written);
            }
        }
    }
}

impl FileKeys {
    /// Where a value is, or its key; what holds it where it is not in the file itself.
    fn place(&self, pointer: &str, at_key: bool) -> Option<Place> {
        let on_command_line = |own: &String| {
            let rest = pointer.strip_prefix(own.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if self.overridden.iter().any(on_command_line) {
            return None;
        }
        self.spans.nearest(pointer, at_key)
    }

    /// The key that a message is about, as a pointer: the first that it names and the file has, or else the first that
    /// it names.
    fn named_in(&self, message: &str) -> Option<String> {
        let section = message.split(':').next().unwrap_or_default();
        let section = Some(section).filter(|section| self.known.contains(*section));
        let words = message
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'))
            .map(|word| word.trim_matches('.'));
        let below = |word: &str| {
            let prefixes = [section, message.split('.').next()];
            let mut inside = prefixes.into_iter().flatten();
            inside.find_map(|prefix| {
                let path = format!("{prefix}.{word}");
                self.known.contains(&path).then_some(path)
            })
        };
        let mut named = Vec::new();
        for word in words.filter(|word| !word.is_empty()) {
            if word.contains('.') && self.known.contains(word) {
                named.push(word.to_owned());
            } else if let Some(path) = below(word) {
                named.push(path);
            }
        }
        let first = message.split([':', ' ', '.']).next().unwrap_or_default();
        let first = first.trim_matches('`');
        if self.known.contains(first) {
            named.push(first.to_owned());
        }
        let pointers: Vec<String> = named.iter().map(|path| format!("/{}", path.replace('.', "/"))).collect();
        let written = pointers.iter().find(|pointer| self.spans.has(pointer));
        written.or(pointers.first()).cloned()
    }
}

/// A configuration without what is wrong with it, or, where that cannot be read either, without the sections that have
/// it.
fn rest(mut root: Map<String, Value>, wrong: &BTreeSet<String>) -> Option<RunConfig> {
    root.entry("model").or_insert_with(|| json!({}));
    root.entry("output").or_insert_with(|| json!("."));
    let read = |root: Map<String, Value>| {
        let mut config = read(root).ok()?;
        config.complete();
        Some(config)
    };
    read(root.clone()).or_else(|| {
        root.retain(|section, _| !wrong.contains(section));
        root.entry("model").or_insert_with(|| json!({}));
        root.entry("output").or_insert_with(|| json!("."));
        read(root)
    })
}

/// The message of an error, without what kind of error it is.
fn detail(error: &Error) -> String {
    match error {
        Error::Config(detail) => detail.clone(),
        other => other.to_string(),
    }
}

impl Violation {
    /// The section that has it.
    fn section(&self) -> String {
        let mut parts = self.pointer.split('/');
        parts.nth(1).unwrap_or_default().to_owned()
    }

    /// Removes what it is about, so that the rest can be looked at.
    fn take_out(&self, root: &mut Value) {
        let Some((parent, key)) = self.pointer.rsplit_once('/') else {
            return;
        };
        let key = key.replace("~1", "/").replace("~0", "~");
        match root.pointer_mut(parent) {
            Some(Value::Object(map)) => drop(Map::remove(map, &key)),
            // the other entries would move up, so the list goes as a whole
            Some(list @ Value::Array(_)) => *list = Value::Array(Vec::new()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
