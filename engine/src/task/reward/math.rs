//! The `math` rule: the answer of a completion, read as mathematics, against the ground truth.
//!
//! Everything below an answer's first 2,000 bytes is bounded: tokens, nesting, bits of exact numbers, points of a
//! numeric comparison. No text makes it panic or run long.

mod brackets;
mod collection;
mod compare;
mod complex;
mod evaluate;
mod expr;
mod extract;
mod lexer;
mod number;
mod parsed;
mod parser;
mod units;
mod value;
mod words;

use self::compare::{Comparison, compare};
use self::extract::{extract, gold_source};
use self::parsed::Parsed;
use super::verdict::RuleVerdict;

pub(crate) use self::extract::{AnswerSource, answer_line, concluded, last_boxed};

/// Settings of the rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Math {
    /// Where the answer of a completion is looked for.
    pub source: AnswerSource,
    /// Largest relative difference of two numbers that still counts as equal; 0 compares exactly.
    pub tolerance: f64,
}

impl Math {
    /// The piece of a completion that is read.
    pub fn reading(self, text: &str) -> Option<String> {
        extract(text, self.source).map(|answer| Parsed::new(answer).to_string())
    }

    /// Judges a completion, or says why the ground truth cannot be read.
    pub fn judge(self, answer: &str, text: &str) -> Result<RuleVerdict, String> {
        let source = gold_source(answer);
        if source.is_empty() {
            return Err("the ground truth is empty; set `answer_extract` or `answer_field`".into());
        }
        let gold = Parsed::new(source);
        let Some(found) = extract(text, self.source) else {
            return Ok(RuleVerdict::of(false, None, &gold.to_string()));
        };
        let found = Parsed::new(found);
        let outcome = compare(&gold, &found, self.tolerance);
        let mut verdict = RuleVerdict::of(outcome == Comparison::Equal, Some(&found.to_string()), &gold.to_string());
        if let Comparison::Undecided(reason) = outcome {
            verdict.undecided = Some(reason.to_owned());
        }
        Ok(verdict)
    }

    /// A completion that says the ground truth and nothing else.
    pub fn own_gold(answer: &str) -> String {
        format!("\\boxed{{{}}}", gold_source(answer))
    }
}

#[cfg(test)]
mod tests;
