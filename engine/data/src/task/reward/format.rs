//! Rewards of the format: tags in order.

use super::Rule;
use crate::task::{Score, TaskError};

/// The completion has the tags in order.
pub(super) fn rule(tags: &[String], only: bool, opened: bool, setting: &str) -> Result<Rule, TaskError> {
    let format = Format::new(tags, only, opened, setting)?;
    Ok(Rule::of_completion(move |case| Ok(Score::paid(format.matches(case.text)))))
}

/// TRL's `think_format_reward`: `<think>` at the very start, no other one, and `</think>` somewhere behind it.
pub(super) fn trl_think() -> Rule {
    let holds = |text: &str| {
        text.strip_prefix("<think>").is_some_and(|rest| !rest.contains("<think>") && rest.contains("</think>"))
    };
    Rule::of_completion(move |case| Ok(Score::paid(holds(case.text))))
}

/// Required tags of a completion, in this order and not nested.
#[derive(Clone, Debug)]
struct Format {
    tags: Vec<[String; 2]>,
    /// True if only whitespace may surround them.
    only: bool,
    /// True if the prompt ends with the first tag, so that completions begin inside it.
    opened: bool,
}

impl Format {
    /// The format of tags without their angle brackets; `setting` is the reward's name in messages.
    fn new(tags: &[String], only: bool, opened: bool, setting: &str) -> Result<Self, TaskError> {
        if let Some((_, tag)) = tags.iter().enumerate().find(|(at, tag)| tags[..*at].contains(tag)) {
            return Err(TaskError::config(format!("{setting}.tags"), format!("the tag `{tag}` is named twice")));
        }
        let pair = |tag: &String| [format!("<{tag}>"), format!("</{tag}>")];
        Ok(Self { tags: tags.iter().map(pair).collect(), only, opened })
    }

    /// Returns true if a text has the format.
    fn matches(&self, text: &str) -> bool {
        let mut rest = text;
        for (at, [open, close]) in self.tags.iter().enumerate() {
            let inside = at == 0 && self.opened;
            let wanted = usize::from(!inside);
            let count = |tag: &str| text.matches(tag).take(2).count();
            if count(open) != wanted || count(close) != 1 {
                return false;
            }
            let start = if inside {
                Some(0)
            } else {
                let start = rest.find(open.as_str());
                let start = start.filter(|&at| !self.only || rest[..at].trim().is_empty());
                start.map(|at| at + open.len())
            };
            let Some(start) = start else { return false };
            let Some(end) = rest[start..].find(close.as_str()) else {
                return false;
            };
            // the next tag opens behind this one's end
            rest = &rest[start + end + close.len()..];
        }
        !self.only || rest.trim().is_empty()
    }
}
