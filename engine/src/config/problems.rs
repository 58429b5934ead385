//! Everything that is wrong with a configuration file, at once and each with its place.

use super::load::{overridden, override_all, read, resolve_files};
use super::run::RunConfig;
use super::schema::{KEYS, SCHEMA};
use super::spans::{Place, Spans};
use super::yaml::mistake;
use crate::{Error, Result};
use firebrick_settings::{Violation, violations};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// A mistake in a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// What was expected, what was found, what to do.
    pub message: String,
    /// Where it is in the file; none where it is about no line: what is missing altogether, or set on the command line.
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
    /// Sections with something that their schema does not allow.
    wrong: BTreeSet<String>,
}

/// Reads a configuration file and applies overrides. Paths in the file are relative to its folder, those in overrides
/// to where the program runs, and so is `output`.
///
/// # Errors
/// `Error::Io` where the file cannot be read; `Error::Config` for what is no YAML, an unknown key or a value that it
/// cannot have, with file and place, and for an override that is none; those of [`RunConfig::check`].
pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig> {
    let checked = CheckedFile::read(path, overrides).and_then(CheckedFile::into_config);
    checked.map_err(|error| match error {
        Error::Config(detail) => Error::Config(format!("{}: {detail}", path.display())),
        other => other,
    })
}

/// Reads a configuration from text and applies overrides; paths are left as they are.
///
/// # Errors
/// `Error::Config` for what is no YAML, an unknown key, a value that it cannot have, or an override that is none; those
/// of [`RunConfig::check`].
pub fn parse(text: &str, overrides: &[String]) -> Result<RunConfig> {
    CheckedFile::of_text(text, None, overrides)?.into_config()
}

impl CheckedFile {
    /// Reads a file with overrides and collects what is wrong: unknown keys, wrong types and values, numbers out of
    /// their range, keys that exclude each other. No other file is read.
    ///
    /// # Errors
    /// A file that cannot be read, and an override that is none.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        Self::of_text(&text, Some(path.parent().unwrap_or(Path::new("."))), overrides)
    }

    /// The same for a text whose relative paths are below `folder`; without one, paths are left as they are.
    ///
    /// # Errors
    /// `Error::Config` for an invalid override. Problems in the text are returned, not raised.
    pub fn of_text(text: &str, folder: Option<&Path>, overrides: &[String]) -> Result<Self> {
        let mut root = match serde_saphyr::from_str(text) {
            Ok(Value::Object(root)) => root,
            Ok(_) => {
                return Ok(Self::unreadable(None, "must be a mapping of sections (model, task, output, …)".into()));
            }
            Err(yaml) => {
                let (place, said) = mistake(text, &yaml);
                return Ok(Self::unreadable(place, format!("is not YAML: {said}")));
            }
        };
        if let Some(folder) = folder {
            resolve_files(&mut root, folder)?;
        }
        override_all(&mut root, overrides)?;
        if folder.is_some() {
            // absolute, so that the config.yaml written into the run folder reproduces the run from anywhere
            resolve_files(&mut root, Path::new("."))?;
        }
        let source = FileKeys { spans: Spans::of(text), overridden: overridden(overrides), wrong: BTreeSet::new() };
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
    fn unreadable(place: Option<Place>, message: String) -> Self {
        let problems = vec![Problem { message, place }];
        Self { problems, config: None, rest: None, source: FileKeys::default() }
    }

    fn collect(&mut self, mut root: Value) {
        let found = violations(&SCHEMA, &root);
        for violation in &found {
            self.problems.push(Problem {
                message: violation.message.clone(),
                place: self.source.place(&violation.pointer, violation.at_key),
            });
            take_out(&violation.pointer, &mut root);
        }
        let Value::Object(root) = root else {
            return;
        };
        self.source.wrong = found.iter().filter_map(|own| own.pointer.split('/').nth(1)).map(str::to_owned).collect();
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
            let follows = found.iter().any(|own| own.pointer.starts_with(&about) || about.starts_with(&own.pointer));
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

/// A configuration without what is wrong with it, or, where that cannot be read either, without the sections that have
/// it.
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

/// The message of an error, without what kind of error it is.
fn detail(error: &Error) -> String {
    match error {
        Error::Config(detail) => detail.clone(),
        other => other.to_string(),
    }
}

/// Removes what a pointer names, so that the rest can be looked at.
fn take_out(pointer: &str, root: &mut Value) {
    let Some((parent, key)) = pointer.rsplit_once('/') else {
        return;
    };
    match root.pointer_mut(parent) {
        Some(Value::Object(map)) => drop(map.remove(&key.replace("~1", "/").replace("~0", "~"))),
        // the other entries would move up, so the list goes as a whole
        Some(list @ Value::Array(_)) => *list = Value::Array(Vec::new()),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
