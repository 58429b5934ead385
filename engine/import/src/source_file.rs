//! A file of another engine, and the keys that engines have.

use super::engine::Engine;

/// A file of another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Of a page with several code blocks: a line of the one that is meant, from 1.
    pub line: Option<usize>,
    /// Its name, for messages; the ending says what it is: `.sh`, `.yaml`, `.yml`, `.json`, `.py`. With another, the
    /// text says it.
    pub name: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// A file with its text.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { line: None, name: name.into(), text: text.into() }
    }

    /// The code block of a page that has a line, counted from 1.
    #[must_use]
    pub fn at_line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }
}

/// Whether an engine has a key of that name.
pub(super) fn is_known(key: &str) -> bool {
    Engine::ALL.iter().any(|engine| engine.rules().find(key).is_some())
}
