//! Rules that read the answer of a completion as mathematics.

use super::{Case, Rule};
use crate::task::{Reading, Score};
use math_answer::{AnswerSource, Checker, Comparison, EmptyGold, gold_source};
use std::borrow::Cow;

/// The rule of an answer from this source. TRL's also reads an unfinished thought.
pub(super) fn math(source: AnswerSource, tolerance: f64) -> Rule {
    let checker = Checker { source, tolerance };
    let rule = Rule::of_answer(move |case| score(checker, case))
        .reading(move |text| checker.read(text).map(Cow::Owned))
        .gold(|answer| format!("\\boxed{{{}}}", gold_source(answer)));
    if source == AnswerSource::Any { rule.after_thought() } else { rule }
}

fn score(checker: Checker, case: &Case<'_>) -> Result<Score, String> {
    let verdict = checker
        .check(case.answer, case.text)
        .map_err(|EmptyGold| "the ground truth is empty; set `answer_extract` or `answer_field`".to_owned())?;
    let undecided = match verdict.comparison {
        Comparison::Undecided(reason) => Some(reason.to_owned()),
        Comparison::Equal | Comparison::Different => None,
    };
    let score = Score::compared(verdict.is_equal(), verdict.answer.as_deref(), &verdict.gold);
    Ok(Score { reading: score.reading.map(|reading| Reading { undecided, ..reading }), ..score })
}
