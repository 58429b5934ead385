//! The `math` rule: the answer of a completion, read as mathematics, against the ground truth.

use super::verdict::RuleVerdict;
use math_answer::{Checker, Comparison, EmptyGold, gold_source};

/// Scores a completion, or says why the ground truth cannot be read.
pub(super) fn judge(checker: Checker, answer: &str, text: &str) -> Result<RuleVerdict, String> {
    let verdict = checker
        .check(answer, text)
        .map_err(|EmptyGold| "the ground truth is empty; set `answer_extract` or `answer_field`".to_owned())?;
    let undecided = match verdict.comparison {
        Comparison::Undecided(reason) => Some(reason.to_owned()),
        Comparison::Equal | Comparison::Different => None,
    };
    let rule = RuleVerdict::of(verdict.is_equal(), verdict.answer.as_deref(), &verdict.gold);
    Ok(RuleVerdict { undecided, ..rule })
}

/// A completion with the ground truth as its only content.
pub(super) fn own_gold(answer: &str) -> String {
    format!("\\boxed{{{}}}", gold_source(answer))
}
