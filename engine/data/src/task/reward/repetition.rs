//! A penalty for saying the same again.

use super::config::RepetitionUnit;
use crate::task::TaskError;
use std::collections::HashSet;
use std::hash::Hash;

/// The share of n-grams that stood before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repetition {
    size: usize,
    unit: RepetitionUnit,
}

/// Longest n-grams: the work grows with their length.
const MAX_SIZE: usize = 64;

impl Repetition {
    /// N-grams of `size` words or tokens, `setting` being the reward's name in messages.
    pub fn new(size: usize, unit: RepetitionUnit, setting: &str) -> Result<Self, TaskError> {
        if !(1..=MAX_SIZE).contains(&size) {
            let detail = format!("expected 1 to {MAX_SIZE}, found {size}");
            return Err(TaskError::config(format!("{setting}.ngram_size"), detail));
        }
        Ok(Self { size, unit })
    }

    /// `−(1 − different n-grams / n-grams)`; 0 of a text that is shorter than one.
    pub fn penalty(self, text: &str, tokens: &[u32]) -> f64 {
        match self.unit {
            RepetitionUnit::Words => {
                let lower = text.to_lowercase();
                self.of(&lower.split_whitespace().collect::<Vec<_>>())
            }
            RepetitionUnit::Tokens => self.of(tokens),
        }
    }

    fn of<T: Hash + Eq>(self, parts: &[T]) -> f64 {
        let all = parts.windows(self.size);
        let count = all.len();
        if count == 0 {
            return 0.0;
        }
        let different: HashSet<&[T]> = all.collect();
        different.len() as f64 / count as f64 - 1.0
    }
}
