//! Rules: functions of a completion's text, its tokens and the ground truth.

use crate::task::{Completion, Score, TaskError};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Finds the piece of a text that a rule compares with the ground truth.
type Read = dyn for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Send + Sync;

/// Scores a completion, or gives the reason that it cannot be scored.
type ScoreFn = dyn Fn(&Case<'_>) -> Result<Score, String> + Send + Sync;

/// A completion beside its ground truth.
pub(super) struct Case<'a> {
    pub answer: &'a str,
    /// What the rule reads of the completion.
    pub text: &'a str,
    pub completion: &'a Completion<'a>,
}

/// A rule, its settings checked and its patterns compiled.
#[derive(Clone)]
pub struct Rule {
    /// Whether it compares with the ground truth at all.
    pub(super) needs_answer: bool,
    /// Whether it reads what follows the reasoning: nothing where that has not ended.
    after_thought: bool,
    /// Finds the piece of a text that is compared with the ground truth, where there is one.
    pub(super) read: Option<Arc<Read>>,
    /// Makes a completion that gives a ground truth in the form that the rule reads, where there is such a form.
    pub(super) gold: Option<fn(&str) -> String>,
    score: Arc<ScoreFn>,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("needs_answer", &self.needs_answer).finish_non_exhaustive()
    }
}

impl Rule {
    /// A rule of the completion alone.
    pub(super) fn of_completion(score: impl Fn(&Case<'_>) -> Result<Score, String> + Send + Sync + 'static) -> Self {
        Self { needs_answer: false, after_thought: false, read: None, gold: None, score: Arc::new(score) }
    }

    /// A rule that compares with the ground truth.
    pub(super) fn of_answer(score: impl Fn(&Case<'_>) -> Result<Score, String> + Send + Sync + 'static) -> Self {
        Self { needs_answer: true, ..Self::of_completion(score) }
    }

    /// A rule that reads a piece of the text and compares it with the ground truth. `equal` is given the ground truth
    /// and the piece.
    pub(super) fn comparing(
        read: impl for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Clone + Send + Sync + 'static,
        equal: impl Fn(&str, Option<&str>) -> Result<bool, String> + Send + Sync + 'static,
    ) -> Self {
        let find = read.clone();
        let rule = Self::of_answer(move |case| {
            let found = find(case.text);
            let found = found.as_deref();
            Ok(Score::compared(equal(case.answer, found)?, found, case.answer))
        });
        rule.reading(read)
    }

    /// With the function that finds what is compared with the ground truth.
    pub(super) fn reading(
        self,
        read: impl for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Send + Sync + 'static,
    ) -> Self {
        Self { read: Some(Arc::new(read)), ..self }
    }

    /// With the form in which a completion gives the ground truth.
    pub(super) fn gold(self, gold: fn(&str) -> String) -> Self {
        Self { gold: Some(gold), ..self }
    }

    /// Reading only what follows the reasoning. The rules of TRL and verl do not.
    pub(super) fn after_thought(self) -> Self {
        Self { after_thought: true, ..self }
    }

    /// The piece of a completion that is compared with the ground truth, if there is one.
    pub(super) fn read<'t>(&self, text: &'t str) -> Option<Cow<'t, str>> {
        self.read.as_ref()?(text)
    }

    /// The score of a completion, or the reason that this sample cannot be scored.
    pub(super) fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Score, String> {
        let text = if self.after_thought { completion.answering() } else { completion.text };
        (self.score)(&Case { answer, text, completion })
    }
}

/// A setting that has to be a size.
pub(super) fn size(value: f64, key: &str, setting: &str) -> Result<f64, TaskError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(TaskError::config(format!("{setting}.{key}"), format!("expected a non-negative number, found {value}")))
}

#[cfg(test)]
mod tests;
