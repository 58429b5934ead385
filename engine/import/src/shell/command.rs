//! A command that has settings.

use super::value::{Place, Text};

/// How settings are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Form {
    /// Not at all: a script that is not among the files.
    Script,
    /// Those of the launcher alone.
    Devices,
    /// `--key value`.
    Flags,
    /// `key=value`.
    Overrides,
}

/// A command with settings.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// Where it stands, after where the functions around it were called.
    pub at: Vec<Place>,
    pub form: Form,
    /// Whether it is nothing but settings.
    pub is_line: bool,
    pub launcher: Vec<Text>,
    pub arguments: Vec<Text>,
    /// A module, a file, a command of `trl`.
    pub program: Option<String>,
    pub absent: Option<String>,
}
