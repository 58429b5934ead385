//! Problems of a configuration file, all at once and with their places.

use super::load::{apply_overrides, overridden, read, resolve_files};
use super::run::RunConfig;
use super::schema::{KEYS, SCHEMA};
use super::spans::{Place, Spans};
use super::yaml::mistake;
use crate::{Error, Result};
use firebrick_settings::{Violation, violations};
use firebrick_spec::{file, secrets::secret_in};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// A mistake in a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Expectation, value and remedy.
    pub message: String,
    /// Place in the file; `None` for missing keys and values of the command line.
    pub place: Option<Place>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Place { line, column }) = self.place {
            write!(f, "line {line}, column {column}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// A configuration file that was read and checked.
#[derive(Debug)]
pub struct CheckedFile {
    /// Problems, in the order of lines.
    pub problems: Vec<Problem>,
    /// The resolved configuration, without problems.
    pub config: Option<RunConfig>,
    /// With problems: the valid part, neither checked nor resolved, for a look at the files that it names.
    pub rest: Option<RunConfig>,
    source: FileKeys,
}

/// Places of the keys of a file.
#[derive(Debug, Default)]
struct FileKeys {
    spans: Spans,
    /// Paths that were set on the command line, as JSON pointers.
    overridden: Vec<String>,
    /// Sections that violate their schema.
    wrong: BTreeSet<String>,
}

/// Reads a configuration file and applies overrides. Paths in the file are relative to its folder, those in overrides
/// and `output` to the working directory.
///
/// # Errors
/// `Error::Io` if the file cannot be read; `Error::Config` for invalid YAML, an unknown key or an invalid value, with
/// file and place, and for an invalid override; those of [`RunConfig::check`].
pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig> {
    let checked = CheckedFile::read(path, overrides).and_then(CheckedFile::into_config);
    checked.map_err(|error| match error {
        Error::Config(detail) => Error::Config(format!("{}: {detail}", path.display())),
        other => other,
    })
}

/// Reads a configuration from text and applies overrides; paths are unchanged.
///
/// # Errors
/// `Error::Config` for invalid YAML, an unknown key, an invalid value or override; those of [`RunConfig::check`].
pub fn parse(text: &str, overrides: &[String]) -> Result<RunConfig> {
    CheckedFile::parse(text, None, overrides)?.into_config()
}

/// Rejects values that the run folder must not have.
fn refuse_secrets(root: &Map<String, Value>, overrides: &[String]) -> Result<()> {
    fn secret(value: &Value, key: &str) -> Option<(String, &'static str)> {
        match value {
            Value::String(text) => secret_in(text).map(|kind| (key.to_owned(), kind)),
            Value::Array(list) => list.iter().enumerate().find_map(|(at, entry)| secret(entry, &format!("{key}.{at}"))),
            Value::Object(map) => map.iter().find_map(|(name, entry)| secret(entry, &format!("{key}.{name}"))),
            _ => None,
        }
    }
    let overridden = overrides.iter().find_map(|text| {
        let (key, value) = text.split_once('=')?;
        Some((key.to_owned(), secret_in(value)?))
    });
    match overridden.or_else(|| root.iter().find_map(|(key, value)| secret(value, key))) {
        None => Ok(()),
        Some((key, kind)) => Err(Error::Config(format!(
            "{key} has {kind}, which the run folder's config.yaml would keep; pass it in an environment variable"
        ))),
    }
}

impl CheckedFile {
    /// Reads a file with overrides and collects its problems: unknown keys, wrong types and values, numbers out of
    /// range, contradicting keys. Reads no other file.
    ///
    /// # Errors
    /// If the file cannot be read, or for an invalid override.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Self> {
        let text = file::read_text(path, file::MAX_CONFIG_BYTES).map_err(Error::io("read", path))?;
        Self::parse(&text, Some(path.parent().unwrap_or(Path::new("."))), overrides)
    }

    /// As [`Self::read`], for a text whose relative paths are below `folder`; without one, paths are unchanged.
    ///
    /// # Errors
    /// `Error::Config` for an invalid override. Problems in the text are returned, not raised.
    pub fn parse(text: &str, folder: Option<&Path>, overrides: &[String]) -> Result<Self> {
        let mut root = match serde_saphyr::from_str(text) {
            Ok(Value::Object(root)) => root,
            Ok(_) => {
                return Ok(Self::unreadable(None, "must be a mapping of sections (model, task, output, …)".into()));
            }
            Err(yaml) => {
                let (place, message) = mistake(text, &yaml);
                return Ok(Self::unreadable(place, format!("is not YAML: {message}")));
            }
        };
        refuse_secrets(&root, overrides)?;
        if let Some(folder) = folder {
            resolve_files(&mut root, folder)?;
        }
        apply_overrides(&mut root, overrides)?;
        if folder.is_some() {
            // absolute, so that the config.yaml written into the run folder reproduces the run from anywhere
            resolve_files(&mut root, Path::new("."))?;
        }
        let source = FileKeys { spans: Spans::new(text), overridden: overridden(overrides), wrong: BTreeSet::new() };
        let mut this = Self { problems: Vec::new(), config: None, rest: None, source };
        this.collect(Value::Object(root));
        this.problems.sort_by_key(|problem| problem.place);
        Ok(this)
    }

    /// The configuration.
    ///
    /// # Errors
    /// `Error::Config` with the first of its problems.
    pub fn into_config(self) -> Result<RunConfig> {
        match (self.problems.first(), self.config) {
            (None, Some(config)) => Ok(config),
            (problem, _) => Err(Error::Config(problem.map(Problem::to_string).unwrap_or_default())),
        }
    }

    /// A problem that was found later, with its place if its message names a key of the file.
    pub fn problem(&self, message: &str) -> Problem {
        let pointer = self.source.named_in(message);
        Problem { place: pointer.and_then(|pointer| self.source.place(&pointer, true)), message: message.to_owned() }
    }

    /// A problem that was found later, in the value of a key: a dotted path, with entries of lists by number. Its place
    /// is that of the key, or of its section.
    pub fn problem_of(&self, key: &str, message: &str) -> Problem {
        let pointer = format!("/{}", key.replace('.', "/"));
        Problem { place: self.source.place(&pointer, true), message: message.to_owned() }
    }

    /// Returns true if a section violates its schema: in [`rest`](Self::rest) it may differ from the file.
    pub fn is_incomplete(&self, section: &str) -> bool {
        self.source.wrong.contains(section)
    }

    /// A text that is not YAML, or not a mapping.
    fn unreadable(place: Option<Place>, message: String) -> Self {
        let problems = vec![Problem { message, place }];
        Self { problems, config: None, rest: None, source: FileKeys::default() }
    }

    fn collect(&mut self, mut root: Value) {
        let violations = violations(&SCHEMA, &root);
        for violation in &violations {
            self.problems.push(Problem {
                message: violation.message.clone(),
                place: self.source.place(&violation.pointer, violation.at_key),
            });
            remove(&violation.pointer, &mut root);
        }
        let Value::Object(root) = root else {
            return;
        };
        let sections = violations.iter().filter_map(|violation| violation.pointer.split('/').nth(1));
        self.source.wrong = sections.map(str::to_owned).collect();
        if !violations.is_empty() {
            self.rest = rest(root.clone(), &self.source.wrong);
        }
        match read(root) {
            Ok(config) => self.check(config, &violations),
            // after a removal, a missing key is not a problem of the file
            Err(error) if violations.is_empty() => self.problems.push(self.problem(&detail(&error))),
            Err(_) => {}
        }
    }

    /// Checks the keys of a configuration together, except removed ones.
    fn check(&mut self, mut config: RunConfig, violations: &[Violation]) {
        config.complete();
        for error in config.problems() {
            let problem = self.problem(&detail(&error));
            let about = self.source.named_in(&problem.message).unwrap_or_default();
            let overlaps =
                |violation: &Violation| violation.pointer.starts_with(&about) || about.starts_with(&violation.pointer);
            if violations.is_empty() || !(about.is_empty() || violations.iter().any(overlaps)) {
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
    /// Place of a value or its key, or of its section if it is not in the file.
    fn place(&self, pointer: &str, at_key: bool) -> Option<Place> {
        let on_command_line = |path: &String| {
            let rest = pointer.strip_prefix(path.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if self.overridden.iter().any(on_command_line) {
            return None;
        }
        self.spans.nearest(pointer, at_key)
    }

    /// JSON pointer of the key that a message is about: the first named one that the file has, or else the first named
    /// one.
    fn named_in(&self, message: &str) -> Option<String> {
        let section = message.split(':').next().unwrap_or_default();
        let section = Some(section).filter(|section| is_key(section));
        let words = message
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'))
            .map(|word| word.trim_matches('.'));
        let below = |word: &str| {
            let prefixes = [section, message.split('.').next()];
            let mut inside = prefixes.into_iter().flatten();
            inside.find_map(|prefix| {
                let path = format!("{prefix}.{word}");
                is_key(&path).then_some(path)
            })
        };
        let mut named = Vec::new();
        for word in words.filter(|word| !word.is_empty()) {
            if word.contains('.') && is_key(word) {
                named.push(word.to_owned());
            } else if let Some(path) = below(word) {
                named.push(path);
            }
        }
        let first = message.split([':', ' ', '.']).next().unwrap_or_default();
        let first = first.trim_matches('`');
        if is_key(first) {
            named.push(first.to_owned());
        }
        let pointers: Vec<String> = named.iter().map(|path| format!("/{}", path.replace('.', "/"))).collect();
        let written = pointers.iter().find(|pointer| self.spans.has(pointer));
        written.or(pointers.first()).cloned()
    }
}

/// The valid part of a configuration, or, if that cannot be read, the configuration without wrong sections.
fn rest(mut root: Map<String, Value>, wrong: &BTreeSet<String>) -> Option<RunConfig> {
    let config = read(root.clone()).or_else(|_| {
        root.retain(|section, _| !wrong.contains(section));
        read(root)
    });
    let mut config = config.ok()?;
    config.complete();
    Some(config)
}

fn is_key(path: &str) -> bool {
    KEYS.iter().any(|key| key.path == path)
}

/// Message of an error, without its kind.
fn detail(error: &Error) -> String {
    match error {
        Error::Config(detail) => detail.clone(),
        other => other.to_string(),
    }
}

/// Removes the value at a JSON pointer.
fn remove(pointer: &str, root: &mut Value) {
    let Some((parent, key)) = pointer.rsplit_once('/') else {
        return;
    };
    match root.pointer_mut(parent) {
        Some(Value::Object(map)) => drop(map.remove(&key.replace("~1", "/").replace("~0", "~"))),
        // the other entries would move up, so the whole list is removed
        Some(list @ Value::Array(_)) => *list = Value::Array(Vec::new()),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
