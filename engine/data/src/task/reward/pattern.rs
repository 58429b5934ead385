//! A user's regular expressions.

use crate::task::TaskError;
use regex::{Regex, RegexBuilder};

/// Compiles a user's pattern. Completions have many lines, so `.` matches line breaks too.
pub(crate) fn compile(pattern: &str, setting: &str) -> Result<Regex, TaskError> {
    RegexBuilder::new(pattern).dot_matches_new_line(true).build().map_err(|error| {
        TaskError::Regex {
            setting: setting.to_owned(),
            pattern: pattern.to_owned(),
            // The compiler's own message repeats the pattern over several lines; the last says
            // what is wrong.
            detail: error.to_string().lines().last().unwrap_or_default().trim().to_owned(),
        }
    })
}
