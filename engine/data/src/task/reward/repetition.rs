//! A penalty for repetition.

use super::Rule;
use super::config::RepetitionUnit;
use crate::task::Score;
use std::collections::HashSet;
use std::hash::Hash;

/// The penalty for repeated n-grams of `size` words or tokens.
pub(super) fn rule(size: usize, unit: RepetitionUnit) -> Rule {
    Rule::of_completion(move |case| {
        let penalty = match unit {
            RepetitionUnit::Words => penalty(&case.text.to_lowercase().split_whitespace().collect::<Vec<_>>(), size),
            RepetitionUnit::Tokens => penalty(case.completion.tokens, size),
        };
        Ok(Score::value(penalty))
    })
}

/// `−(1 − different n-grams / n-grams)`; 0 of a text that is shorter than one.
fn penalty<T: Hash + Eq>(parts: &[T], size: usize) -> f64 {
    let ngrams = parts.windows(size);
    let count = ngrams.len();
    if count == 0 {
        return 0.0;
    }
    let different: HashSet<&[T]> = ngrams.collect();
    different.len() as f64 / count as f64 - 1.0
}
