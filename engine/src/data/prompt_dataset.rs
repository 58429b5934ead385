//! A task's examples as token prompts: rendered, encoded, over-long ones left out and counted.

mod bound;

use super::spelled::{SpelledTokens, spelled_in};
use crate::task::{Example, Permutation, PromptText, Split, Task, shuffled_index};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;

/// An example with its prompt's tokens and text. What ranks send of it is the prompt, to which environments add.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Prompt {
    /// Where it came from, with its ground truth.
    #[serde(with = "sent")]
    pub example: Example,
    /// The prompt as text, rendered.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The split that it is of, and its row there; none of one that was made by hand.
    #[serde(skip)]
    pub row: Option<(Split, u64)>,
}

/// What ranks send of an example.
mod sent {
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

/// A task made ready for a model.
pub struct PromptDataset {
    task: Arc<dyn Task>,
    tokenizer: Arc<Tokenizer>,
    max_prompt: usize,
    /// What can be drawn.
    kept: Kept,
    /// Training examples left out for their length.
    pub filtered: u64,
    /// Validation prompts, those left out apart.
    pub validation: Vec<Prompt>,
    /// Their indices in the split.
    held_out: Vec<u64>,
    /// Tokens of the longest prompt that was kept, among those that were encoded.
    longest: usize,
    /// Most tokens of a prompt that is drawn.
    most: usize,
}

/// The training examples that can be drawn.
enum Kept {
    /// Those of an endless task.
    Endless,
    /// The indices that fit.
    Listed(Vec<u64>),
    /// All of so many, of which a sample has been encoded: one that does not fit is found when it is drawn.
    Sampled(u64),
}

impl Kept {
    /// Their number; `None` of an endless task.
    fn len(&self) -> Option<u64> {
        match self {
            Self::Endless => None,
            Self::Listed(kept) => Some(kept.len() as u64),
            Self::Sampled(len) => Some(*len),
        }
    }

    /// The index in the split.
    fn index(&self, at: u64) -> u64 {
        match self {
            Self::Listed(kept) => kept[at as usize],
            Self::Endless | Self::Sampled(_) => at,
        }
    }
}

/// Draws of an endless task whose prompts are looked at before the first step.
const GLANCE: u64 = 256;

/// Examples of an endless task that are tried in place of one that is too long, and how far they are from it.
const TRIES: u64 = 1000;
const APART: u32 = 44;

/// Training rows that are encoded before the first step: of more, as many evenly spread ones.
pub const SAMPLED_ROWS: u64 = 10_000;

/// Set apart from the seeds of epochs: what is drawn where an example does not fit.
const SPARE: u64 = 0x5EED_0F5A;

impl PromptDataset {
    /// Encodes a finite task's prompts once, and keeps those of at most `max_prompt` tokens. Of more than
    /// [`SAMPLED_ROWS`], so many are encoded, and a longer one is left out when it is drawn.
    ///
    /// # Errors
    /// As [`Self::held_out`]; `Error::Config` too where no training prompt is short enough.
    pub fn new(
        task: Arc<dyn Task>,
        tokenizer: Arc<Tokenizer>,
        max_prompt: usize,
        max_validation: Option<usize>,
    ) -> Result<Self> {
        let mut dataset = Self::held_out(task, tokenizer, max_prompt, max_validation)?;
        match dataset.task.len(Split::Train) {
            Some(len) => dataset.keep_fitting(len)?,
            None => dataset.glance_at_endless()?,
        }
        Ok(dataset)
    }

    /// The set that one of the validation prompts belongs to: the one that the task names, the row's `data_source`
    /// (verl), or the task.
    #[must_use]
    pub fn validation_set(&self, at: usize) -> &str {
        let named = self.held_out.get(at);
        let named = named.and_then(|&index| self.task.validation_set(index));
        named.unwrap_or_else(|| {
            let fields = self.validation.get(at).map(|own| &own.example.fields);
            let source = fields.and_then(|fields| fields.get("data_source"));
            let source = source.and_then(Value::as_str);
            source.filter(|source| !source.is_empty()).unwrap_or(self.task.name())
        })
    }

    /// The same with the validation split alone: nothing can be drawn from it.
    ///
    /// # Errors
    /// `Error::Task` for a row that cannot be read, `Error::Model` for a prompt that cannot be rendered or encoded, and
    /// `Error::Config` where no validation prompt is short enough.
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
            most: max_prompt,
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
        let dropped = wanted as usize - dataset.validation.len();
        if dropped > 0 {
            tracing::warn!("skipped {dropped} of {wanted} validation prompts longer than rollout.prompt_length");
        }
        Ok(dataset)
    }

    /// Refuses an endless task all of whose first prompts are too long; fewer are told of.
    fn glance_at_endless(&mut self) -> Result<()> {
        self.kept = Kept::Endless;
        self.most = self.declared()?;
        let mut shortest = usize::MAX;
        let mut longer = 0;
        for index in 0..GLANCE {
            let tokens = self.prompt(Split::Train, index)?.tokens.len();
            shortest = shortest.min(tokens);
            longer += u64::from(tokens > self.max_prompt);
        }
        if shortest > self.max_prompt {
            return Err(self.all_longer(GLANCE, shortest));
        }
        if longer > 0 {
            tracing::warn!(
                "{longer} of {GLANCE} training prompts are longer than rollout.prompt_length, and such prompts are \
                 replaced when they are drawn"
            );
        }
        Ok(())
    }

