//! A line of the doctor's report.

use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It works.
    Ok,
    /// It is missing; training works without it.
    Missing,
    /// It will slow a run down or stop it.
    Warning,
    /// Nothing can train.
    Failed,
}

impl Status {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Missing => "missing",
            Self::Warning => "warning",
            Self::Failed => "FAILED",
        }
    }
}

/// A check with its finding and its fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: String,
    pub status: Status,
    pub found: String,
    /// A command.
    pub fix: Option<String>,
}

impl Check {
    fn new(name: impl Into<String>, status: Status, found: impl Into<String>) -> Self {
        Self { name: name.into(), status, found: found.into(), fix: None }
    }

    pub fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Status::Ok, found)
    }

    pub fn missing(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Status::Missing, found)
    }

    pub fn warning(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Status::Warning, found)
    }

    pub fn failed(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(name, Status::Failed, found)
    }

    /// Sets the command that fixes the problem.
    pub fn mended_by(mut self, command: impl Into<String>) -> Self {
        self.fix = Some(command.into());
        self
    }
}
