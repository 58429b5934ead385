//! A completion to be scored, and its reward by the task's rules.

use crate::data::Prompt;
use crate::task::{Completion, Reward, Split, Task};
use crate::turns::{Outcome, opens_thought};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::Message;
use firebrick_sampler::{FinishReason, Sample, SamplingParams, text_before_stop};
use serde_json::Value;

/// A completion to be scored.
#[derive(Clone, Debug)]
pub struct Answer<'a> {
    /// Its prompt.
    pub prompt: &'a Prompt,
    /// Text of all turns, without special tokens.
    pub text: String,
    /// Text of the last turn, which rules score, if there are several.
    pub last_turn: Option<String>,
    /// Its messages, with an environment.
    pub turns: &'a [Message],
    /// Recipe by which a reward function copies the environment's object, if there is one.
    pub environment: Option<&'a Value>,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// True if it ended by itself.
    pub finished: bool,
    /// True if it, or its last turn, ends inside a thought.
    pub in_thought: bool,
    /// Identity of the sample, for messages.
    pub id: CompletionId,
}

/// Identity of a sample, for messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompletionId {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    pub prompt_index: u64,
    /// Index of the completion in its group.
    pub sample: usize,
}

impl<'a> Answer<'a> {
    /// A sample of one of the prompts with its text and the outcome of its environment, if any. `first` is the id of
    /// the first prompt's first completion.
    pub(crate) fn new(
        prompts: &'a [Prompt],
        sample: &'a Sample,
        outcome: Option<&'a Outcome>,
        text: String,
        first: CompletionId,
    ) -> Self {
        Self {
            prompt: outcome.and_then(|outcome| outcome.prompt.as_deref()).unwrap_or(&prompts[sample.request]),
            text,
            last_turn: None,
            turns: outcome.map_or(&[][..], |outcome| outcome.turns.as_slice()),
            environment: outcome.and_then(|outcome| outcome.object.as_ref()),
            tokens: &sample.tokens,
            finished: sample.finish == FinishReason::Stop,
            in_thought: false,
            id: CompletionId {
                prompt_index: first.prompt_index + sample.request as u64,
                sample: sample.sample,
                ..first
            },
        }
    }

    /// A sample of one of the prompts with its decoded text, and that of its last turn if it has several, without stop
    /// strings.
    ///
    /// # Errors
    /// `Error::Model` if tokens cannot be decoded.
    pub(crate) fn decoded(
        prompts: &'a [Prompt],
        sample: &'a Sample,
        outcome: Option<&'a Outcome>,
        first: CompletionId,
        (tokenizer, sampling): (&Tokenizer, &SamplingParams),
    ) -> Result<Self> {
        let (tokens, turn) = (&sample.tokens, sample.turn_start());
        let text = text_before_stop(tokenizer, sampling, tokens, turn)?;
        let last = (!sample.inserted.is_empty()).then(|| text_before_stop(tokenizer, sampling, &tokens[turn..], 0));
        let answer = Self::new(prompts, sample, outcome, text, first);
        let in_thought = ends_in_thought(tokenizer, answer.prompt, sample)?;
        Ok(Self { last_turn: last.transpose()?, in_thought, ..answer })
    }

    /// Reward by the task's rules for training or for validation.
    ///
    /// # Errors
    /// `Error::Reward` if the task cannot score it, with prompt and completion.
    pub fn by_rules(&self, task: &dyn Task, max_tokens: usize, purpose: Split) -> Result<Reward> {
        let completion = Completion {
            text: self.last_turn.as_deref().unwrap_or(&self.text),
            tokens: self.tokens,
            finished: self.finished,
            max_tokens,
            in_thought: self.in_thought,
        };
        let example = &self.prompt.example;
        let reward = match purpose {
            Split::Train => task.reward(example, &completion),
            Split::Validation => task.validation_reward(example, &completion),
        };
        let reward = reward.map_err(|error| self.failed(error.to_string()))?;
        // training skips the step of an infinite one
        if reward.total.is_nan() || purpose == Split::Validation && reward.total.is_infinite() {
            return Err(self.failed(format!("the reward is {}; rewards must be finite", reward.total)));
        }
        Ok(reward)
    }

    /// Error of a completion that cannot be scored.
    pub(crate) fn failed(&self, reason: String) -> Error {
        self.error(reason, false)
    }

    /// Error of the user's code, which raised or returned an invalid reward.
    pub(crate) fn user_error(&self, reason: String) -> Error {
        self.error(reason, true)
    }

    fn error(&self, reason: String, users: bool) -> Error {
        Error::Reward {
            step: self.id.step,
            prompt_index: self.id.prompt_index,
            row: self.prompt.row,
            sample: self.id.sample,
            users,
            prompt: self.prompt.text.clone(),
            completion: self.text.clone(),
            reason,
        }
    }
}

/// Returns true if the last turn of a completion ends inside a thought, opened by the text before it or by its
/// beginning. Tags that are special tokens count too.
fn ends_in_thought(tokenizer: &Tokenizer, prompt: &Prompt, sample: &Sample) -> Result<bool> {
    let turn = tokenizer.decode(&sample.tokens[sample.turn_start()..], false)?;
    if turn.contains("</think>") {
        return Ok(false);
    }
    Ok(opens_thought(tokenizer, &prompt.text, sample)? || turn.trim_start().starts_with("<think>"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::Example;
    use std::ops::Range;

    #[test]
    fn a_completion_ends_inside_a_thought_that_what_is_before_it_or_its_beginning_opens() {
        let tokenizer = Tokenizer::characters("<>/think 14\n").expect("a tokenizer");
        let ends = |prompt: &str, completion: &str, between: Option<Range<usize>>| {
            let encode = |text: &str| tokenizer.encode(text, false).expect("tokens");
            let prompt =
                Prompt { example: Example::text(prompt, ""), text: prompt.into(), tokens: encode(prompt), row: None };
            let sample = Sample {
                request: 0,
                sample: 0,
                tokens: encode(completion),
                inserted: between.into_iter().collect(),
                logps: Vec::new(),
                full_logps: Vec::new(),
                finish: FinishReason::Length,
                routes: None,
            };
            ends_in_thought(&tokenizer, &prompt, &sample).expect("decoded")
        };
        for (prompt, completion, expected) in [
            ("1 <think>", "4", true),
            ("1 <think>\n", "4", true),
            ("1 <think>\n", "4</think> 1", false),
            ("1 <think> </think>\n", "4", false),
            ("1", "<think>4", true),
            ("1", "\n<think>4 </think>", false),
            ("1 <think> 4", "4", false),
            ("1", "4 <think> 1", false),
        ] {
            assert_eq!(ends(prompt, completion, None), expected, "{prompt:?}, {completion:?}");
        }
        // of several turns the last one counts, and what the template writes before it
        let turns = "4</think> 1 <think>\n14";
        assert!(ends("1 <think>", turns, Some(10..20)));
        assert!(!ends("1 <think>", "4 1\n14", Some(1..4)));
    }
}
