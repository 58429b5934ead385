//! Input of a reward model: token ids of a prompt with its completion, and the limits on them.

use crate::data::Prompt;
use crate::hub::{ModelFiles, model_folder};
use crate::plan::MemoryConfig;
use crate::task::{PromptText, RewardInput, RewardModelConfig};
use crate::{Error, Result};
use firebrick_models::tokenizer::{ChatOptions, Control, Message};
use firebrick_models::{Arch, Tokenizer};
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// Tokenization for a reward model.
#[derive(Debug)]
pub struct RewardReader {
    /// Name among the rewards.
    pub name: String,
    input: RewardInput,
    /// Its tokenizer; `None` if it reads the policy's ids.
    tokenizer: Option<Tokenizer>,
    /// The policy's tokenizer.
    policy: Arc<Tokenizer>,
    /// Maximum tokens of a sequence.
    context: usize,
    /// Maximum tokens of a batch.
    budget: usize,
    /// Rows of its embedding.
    rows: usize,
}

pub(super) fn refusal(name: &str, path: &Path, detail: impl std::fmt::Display) -> Error {
    Error::Config(format!("reward `{name}` ({}): {detail}", path.display()))
}

impl RewardReader {
    /// Opens the tokenizer of a reward model of this architecture.
    ///
    /// # Errors
    /// `Error::Config` for another vocabulary than the policy's where it reads the policy's ids, and for a tokenizer or
    /// a template that is not there; `Error::Hub` where they cannot be fetched; those of its plan.
    pub fn open(
        name: &str,
        config: &RewardModelConfig,
        arch: &Arch,
        memory: &MemoryConfig,
        policy: &Arc<Tokenizer>,
    ) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            input: config.input,
            tokenizer: Self::vocabulary(name, config, arch, policy)?,
            policy: Arc::clone(policy),
            context: arch.max_positions,
            budget: memory.scorer_plan(arch, config.score_tokens, config.param_offload)?.score_tokens,
            rows: arch.vocab_size,
        })
    }

    /// Rejects, before the first step, prompts that cannot be scored with any completion, and lengths that leave no
    /// room for one: `longest` are the maximum prompt tokens of the policy, `response` those of a completion. Warns if
    /// another tokenizer may need more tokens than the policy's.
    ///
    /// # Errors
    /// `Error::Row` for a prompt that its tokenizer or template rejects, `Error::Config` if there is no room.
    pub fn check(&self, prompts: &[&Prompt], longest: usize, response: usize) -> Result<()> {
        let lengths = match &self.tokenizer {
            None => vec![longest],
            Some(_) => prompts.par_iter().map(|prompt| self.length(prompt)).collect::<Result<_>>()?,
        };
        let (Some(shortest), Some(longest)) = (lengths.iter().min(), lengths.iter().max()) else { return Ok(()) };
        let Some(reason) = self.refuses(longest + response) else { return Ok(()) };
        let same_ids = self.tokenizer.as_ref().is_none_or(|tokenizer| tokenizer.differing_id(&self.policy).is_none());
        let message =
            format!("a prompt of {longest} tokens with a completion of {response} (rollout.response_length): {reason}");
        if same_ids || self.refuses(shortest + 1).is_some() {
            return Err(Error::Config(message));
        }
        tracing::warn!("{message}; longer completions have no score");
        Ok(())
    }

    /// Tokens of a prompt with an empty completion.
    fn length(&self, prompt: &Prompt) -> Result<usize> {
        let place = || match prompt.row {
            Some((split, row)) => format!("reward `{}`: {} row {row}", self.name, split.name()),
            None => format!("reward `{}`", self.name),
        };
        let row = self.read(prompt, "", &[]);
        row.map(|row| row.len()).map_err(|error| error.in_row(&place()))
    }

    /// Its tokenizer; `None` if it reads the policy's ids, which must then have the same meaning.
    fn vocabulary(
        name: &str,
        config: &RewardModelConfig,
        arch: &Arch,
        policy: &Tokenizer,
    ) -> Result<Option<Tokenizer>> {
        let refused = |detail: String| Err(refusal(name, &config.path, detail));
        let tokenizer = Tokenizer::from_dir(&model_folder(&config.path, ModelFiles::Tokenizer)?);
        if config.input == RewardInput::Tokens {
            if policy.vocab_size() > arch.vocab_size {
                return refused(format!(
                    "`input: tokens` passes it the policy's token ids, of which there are {}, but its embedding has {} \
                     rows; use `input: text` or `chat`, which use the reward model's tokenizer",
                    policy.vocab_size(),
                    arch.vocab_size
                ));
            }
            let differing = tokenizer.as_ref().ok().and_then(|tokenizer| tokenizer.differing_id(policy));
            return match differing {
                None => Ok(None),
                Some((id, [token, policy_token])) => refused(format!(
                    "`input: tokens` passes it the policy's token ids, but id {id} is {token} to it and {policy_token} \
                     to the policy; use `input: text` or `chat`, which use the reward model's tokenizer"
                )),
            };
        }
        let tokenizer = tokenizer.map_err(|e| {
            let advice = "it has no tokenizer, so only `input: tokens` is possible";
            refusal(name, &config.path, format!("{e}; {advice}"))
        })?;
        let tokenizer = tokenizer.for_embedding(arch.vocab_size);
        if config.input == RewardInput::Chat && !tokenizer.has_chat_template() {
            return refused(
                "`input: chat` needs a chat template, but its tokenizer has none; use `input: text`".into(),
            );
        }
        Ok(Some(tokenizer))
    }

    /// Token ids of a prompt with its completion, which is given as text without special tokens and as the policy's
    /// tokens.
    ///
    /// # Errors
    /// `Error::Model` if the template or the tokenizer rejects the texts.
    pub fn read(&self, prompt: &Prompt, completion: &str, tokens: &[u32]) -> Result<Vec<u32>> {
        let Some(tokenizer) = &self.tokenizer else {
            return Ok([prompt.tokens.as_slice(), tokens].concat());
        };
        let example = &prompt.example;
        let mut messages = match (self.input, &example.prompt) {
            (RewardInput::Chat, PromptText::Text(text)) => vec![Message::new("user", text)],
            (RewardInput::Chat, PromptText::Chat(messages)) => messages.clone(),
            (RewardInput::Auto, PromptText::Chat(messages)) if tokenizer.has_chat_template() => messages.clone(),
            _ => {
                let text = format!("{}{completion}", prompt.text);
                return Ok(tokenizer.encode_text(&text, &self.control(tokenizer, prompt)?, true)?);
            }
        };
        messages.push(Message::new("assistant", completion));
        let options = ChatOptions { special_tokens: example.special_tokens(), ..ChatOptions::default() };
        Ok(tokenizer.encode_chat(&messages, options)?.1)
    }

    /// Ranges of the policy's prompt in which its special tokens are control tokens: those that the policy's chat
    /// template has written.
    fn control(&self, tokenizer: &Tokenizer, prompt: &Prompt) -> Result<Control> {
        let (example, text) = (&prompt.example, &prompt.text);
        let control = match &example.prompt {
            PromptText::Text(_) => example.control.clone(),
            PromptText::Chat(messages) => self.policy.control(text, messages, 0, example.chat_options(), tokenizer)?,
        };
        Ok(match control {
            Control::Everywhere => Control::In(std::iter::once(0..text.len()).collect()),
            within @ Control::In(_) => within,
        })
    }

    /// Reason that a row cannot be scored, if it cannot.
    pub fn refuses_row(&self, row: &[u32]) -> Option<String> {
        let beyond = row.iter().find(|&&id| id as usize >= self.rows);
        let beyond = beyond.map(|id| {
            format!(
                "reward `{}` has no embedding for the token id {id}: it has {} rows (vocab_size)",
                self.name, self.rows
            )
        });
        self.refuses(row.len()).or(beyond)
    }

    /// Reason that a sequence of `tokens` tokens cannot be scored, if it cannot.
    pub fn refuses(&self, tokens: usize) -> Option<String> {
        let (name, budget) = (&self.name, self.budget);
        if tokens == 0 {
            Some(format!("reward `{name}` has no tokens to read"))
        } else if tokens > self.context {
            Some(format!(
                "reward `{name}` needs {tokens} tokens for it, but its context is {} (max_position_embeddings); lower \
                 rollout.response_length or rollout.prompt_length",
                self.context
            ))
        } else if tokens > budget {
            Some(format!(
                "reward `{name}` needs {tokens} tokens for it, but its budget is {budget}; raise its score_tokens (or \
                 memory.score_tokens) to {tokens}"
            ))
        } else {
            None
        }
    }
}
