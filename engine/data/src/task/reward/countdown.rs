//! The countdown rule: an expression of given numbers that reaches a target, evaluated exactly.

use super::Rule;
use math_answer::{Arithmetic, Evaluated, concluded, last_boxed};
use num_rational::BigRational;
use serde::Deserialize;
use std::borrow::Cow;
use std::fmt;

/// Longest expression, in bytes.
const MAX_BYTES: usize = 2_000;

/// Limits of expressions: 40 nested brackets.
const ARITHMETIC: Arithmetic = Arithmetic { depth: 41, decimals: false };

/// Most numbers of a problem.
const MAX_NUMBERS: usize = 64;

/// The expression of a completion reaches the target.
pub(super) fn rule(use_all: bool) -> Rule {
    let equal = move |answer: &str, expression: Option<&str>| {
        let problem = CountdownProblem::parse(answer)?;
        Ok(expression.is_some_and(|expression| problem.reached(expression, use_all) == Reached::Target))
    };
    Rule::comparing(|text| find(text).map(Cow::Borrowed), equal).after_thought()
}

/// A problem: the ground truth of the rule, written as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct CountdownProblem {
    /// The number to reach.
    pub target: i64,
    /// The numbers to use.
    #[serde(alias = "nums")]
    pub numbers: Vec<i64>,
}

impl CountdownProblem {
    /// Reads a ground truth such as `{"target": 24, "numbers": [2, 3, 4]}`.
    ///
    /// # Errors
    /// The expectation, for a text that is no such object or has too many numbers.
    pub fn parse(answer: &str) -> Result<Self, String> {
        let problem: Self = serde_json::from_str(answer.trim()).map_err(|error| {
            format!(
                "the ground truth {answer:?} is not a countdown problem ({error}); expected JSON such as {}, for \
                 example `answer: '{{{{\"target\": {{target}}, \"numbers\": {{nums}}}}}}'`",
                "{\"target\": 24, \"numbers\": [2, 3, 4]}"
            )
        })?;
        match problem.numbers.len() {
            1..=MAX_NUMBERS => Ok(problem),
            count => Err(format!("a countdown problem has 1 to {MAX_NUMBERS} integers, found {count}")),
        }
    }

    /// The numbers in ascending order.
    pub fn sorted(&self) -> Vec<i64> {
        let mut numbers = self.numbers.clone();
        numbers.sort_unstable();
        numbers
    }

    /// Result of an expression that may use each number once, and must use all of them with `all`.
    pub fn reached(&self, expression: &str, all: bool) -> Reached {
        let Some(Evaluated { value, numbers: mut used }) = evaluate(expression) else {
            return Reached::Nothing;
        };
        let given: Vec<_> = self.sorted().into_iter().map(|number| BigRational::from_integer(number.into())).collect();
        used.sort_unstable();
        let fits = if all {
            given == used
        } else {
            let mut given = given.iter();
            used.iter().all(|number| given.any(|next| next == number))
        };
        if !fits {
            Reached::Nothing
        } else if value == BigRational::from_integer(self.target.into()) {
            Reached::Target
        } else {
            Reached::Numbers
        }
    }
}

impl fmt::Display for CountdownProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (target, numbers) = (self.target, &self.numbers);
        write!(f, r#"{{"target": {target}, "numbers": {numbers:?}}}"#)
    }
}

/// Result of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// No expression, or one of other numbers.
    Nothing,
    /// A valid expression with another value.
    Numbers,
    /// The target.
    Target,
}

/// The expression of a completion: in its last `<answer>`, else in its last `\boxed{}`, else its last line.
pub(crate) fn find(text: &str) -> Option<&str> {
    let text = concluded(text);
    if let Some(end) = text.rfind("</answer>")
        && let Some(start) = text[..end].rfind("<answer>")
    {
        return Some(text[start + "<answer>".len()..end].trim());
    }
    last_boxed(text).or_else(|| text.lines().rev().find(|line| !line.trim().is_empty())).map(str::trim)
}

/// The value of an expression of whole numbers with `+ - * /` and brackets, and the numbers in it. Text after an
/// equals sign is ignored.
fn evaluate(text: &str) -> Option<Evaluated> {
    if text.len() > MAX_BYTES {
        return None;
    }
    let left = text.split('=').next()?;
    let plain = left.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/");
    let plain = plain.chars().map(|sign| match sign {
        '−' | '–' => '-',
        '×' | '·' => '*',
        '÷' => '/',
        '[' => '(',
        ']' => ')',
        other => other,
    });
    ARITHMETIC.evaluate(&plain.collect::<String>()).ok()
}
