//! Rules that compare texts: the whole completion, a part of it, or the match of a pattern.

use super::{Case, Rule};
use crate::task::{Score, TaskError};
use regex::{Regex, RegexBuilder};
use std::borrow::Cow;

/// The trimmed completion is the ground truth.
pub(super) fn exact(ignore_case: bool) -> Rule {
    let equal = move |answer: &str, text: Option<&str>| {
        Ok(text.is_some_and(|text| fold(text, ignore_case) == fold(answer.trim(), ignore_case)))
    };
    Rule::comparing(|text| Some(Cow::Borrowed(text.trim())), equal).gold(str::to_owned)
}

/// The completion contains the ground truth.
pub(super) fn contains(ignore_case: bool) -> Rule {
    let score = move |case: &Case<'_>| {
        let answer = case.answer.trim();
        if answer.is_empty() {
            return Err("the ground truth is empty, which every text contains".to_owned());
        }
        let holds = fold(case.text, ignore_case).contains(&fold(answer, ignore_case));
        Ok(Score::compared(holds, None, case.answer))
    };
    Rule::of_answer(score).gold(str::to_owned)
}

/// Group 1 of a pattern's last match is the ground truth; without a group, the pattern matches.
pub(super) fn regex(pattern: &str, setting: &str) -> Result<Rule, TaskError> {
    let pattern = compile(pattern, &format!("{setting}.pattern"))?;
    if pattern.captures_len() == 1 {
        return Ok(Rule::of_completion(move |case| Ok(Score::paid(pattern.is_match(case.text)))));
    }
    Ok(Rule::comparing(
        move |text| Some(Cow::Borrowed(pattern.captures_iter(text).last()?.get(1)?.as_str())),
        |answer, group| Ok(group.is_some_and(|group| group.trim() == answer.trim())),
    ))
}

/// Compiles a user's pattern. Completions have many lines, so `.` matches line breaks too.
pub(crate) fn compile(pattern: &str, setting: &str) -> Result<Regex, TaskError> {
    RegexBuilder::new(pattern).dot_matches_new_line(true).build().map_err(|error| {
        TaskError::Regex {
            setting: setting.to_owned(),
            pattern: pattern.to_owned(),
            // the compiler's message repeats the pattern over several lines; the last has
            // the reason
            detail: error.to_string().lines().last().unwrap_or_default().trim().to_owned(),
        }
    })
}

fn fold(text: &str, ignore_case: bool) -> String {
    if ignore_case { text.to_lowercase() } else { text.to_owned() }
}
