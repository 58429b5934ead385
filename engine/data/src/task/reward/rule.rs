//! Rules: functions of a completion's text, its tokens and the ground truth.

use crate::task::{Completion, Score};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Reads the answer in a text.
type Read = dyn for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Send + Sync;

/// Scores a completion, or returns the reason why it cannot.
type ScoreFn = dyn Fn(&Case<'_>) -> Result<Score, String> + Send + Sync;

/// A completion with its ground truth.
pub(super) struct Case<'a> {
    pub answer: &'a str,
    /// The text that the rule reads.
    pub text: &'a str,
    pub completion: &'a Completion<'a>,
}

/// A rule, its settings checked and its patterns compiled.
#[derive(Clone)]
pub struct Rule {
    /// True if it compares with the ground truth.
    pub(super) needs_answer: bool,
    /// True if it reads only the text after the reasoning.
    after_thought: bool,
    /// Reads the answer that is compared with the ground truth, if it does.
    pub(super) read: Option<Arc<Read>>,
    /// Writes a ground truth as a completion that the rule reads, if there is such a form.
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

    /// A rule that reads an answer and compares it with the ground truth. `equal` gets the ground truth
    /// and the answer.
    pub(super) fn comparing(
        read: impl for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Clone + Send + Sync + 'static,
        equal: impl Fn(&str, Option<&str>) -> Result<bool, String> + Send + Sync + 'static,
    ) -> Self {
        let find = read.clone();
        let rule = Self::of_answer(move |case| {
            let parsed = find(case.text);
            let parsed = parsed.as_deref();
            Ok(Score::compared(equal(case.answer, parsed)?, parsed, case.answer))
        });
        rule.reading(read)
    }

    /// Sets the function that reads the answer.
    pub(super) fn reading(
        self,
        read: impl for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Send + Sync + 'static,
    ) -> Self {
        Self { read: Some(Arc::new(read)), ..self }
    }

    /// Sets the function that writes a ground truth as a completion.
    pub(super) fn gold(self, gold: fn(&str) -> String) -> Self {
        Self { gold: Some(gold), ..self }
    }

    /// Restricts the rule to the text after the reasoning. The rules of TRL and verl are not restricted.
    pub(super) fn after_thought(self) -> Self {
        Self { after_thought: true, ..self }
    }

    /// The answer that the rule reads in a text, if there is one.
    pub(super) fn read<'t>(&self, text: &'t str) -> Option<Cow<'t, str>> {
        self.read.as_ref()?(text)
    }

    /// The score of a completion, or the reason why it cannot be scored.
    pub(super) fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Score, String> {
        let text = if self.after_thought { completion.answering() } else { completion.text };
        (self.score)(&Case { answer, text, completion })
    }
}

#[cfg(test)]
mod tests;
