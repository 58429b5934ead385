//! Files of other engines.

use super::engine::Engine;

/// A file of another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Line that selects a code block of a page, from 1.
    pub line: Option<usize>,
    /// Its name, for messages; the ending gives the format: `.sh`, `.yaml`, `.yml`, `.json`, `.py`. With another
    /// ending, the text decides.
    pub name: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// A file with its text.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { line: None, name: name.into(), text: text.into() }
    }

    /// Selects the code block of a page with this line, counted from 1.
    #[must_use]
    pub fn at_line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }
}

/// Returns true if an engine has a key of that name.
pub(super) fn is_known(key: &str) -> bool {
    Engine::ALL.iter().any(|engine| engine.rules().find(key).is_some())
}
