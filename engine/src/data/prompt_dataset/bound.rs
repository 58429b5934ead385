//! The longest prompt, known before the first step: no prompt that is drawn later has more tokens.

use super::{Kept, Prompt, PromptDataset, encode_prompt};
use crate::Result;
use crate::task::{Example, Split};
use rayon::prelude::*;

/// Rows that are all encoded to find the longest, and bytes of what is encoded, at most: as much as takes about a
/// second. It follows from the rows alone, so that a run has the same plan whenever it starts.
const MOST_ROWS: u64 = 100_000;
const MOST_BYTES: usize = 8 << 20;

/// Rows that are encoded together.
const BATCH: u64 = 4096;

impl PromptDataset {
    /// Most tokens of a prompt that can be drawn: of the longest one where all are known, else
    /// `rollout.prompt_length`.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` where an example cannot be read or encoded.
    pub fn longest(&self) -> Result<usize> {
        let adds = |own: &dyn crate::task::Environments| own.adds_to_prompts();
        if self.task.environments().is_some_and(adds) {
            return Ok(self.max_prompt);
        }
        match &self.kept {
            Kept::Listed(_) => Ok(self.longest),
            Kept::Endless => Ok(self.longest.max(self.most)),
            Kept::Sampled(rows) => {
                let found = self.largest(|prompt| Ok(prompt.tokens.len()))?;
                if found.is_none() && self.longest < self.max_prompt {
                    tracing::warn!(
                        "memory is planned for prompts of rollout.prompt_length = {} tokens, because {rows} rows are \
                         too many to encode all before the first step; the longest in a sample has {}",
                        self.max_prompt,
                        self.longest
                    );
                }
                Ok(found.map_or(self.max_prompt, |found| found.max(self.longest)))
            }
        }
    }

    /// The largest of what `measure` gives of the training prompts that can be drawn; `None` of an endless task, and of
    /// more text than can be encoded before the first step.
    pub(in crate::data) fn largest(&self, measure: impl Fn(&Prompt) -> Result<usize> + Sync) -> Result<Option<usize>> {
        let (rows, most_bytes) = match &self.kept {
            Kept::Endless => return Ok(None),
            Kept::Sampled(rows) if *rows > MOST_ROWS => return Ok(None),
            Kept::Sampled(rows) => (*rows, MOST_BYTES),
            Kept::Listed(kept) => (kept.len() as u64, usize::MAX),
        };
        let one = |at: u64| -> Result<[usize; 2]> {
            let prompt = self.prompt(Split::Train, self.kept.index(at))?;
            let bytes = prompt.text.len() + prompt.example.solution.as_ref().map_or(0, String::len);
            let found = if prompt.tokens.len() <= self.max_prompt { measure(&prompt)? } else { 0 };
            Ok([found, bytes])
        };
        let (mut largest, mut bytes) = (0, 0);
        for first in (0..rows).step_by(BATCH as usize) {
            let all: Vec<Result<[usize; 2]>> = (first..(first + BATCH).min(rows)).into_par_iter().map(one).collect();
            for own in all {
                let own = own?;
                largest = largest.max(own[0]);
                bytes += own[1];
            }
            if bytes > most_bytes {
                return Ok(None);
            }
        }
        Ok(Some(largest))
    }

    /// Most tokens of a prompt of an endless task, as far as it says.
    pub(super) fn declared(&self) -> Result<usize> {
        let most = self.longest_example()?.map(|own| self.tokenizer.most_tokens(&own.text, own.tokens.len()));
        Ok(most.map_or(self.max_prompt, |most| most.min(self.max_prompt)))
    }

    /// The longest example of an endless task as a prompt, where the task says which that is.
    pub(in crate::data) fn longest_example(&self) -> Result<Option<Prompt>> {
        let prompt = |example: Example| {
            let (text, tokens) = encode_prompt(&self.tokenizer, &example)?;
            Ok(Prompt { example, text, tokens, row: None })
        };
        self.task.longest().map(prompt).transpose()
    }
}
