//! Prompts of a task: rendered and encoded examples. Too long ones are skipped and counted.

mod bound;

use super::spelled::{SpelledTokens, spelled_in};
use crate::task::{Example, Permutation, PromptText, Split, Task, shuffled_index};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// An example with the tokens and text of its prompt. Ranks send only the prompt, which environments extend.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Prompt {
    /// The example, with its ground truth.
    #[serde(with = "only_prompt")]
    pub example: Example,
    /// Rendered text.
    pub text: String,
    /// Tokens of the text.
    pub tokens: Vec<u32>,
    /// Split and row of the example; `None` without a row.
    #[serde(skip)]
    pub row: Option<(Split, u64)>,
}

/// Serialization of an example's prompt.
mod only_prompt {
    use crate::task::Example;
    use firebrick_core::message::json;
    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(example: &Example, to: S) -> Result<S::Ok, S::Error> {
        json::serialize(&example.prompt, to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Example, D::Error> {
        Ok(Example { prompt: json::deserialize(from)?, ..Example::text("", "") })
    }
}

/// The prompts of a task for a model.
pub struct PromptDataset {
    task: Arc<dyn Task>,
    tokenizer: Arc<Tokenizer>,
    max_prompt: usize,
    kept: Kept,
    /// Training examples skipped for their length.
    pub filtered: u64,
    /// Validation prompts, without skipped ones.
    pub validation: Vec<Prompt>,
    /// Indices of the validation prompts in the split.
    held_out: Vec<u64>,
    /// Tokens of the longest kept prompt among the encoded ones.
    longest: usize,
    /// Maximum tokens of a drawn prompt.
    max_drawn: usize,
}

/// Training examples that can be drawn.
enum Kept {
    /// Examples of an endless task.
    Endless,
    /// Indices of examples that fit.
    Listed(Vec<u64>),
    /// All of a number of examples, of which a sample has been encoded: too long ones are found when they are drawn.
    Sampled(u64),
}

impl Kept {
    /// Number of examples; `None` of an endless task.
    fn len(&self) -> Option<u64> {
        match self {
            Self::Endless => None,
            Self::Listed(kept) => Some(kept.len() as u64),
            Self::Sampled(len) => Some(*len),
        }
    }

    /// Index in the split.
    fn index(&self, at: u64) -> u64 {
        match self {
            Self::Listed(kept) => kept[at as usize],
            Self::Endless | Self::Sampled(_) => at,
        }
    }
}

/// Draws of an endless task whose prompts are encoded before the first step.
const ENDLESS_SAMPLE: u64 = 256;

/// Examples of an endless task that may replace a too long one.
const MAX_REPLACEMENTS: u64 = 1000;

/// Bit position of the distance between an example of an endless task and its replacements.
const REPLACEMENT_SHIFT: u32 = 44;

/// Training rows that are encoded before the first step: of more, as many evenly spread ones.
pub const SAMPLED_ROWS: u64 = 10_000;

/// Difference between the seeds of replacements and of epochs.
const REPLACEMENT_SEED: u64 = 0x5EED_0F5A;

impl PromptDataset {
    /// Encodes the prompts of a finite task once, and keeps those of at most `max_prompt` tokens. Of more than
    /// [`SAMPLED_ROWS`], only a sample is encoded, and too long ones are skipped when they are drawn.
    ///
    /// # Errors
    /// As [`Self::held_out`]; `Error::Config` also if no training prompt is short enough.
    pub fn new(
        task: Arc<dyn Task>,
        tokenizer: Arc<Tokenizer>,
        max_prompt: usize,
        max_validation: Option<usize>,
    ) -> Result<Self> {
        let mut dataset = Self::held_out(task, tokenizer, max_prompt, max_validation)?;
        match dataset.task.len(Split::Train) {
            Some(len) => dataset.keep_fitting(len)?,
            None => dataset.sample_endless()?,
        }
        Ok(dataset)
    }

    /// Set of a validation prompt: the one that the task names, the row's `data_source` (verl), or the task.
    pub fn validation_set(&self, at: usize) -> &str {
        let named = self.held_out.get(at).and_then(|&index| self.task.validation_set(index));
        named.unwrap_or_else(|| {
            let prompt = self.validation.get(at);
            let source = prompt.and_then(|prompt| prompt.example.fields.get("data_source")?.as_str());
            source.filter(|source| !source.is_empty()).unwrap_or(self.task.name())
        })
    }

    /// A dataset of the validation split only: nothing can be drawn from it.
    ///
    /// # Errors
    /// `Error::Task` for a row that cannot be read, `Error::Model` for a prompt that cannot be rendered or encoded, and
    /// `Error::Config` if no validation prompt is short enough.
    pub fn held_out(
        task: Arc<dyn Task>,
        tokenizer: Arc<Tokenizer>,
        max_prompt: usize,
        max_validation: Option<usize>,
    ) -> Result<Self> {
        let len = task.len(Split::Validation).unwrap_or(0);
        let wanted = max_validation.map_or(len, |n| len.min(n as u64));
        let mut dataset = Self {
            task,
            tokenizer,
            max_prompt,
            kept: Kept::Listed(Vec::new()),
            filtered: 0,
            validation: Vec::new(),
            held_out: Vec::new(),
            longest: 0,
            max_drawn: max_prompt,
        };
        let mut spelled = SpelledTokens::default();
        for index in 0..wanted {
            let prompt = dataset.prompt(Split::Validation, index)?;
            spelled.add(spelled_in(&dataset.tokenizer, &prompt.example));
            if prompt.tokens.len() <= max_prompt {
                dataset.longest = dataset.longest.max(prompt.tokens.len());
                dataset.validation.push(prompt);
                dataset.held_out.push(index);
            }
        }
        if wanted > 0 && dataset.validation.is_empty() {
            return Err(Error::Config(format!(
                "all {wanted} validation prompts are longer than rollout.prompt_length = {max_prompt} tokens; raise it"
            )));
        }
        dataset.warn_of(&spelled, Split::Validation)?;
        let skipped = wanted as usize - dataset.validation.len();
        if skipped > 0 {
            tracing::warn!("skipped {skipped} of {wanted} validation prompts longer than rollout.prompt_length");
        }
        Ok(dataset)
    }

    /// Rejects an endless task if all prompts of a sample are too long; warns if some are.
    fn sample_endless(&mut self) -> Result<()> {
        self.kept = Kept::Endless;
        self.max_drawn = self.declared()?;
        let mut shortest = usize::MAX;
        let mut longer = 0;
        for index in 0..ENDLESS_SAMPLE {
            let tokens = self.prompt(Split::Train, index)?.tokens.len();
            shortest = shortest.min(tokens);
            longer += u64::from(tokens > self.max_prompt);
        }
        if shortest > self.max_prompt {
            return Err(self.all_longer(ENDLESS_SAMPLE, shortest));
        }
        if longer > 0 {
            tracing::warn!(
                "{longer} of {ENDLESS_SAMPLE} training prompts are longer than rollout.prompt_length, and such prompts are \
                 replaced when they are drawn"
            );
        }
        Ok(())
    }

    fn all_longer(&self, count: u64, shortest: usize) -> Error {
        Error::Config(format!(
            "all {count} training prompts are longer than rollout.prompt_length = {} tokens (the shortest has \
             {shortest}); raise it",
            self.max_prompt
        ))
    }

    fn keep_fitting(&mut self, len: u64) -> Result<()> {
        if len == 0 {
            return Err(Error::Config("the task has no training examples".into()));
        }
        let sample = sample(len);
        let encode = |&index: &u64| {
            let prompt = self.prompt(Split::Train, index)?;
            Ok((prompt.tokens.len(), spelled_in(&self.tokenizer, &prompt.example)))
        };
        let encoded: Vec<Result<(usize, BTreeSet<String>)>> = sample.par_iter().map(encode).collect();
        let (mut kept, mut shortest, mut spelled) = (Vec::new(), usize::MAX, SpelledTokens::default());
        for (&index, encoded) in sample.iter().zip(encoded) {
            let (tokens, special_tokens) = encoded?;
            spelled.add(special_tokens);
            shortest = shortest.min(tokens);
            if tokens <= self.max_prompt {
                self.longest = self.longest.max(tokens);
                kept.push(index);
            }
        }
        self.warn_of(&spelled, Split::Train)?;
        let count = sample.len() as u64;
        if kept.is_empty() {
            return Err(self.all_longer(count, shortest));
        }
        let longer = count - kept.len() as u64;
        if count < len {
            self.kept = Kept::Sampled(len);
            if longer > 0 {
                tracing::warn!(
                    "{longer} of {count} training rows, evenly spread over {len}, are longer than rollout.prompt_length; \
                 such rows are replaced when they are drawn"
                );
            }
        } else {
            self.filtered = longer;
            self.kept = Kept::Listed(kept);
        }
        Ok(())
    }

    /// Warns of special tokens in the text of a split's rows.
    fn warn_of(&self, spelled: &SpelledTokens, split: Split) -> Result<()> {
        if spelled.rows == 0 {
            return Ok(());
        }
        let special_tokens = self.task.example(split, 0)?.special_tokens();
        let what = match split {
            Split::Train => "training rows",
            Split::Validation => "validation rows",
        };
        if let Some(warning) = spelled.warning(what, "task.special_tokens", special_tokens) {
            tracing::warn!("{warning}");
        }
        Ok(())
    }

    /// The task, shared.
    pub fn shared_task(&self) -> Arc<dyn Task> {
        Arc::clone(&self.task)
    }

    /// Number of training examples that can be drawn; `None` of an endless task.
    pub fn examples(&self) -> Option<u64> {
        self.kept.len()
    }

    /// At most `count` evenly spread training prompts.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` if an example cannot be read or encoded.
    pub fn spread(&self, count: u64) -> Result<Vec<Prompt>> {
        let rows = spread(self.kept.len().unwrap_or(ENDLESS_SAMPLE), count).into_par_iter();
        let prompts = rows.map(|at| self.prompt(Split::Train, self.kept.index(at)));
        let prompts = prompts.collect::<Result<Vec<Prompt>>>()?;
        Ok(prompts.into_iter().filter(|prompt| prompt.tokens.len() <= self.max_drawn).collect())
    }

    /// The task.
    pub fn task(&self) -> &dyn Task {
        self.task.as_ref()
    }

    /// Prompt of the `draw`-th draw, in epochs shuffled by `seed`.
    ///
    /// # Errors
    /// As [`draw_as`](Self::draw_as).
    pub fn draw(&self, seed: u64, draw: u64) -> Result<Prompt> {
        self.draw_as(seed, draw, |prompt| Ok(Some(prompt)))
    }

    /// Result of `make` for the prompt of the `draw`-th draw. Another prompt, which depends only on the draw, replaces
    /// one that is too long or for which it returns `None`.
    ///
    /// # Errors
    /// `Error::Config` for a task without training examples, and if no example fits; `Error::Task` and `Error::Model`
    /// if an example cannot be read or encoded; those of `make`.
    pub fn draw_as<T>(&self, seed: u64, draw: u64, make: impl Fn(Prompt) -> Result<Option<T>>) -> Result<T> {
        let len = self.kept.len();
        let first =
            shuffled_index(len, seed, draw).ok_or_else(|| Error::Config("the task has no training examples".into()))?;
        let permutation = len.map(|len| Permutation::new(len, seed ^ REPLACEMENT_SEED, draw));
        let replacement =
            |at: u64| permutation.map_or(first ^ ((at + 1) << REPLACEMENT_SHIFT), |permutation| permutation.of(at));
        let mut first_tokens = None;
        for at in std::iter::once(first).chain((0..len.unwrap_or(MAX_REPLACEMENTS)).map(replacement)) {
            let prompt = self.prompt(Split::Train, self.kept.index(at))?;
            let tokens = prompt.tokens.len();
            first_tokens.get_or_insert(tokens);
            if tokens > self.max_drawn {
                continue;
            }
            if let Some(made) = make(prompt)? {
                return Ok(made);
            }
        }
        Err(Error::Config(format!(
            "training prompt {} has {} tokens, but rollout.prompt_length is {}, and no other prompt fits in its place; \
             raise it",
            self.kept.index(first),
            first_tokens.unwrap_or_default(),
            self.max_prompt
        )))
    }

    fn prompt(&self, split: Split, index: u64) -> Result<Prompt> {
        let example = self.task.example(split, index)?;
        let encoded = encode_prompt(&self.tokenizer, &example);
        let (text, tokens) = encoded.map_err(|error| error.in_row(&format_args!("{} prompt {index}", split.name())))?;
        if tokens.is_empty() {
            return Err(Error::Config(format!("{} prompt {index} is empty", split.name())));
        }
        Ok(Prompt { example, text, tokens, row: Some((split, index)) })
    }
}

/// Text of an example's prompt, by the chat template for a conversation, and its tokens.
pub(crate) fn encode_prompt(tokenizer: &Tokenizer, example: &Example) -> Result<(String, Vec<u32>)> {
    Ok(match &example.prompt {
        PromptText::Text(text) => (text.clone(), tokenizer.encode_text(text, &example.control, true)?),
        PromptText::Chat(messages) => tokenizer.encode_chat(messages, example.chat_options())?,
    })
}

/// Training rows whose prompts are encoded before the first step: all, or evenly spread ones.
pub(super) fn sample(len: u64) -> Vec<u64> {
    spread(len, SAMPLED_ROWS)
}

/// All of `len` rows, or `max` evenly spread ones.
fn spread(len: u64, max: u64) -> Vec<u64> {
    let count = len.min(max);
    let at = |i: u64| u128::from(i) * u128::from(len) / u128::from(count);
    (0..count).map(|i| at(i) as u64).collect()
}

#[cfg(test)]
mod tests;