    fn all_longer(&self, looked: u64, shortest: usize) -> Error {
        Error::Config(format!(
            "all {looked} training prompts are longer than rollout.prompt_length = {} tokens (the shortest has \
             {shortest}); raise it",
            self.max_prompt
        ))
    }

    fn keep_fitting(&mut self, len: u64) -> Result<()> {
        if len == 0 {
            return Err(Error::Config("the task has no training examples".into()));
        }
        let sample = sample(len);
        let look = |&index: &u64| {
            let prompt = self.prompt(Split::Train, index)?;
            Ok((prompt.tokens.len(), spelled_in(&self.tokenizer, &prompt.example)))
        };
        let looks: Vec<Result<(usize, BTreeSet<String>)>> = sample.par_iter().map(look).collect();
        let (mut kept, mut shortest, mut spelled) = (Vec::new(), usize::MAX, SpelledTokens::default());
        for (&index, found) in sample.iter().zip(looks) {
            let (tokens, own) = found?;
            spelled.add(own);
            shortest = shortest.min(tokens);
            if tokens <= self.max_prompt {
                self.longest = self.longest.max(tokens);
                kept.push(index);
            }
        }
        self.warn_of(&spelled, Split::Train)?;
        let looked = sample.len() as u64;
        if kept.is_empty() {
            return Err(self.all_longer(looked, shortest));
        }
        let longer = looked - kept.len() as u64;
        if looked < len {
            self.kept = Kept::Sampled(len);
            if longer > 0 {
                tracing::warn!(
                    "{longer} of {looked} training rows, evenly spread over {len}, are longer than rollout.prompt_length; \
                 such rows are replaced when they are drawn"
                );
            }
        } else {
            self.filtered = longer;
            self.kept = Kept::Listed(kept);
        }
        Ok(())
    }

    /// Reports special tokens that the rows of a split spell.
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
    #[must_use]
    pub fn shared_task(&self) -> Arc<dyn Task> {
        Arc::clone(&self.task)
    }

    /// Training examples that can be drawn; `None` of an endless task.
    #[must_use]
    pub fn examples(&self) -> Option<u64> {
        self.kept.len()
    }

    /// Training prompts that can be drawn: evenly spread ones, so many at most.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` where an example cannot be read or encoded.
    pub fn spread(&self, most: u64) -> Result<Vec<Prompt>> {
        let rows = spread(self.kept.len().unwrap_or(GLANCE), most).into_par_iter();
        let prompts = rows.map(|at| self.prompt(Split::Train, self.kept.index(at)));
        let prompts = prompts.collect::<Result<Vec<Prompt>>>()?;
        Ok(prompts.into_iter().filter(|prompt| prompt.tokens.len() <= self.most).collect())
    }

    /// The task.
    #[must_use]
    pub fn task(&self) -> &dyn Task {
        self.task.as_ref()
    }

    /// The prompt of the `draw`-th draw: epochs shuffled by `seed`, the same for the same draw always.
    ///
    /// # Errors
    /// As [`draw_as`](Self::draw_as).
    pub fn draw(&self, seed: u64, draw: u64) -> Result<Prompt> {
        self.draw_as(seed, draw, |prompt| Ok(Some(prompt)))
    }

    /// What `make` makes of the prompt of the `draw`-th draw. In place of a prompt that is too long, or of which it
    /// makes nothing, there is another one, found by the draw's number alone.
    ///
    /// # Errors
    /// `Error::Config` for a task without training examples, and where no example will do; `Error::Task` and
    /// `Error::Model` where an example cannot be read or encoded; those of `make`.
    pub fn draw_as<T>(&self, seed: u64, draw: u64, make: impl Fn(Prompt) -> Result<Option<T>>) -> Result<T> {
        let len = self.kept.len();
        let first =
            shuffled_index(len, seed, draw).ok_or_else(|| Error::Config("the task has no training examples".into()))?;
        let others = len.map(|len| Permutation::new(len, seed ^ SPARE, draw));
        let other = |at: u64| others.map_or(first ^ ((at + 1) << APART), |own| own.of(at));
        let mut found = None;
        for at in std::iter::once(first).chain((0..len.unwrap_or(TRIES)).map(other)) {
            let prompt = self.prompt(Split::Train, self.kept.index(at))?;
            let tokens = prompt.tokens.len();
            found.get_or_insert(tokens);
            if tokens > self.most {
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
            found.unwrap_or_default(),
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

/// The text of an example's prompt, by the chat template where it is a conversation, and its tokens.
pub(crate) fn encode_prompt(tokenizer: &Tokenizer, example: &Example) -> Result<(String, Vec<u32>)> {
    Ok(match &example.prompt {
        PromptText::Text(text) => (text.clone(), tokenizer.encode_text(text, &example.control, true)?),
        PromptText::Chat(messages) => tokenizer.encode_chat(messages, example.chat_options())?,
    })
}

/// The training rows whose prompts are encoded before the first step: all, or evenly spread ones.
pub(super) fn sample(len: u64) -> Vec<u64> {
    spread(len, SAMPLED_ROWS)
}

/// All of so many rows, or at most `most` evenly spread ones.
fn spread(len: u64, most: u64) -> Vec<u64> {
    let count = len.min(most);
    let at = |i: u64| u128::from(i) * u128::from(len) / u128::from(count);
    (0..count).map(|i| at(i) as u64).collect()
}

#[cfg(test)]
mod tests;
