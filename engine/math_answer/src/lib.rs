//! Comparison of mathematical answers of language models and data sets, in LaTeX or plain text.
//!
//! ```
//! use math_answer::{AnswerSource, Checker};
//!
//! let checker = Checker { source: AnswerSource::Any, tolerance: 0.0 };
//! let verdict = checker.check("#### 1/2", r"So the answer is \boxed{\frac{2}{4}}.").unwrap();
//! assert!(verdict.is_equal());
//! ```
//!
//! An answer is found in its text ([`extract`]), parsed, and compared exactly: fractions, roots, complex numbers, units,
//! percentages, intervals, sets, tuples, matrices; expressions with variables at random points. Everything below an
//! answer's first 2,000 bytes is bounded: tokens, nesting, bits of exact numbers, points of a numeric comparison. No
//! text makes it panic or run long. [`Arithmetic`] evaluates plain sums and products alone.

#![forbid(unsafe_code)]

mod arithmetic;
mod brackets;
mod collection;
mod compare;
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

use compare::compare;
use parsed::Parsed;

pub use arithmetic::{Arithmetic, Evaluated};
pub use compare::Comparison;
pub use extract::{AnswerSource, answer_line, concluded, extract, gold_source, last_boxed};

/// Compares the answers of texts with ground truths.
#[derive(Clone, Copy, Debug)]
pub struct Checker {
    /// The searched places of a text's answer.
    pub source: AnswerSource,
    /// Largest relative difference of two numbers that counts as equal; 0 compares exactly.
    pub tolerance: f64,
}

/// A ground truth without any text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmptyGold;

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Result of the comparison.
    pub comparison: Comparison,
    /// The parsed answer; `None` if the text has none.
    pub answer: Option<String>,
    /// The parsed ground truth.
    pub gold: String,
}

impl Verdict {
    /// Returns true if the answer equals the ground truth.
    pub fn is_equal(&self) -> bool {
        self.comparison == Comparison::Equal
    }
}

impl Checker {
    /// The answer of a text in a normal form: equal numbers are equal strings.
    pub fn read(self, text: &str) -> Option<String> {
        extract(text, self.source).map(|answer| Parsed::new(answer).to_string())
    }

    /// Compares the answer of a text with the ground truth.
    ///
    /// # Errors
    /// [`EmptyGold`] for a ground truth without any text.
    pub fn check(self, gold: &str, text: &str) -> Result<Verdict, EmptyGold> {
        let source = gold_source(gold);
        if source.is_empty() {
            return Err(EmptyGold);
        }
        let gold = Parsed::new(source);
        let answer = extract(text, self.source).map(Parsed::new);
        let comparison = answer.as_ref().map_or(Comparison::Different, |answer| compare(&gold, answer, self.tolerance));
        Ok(Verdict { comparison, answer: answer.map(|answer| answer.to_string()), gold: gold.to_string() })
    }
}

#[cfg(test)]
mod tests;
