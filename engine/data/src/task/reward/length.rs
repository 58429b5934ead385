//! Penalties by the number of a completion's tokens.

use crate::task::{Completion, TaskError};

/// The shape of a length penalty; every one lies between 0 and −1, below it beyond a buffer's own limit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Length {
    /// 0 at this many tokens, falling linearly to both sides.
    Target(usize),
    /// 0 up to this many tokens, −1 beyond.
    Max(usize),
    /// Falls linearly over so many tokens before a limit, the longest completion's where none is set (DAPO).
    Buffer(usize, Option<usize>),
}

impl Length {
    /// The one shape that is set, `setting` being the reward's name in messages.
    pub fn new(
        target: Option<usize>,
        max: Option<usize>,
        buffer: Option<usize>,
        limit: Option<usize>,
        setting: &str,
    ) -> Result<Self, TaskError> {
        let (key, tokens, length) = match (target, max, buffer) {
            (Some(n), None, None) => ("target", n, Self::Target(n)),
            (None, Some(n), None) => ("max", n, Self::Max(n)),
            (None, None, Some(n)) => ("buffer", n, Self::Buffer(n, limit)),
            (found, ..) => {
                let none = found.is_none() && max.is_none() && buffer.is_none();
                let found = if none { "none" } else { "several" };
                let detail = format!("expected exactly one of `target`, `max` and `buffer`, found {found}");
                return Err(TaskError::config(setting, detail));
            }
        };
        if limit.is_some_and(|limit| buffer.is_none_or(|buffer| buffer > limit)) {
            let detail = "expected a `buffer` of at most as many tokens, found none or a larger one";
            return Err(TaskError::config(format!("{setting}.limit"), detail));
        }
        if tokens == 0 {
            let detail = "expected at least 1 token, found 0";
            return Err(TaskError::config(format!("{setting}.{key}"), detail));
        }
        Ok(length)
    }

    /// What a completion pays, or why it cannot be judged.
    pub fn penalty(self, completion: &Completion<'_>) -> Result<f64, String> {
        let tokens = completion.tokens.len();
        match self {
            Self::Target(target) => Ok(-(tokens.abs_diff(target) as f64 / target as f64).min(1.0)),
            Self::Max(max) => Ok(if tokens > max { -1.0 } else { 0.0 }),
            Self::Buffer(buffer, own) => {
                let limit = own.unwrap_or(completion.max_tokens);
                let free = limit.checked_sub(buffer).ok_or_else(|| {
                    format!(
                        "its buffer of {buffer} tokens exceeds the completion limit of {limit}; lower `buffer` or raise the \
                         limit"
                    )
                })?;
                let share = tokens.saturating_sub(free) as f64 / buffer as f64;
                Ok(-if own.is_some() { share } else { share.min(1.0) })
            }
        }
    }
}
