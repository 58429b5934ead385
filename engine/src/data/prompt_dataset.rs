//! A task's examples as token prompts: rendered, encoded, over-long ones left out and counted.

use crate::task::{Example, PromptText, Split, Task, shuffled_index};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use std::sync::Arc;

/// An example with its prompt's tokens and text.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Where it came from, with its ground truth.
    pub example: Example,
    /// The prompt as text, rendered.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

/// A task made ready for a model.
pub struct PromptDataset {
    task: Arc<dyn Task>,
    tokenizer: Arc<Tokenizer>,
    max_prompt: usize,
    /// Training indices that fit; `None` for an endless task.
    kept: Option<Vec<u64>>,
    /// Training examples left out for their length.
    pub filtered: u64,
    /// Validation prompts, those left out apart.
    pub validation: Vec<Prompt>,
    /// Tokens of the longest prompt that was kept.
    longest: usize,
}

/// Draws of an endless task that are looked at for the length of its prompts.
const GLANCE: u64 = 256;

impl PromptDataset {
    /// Encodes a finite task's prompts once, and keeps those of at most `max_prompt` tokens.
    pub fn new(
        task: Arc<dyn Task>,
        tokenizer: Arc<Tokenizer>,
        max_prompt: usize,
        max_validation: Option<usize>,
    ) -> Result<Self> {
        let mut dataset = Self::held_out(task, tokenizer, max_prompt, max_validation)?;
        dataset.kept = None;
        if let Some(len) = dataset.task.len(Split::Train) {
            dataset.keep_fitting(len)?;
        }
        Ok(dataset)
    }

    /// The same with the validation split alone: nothing can be drawn from it.
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
            kept: Some(Vec::new()),
            filtered: 0,
            validation: Vec::new(),
            longest: 0,
        };
        for index in 0..wanted {
            let prompt = dataset.prompt(Split::Validation, index)?;
            if prompt.tokens.len() <= max_prompt {
                dataset.longest = dataset.longest.max(prompt.tokens.len());
                dataset.validation.push(prompt);
            }
        }
        if wanted > 0 && dataset.validation.is_empty() {
            return Err(Error::Config(format!(
                "all {wanted} validation prompts are longer than rollout.prompt_length = {max_prompt} tokens; raise it"
            )));
        }
        let dropped = wanted as usize - dataset.validation.len();
        if dropped > 0 {
            tracing::warn!(
                "skipped {dropped} of {wanted} validation prompts longer than rollout.prompt_length"
            );
        }
        Ok(dataset)
    }

    fn keep_fitting(&mut self, len: u64) -> Result<()> {
        let mut kept = Vec::new();
        let mut shortest = usize::MAX;
        for index in 0..len {
            let tokens = self.prompt(Split::Train, index)?.tokens.len();
            shortest = shortest.min(tokens);
            if tokens <= self.max_prompt {
                self.longest = self.longest.max(tokens);
                kept.push(index);
            }
        }
        if len == 0 {
            return Err(Error::Config("the task has no training examples".into()));
        }
        if kept.is_empty() {
            return Err(Error::Config(format!(
                "all {len} training prompts are longer than rollout.prompt_length = {} tokens (the shortest has {shortest}); \
                 raise it",
                self.max_prompt
            )));
        }
        self.filtered = len - kept.len() as u64;
        self.kept = Some(kept);
        Ok(())
    }

    /// Tokens of the longest prompt; of an endless task, of the longest in a first look.
    pub fn longest(&self) -> Result<usize> {
        let mut longest = self.longest;
        if self.kept.is_none() {
            for index in 0..GLANCE {
                let tokens = self.prompt(Split::Train, index)?.tokens.len();
                longest = longest.max(tokens.min(self.max_prompt));
            }
        }
        Ok(longest)
    }

    /// Training prompts for a look at their lengths: all of a finite task, some of an endless one.
    pub fn glance(&self) -> impl Iterator<Item = Result<Prompt>> + '_ {
        let kept = self.kept.as_deref();
        let number = kept.map_or(GLANCE, |kept| kept.len() as u64);
        (0..number).map(move |i| {
            let index = kept.map_or(i, |kept| kept[i as usize]);
            self.prompt(Split::Train, index)
        })
    }

    /// The task, shared.
    #[must_use]
    pub fn shared_task(&self) -> Arc<dyn Task> {
        Arc::clone(&self.task)
    }

    /// Training examples that can be drawn; `None` of an endless task.
    #[must_use]
    pub fn examples(&self) -> Option<u64> {
        self.kept.as_ref().map(|kept| kept.len() as u64)
    }

    /// The task.
    #[must_use]
    pub fn task(&self) -> &dyn Task {
        self.task.as_ref()
    }

    /// The prompt of the `draw`-th draw: epochs shuffled by `seed`, the same for the same draw always.
    pub fn draw(&self, seed: u64, draw: u64) -> Result<Prompt> {
        let len = self.kept.as_ref().map(|k| k.len() as u64);
        let index = shuffled_index(len, seed, draw)
            .ok_or_else(|| Error::Config("the task has no training examples".into()))?;
        let index = self
            .kept
            .as_ref()
            .map_or(index, |kept| kept[index as usize]);
        let prompt = self.prompt(Split::Train, index)?;
        if prompt.tokens.len() > self.max_prompt {
            return Err(Error::Config(format!(
                "training prompt {index} has {} tokens, but rollout.prompt_length is {}; raise it",
                prompt.tokens.len(),
                self.max_prompt
            )));
        }
        Ok(prompt)
    }

    fn prompt(&self, split: Split, index: u64) -> Result<Prompt> {
        let example = self.task.example(split, index)?;
        let (text, tokens) = match &example.prompt {
            PromptText::Text(text) => (text.clone(), self.tokenizer.encode(text, true)?),
            PromptText::Chat(messages) => {
                let text = self.tokenizer.render_chat(messages, true)?;
                // the template spells the special tokens out
                let tokens = self.tokenizer.encode(&text, false)?;
                (text, tokens)
            }
        };
        if tokens.is_empty() {
            return Err(Error::Config(format!(
                "{} prompt {index} is empty",
                split.name()
            )));
        }
        Ok(Prompt {
            example,
            text,
            tokens,
        })
    }
}
