//! Penalties by the number of a completion's tokens.

use super::Rule;
use crate::task::{Completion, Score, TaskError};

/// The shape of a length penalty; values are from 0 to −1, and below it beyond a buffer's `limit`.
#[derive(Clone, Copy, Debug)]
enum Length {
    /// 0 at this many tokens, falling linearly to both sides.
    Target(usize),
    /// 0 up to this many tokens, −1 beyond.
    Max(usize),
    /// Falls linearly over this many tokens before a limit, the longest completion's by default (DAPO).
    Buffer(usize, Option<usize>),
}

/// The penalty of `target`, `max` or `buffer`, whichever is set.
pub(super) fn rule([target, max, buffer, limit]: [Option<usize>; 4], setting: &str) -> Result<Rule, TaskError> {
    let shape = match (target, max, buffer) {
        (Some(n), None, None) => Length::Target(n),
        (None, Some(n), None) => Length::Max(n),
        (None, None, Some(n)) => Length::Buffer(n, limit),
        shapes => {
            let actual = if shapes == (None, None, None) { "none" } else { "several" };
            let detail = format!("expected exactly one of `target`, `max` and `buffer`, found {actual}");
            return Err(TaskError::config(setting, detail));
        }
    };
    if limit.is_some_and(|limit| buffer.is_none_or(|buffer| buffer > limit)) {
        let detail = "expected a `buffer` of at most as many tokens, found none or a larger one";
        return Err(TaskError::config(format!("{setting}.limit"), detail));
    }
    Ok(Rule::of_completion(move |case| Ok(Score::value(shape.penalty(case.completion)?))))
}

impl Length {
    /// The penalty of a completion, or the reason that it cannot be scored.
    fn penalty(self, completion: &Completion<'_>) -> Result<f64, String> {
        let tokens = completion.tokens.len();
        match self {
            Self::Target(target) => Ok(-(tokens.abs_diff(target) as f64 / target as f64).min(1.0)),
            Self::Max(max) => Ok(if tokens > max { -1.0 } else { 0.0 }),
            Self::Buffer(buffer, fixed) => {
                let limit = fixed.unwrap_or(completion.max_tokens);
                let free = limit.checked_sub(buffer).ok_or_else(|| {
                    format!(
                        "its buffer of {buffer} tokens exceeds the completion limit of {limit}; lower `buffer` or raise the \
                         limit"
                    )
                })?;
                let share = tokens.saturating_sub(free) as f64 / buffer as f64;
                Ok(-if fixed.is_some() { share } else { share.min(1.0) })
            }
        }
    }
}
