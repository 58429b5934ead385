//! A command with settings.

use super::value::{Place, Text};

/// Syntax of a command's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Form {
    /// None: a script that is not among the files.
    Script,
    /// Only a launcher's options.
    Devices,
    /// `--key value`.
    Flags,
    /// `key=value`.
    Overrides,
}

/// A command with settings.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// Its place, after the call sites of the enclosing functions.
    pub at: Vec<Place>,
    pub form: Form,
    /// True if it consists of settings only.
    pub is_line: bool,
    pub launcher: Vec<Text>,
    pub arguments: Vec<Text>,
    /// A module, a file, a command of `trl`.
    pub program: Option<String>,
    pub absent: Option<String>,
}
