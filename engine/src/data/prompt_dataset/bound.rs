//! Upper bound on prompt lengths, computed before the first step.

use super::{Kept, Prompt, PromptDataset, encode_prompt};
use crate::Result;
use crate::task::{Environments, Example, Split};
use rayon::prelude::*;

/// Maximum rows that are all encoded to find the longest, in about a second. The limits depend only on the rows, so
/// that a run has the same plan whenever it starts.
const MAX_ROWS: u64 = 100_000;

/// Maximum bytes of text of these rows.
const MAX_BYTES: usize = 8 << 20;

/// Rows that are encoded together.
const BATCH: u64 = 4096;

impl PromptDataset {
    /// Maximum tokens of a drawn prompt: of the longest one if all are known, else `rollout.prompt_length`.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` if an example cannot be read or encoded.
    pub fn longest(&self) -> Result<usize> {
        if self.task.environments().is_some_and(Environments::adds_to_prompts) {
            return Ok(self.max_prompt);
        }
        match &self.kept {
            Kept::Listed(_) => Ok(self.longest),
            Kept::Endless => Ok(self.longest.max(self.max_drawn)),
            Kept::Sampled(rows) => {
                let longest = self.largest(|prompt| Ok(prompt.tokens.len()))?;
                if longest.is_none() && self.longest < self.max_prompt {
                    tracing::warn!(
                        "memory is planned for prompts of rollout.prompt_length = {} tokens, because {rows} rows are \
                         too many to encode all before the first step; the longest in a sample has {}",
                        self.max_prompt,
                        self.longest
                    );
                }
                Ok(longest.map_or(self.max_prompt, |longest| longest.max(self.longest)))
            }
        }
    }

    /// Maximum of `measure` over the training prompts that can be drawn; `None` for an endless task, and for more text
    /// than can be encoded before the first step.
    pub(in crate::data) fn largest(&self, measure: impl Fn(&Prompt) -> Result<usize> + Sync) -> Result<Option<usize>> {
        let (rows, max_bytes) = match &self.kept {
            Kept::Endless => return Ok(None),
            Kept::Sampled(rows) if *rows > MAX_ROWS => return Ok(None),
            Kept::Sampled(rows) => (*rows, MAX_BYTES),
            Kept::Listed(kept) => (kept.len() as u64, usize::MAX),
        };
        let measure = |at: u64| -> Result<[usize; 2]> {
            let prompt = self.prompt(Split::Train, self.kept.index(at))?;
            let bytes = prompt.text.len() + prompt.example.solution.as_ref().map_or(0, String::len);
            Ok([if prompt.tokens.len() <= self.max_prompt { measure(&prompt)? } else { 0 }, bytes])
        };
        let (mut largest, mut bytes) = (0, 0);
        for first in (0..rows).step_by(BATCH as usize) {
            let batch = (first..(first + BATCH).min(rows)).into_par_iter();
            for measured in batch.map(measure).collect::<Vec<_>>() {
                let [value, size] = measured?;
                largest = largest.max(value);
                bytes += size;
            }
            if bytes > max_bytes {
                return Ok(None);
            }
        }
        Ok(Some(largest))
    }

    /// Maximum tokens of a prompt of an endless task, from its longest example if it has one.
    pub(super) fn declared(&self) -> Result<usize> {
        let longest = self.longest_example()?;
        let max = longest.map(|prompt| self.tokenizer.most_tokens(&prompt.text, prompt.tokens.len()));
        Ok(max.map_or(self.max_prompt, |max| max.min(self.max_prompt)))
    }

    /// The longest example of an endless task as a prompt, if the task names it.
    pub(in crate::data) fn longest_example(&self) -> Result<Option<Prompt>> {
        let prompt = |example: Example| {
            let (text, tokens) = encode_prompt(&self.tokenizer, &example)?;
            Ok(Prompt { example, text, tokens, row: None })
        };
        self.task.longest().map(prompt).transpose()
    }
}
