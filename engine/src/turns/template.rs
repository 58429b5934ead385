//! What a chat template writes between two turns of the model, found once at set-up.
//!
//! A template serves rollouts of several turns where it is prefix-preserving: what it writes of a conversation begins
//! with what it wrote of the conversation before its last messages. Then the tokens of a turn may stay as they were
//! sampled. Many templates are not: they drop the reasoning of earlier turns, or write the last turn differently from
//! others.

use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{ChatOptions, Message};
use serde_json::Value;
use std::sync::Arc;

/// A role that is the model's.
const ASSISTANT: &str = "assistant";

/// What a tool answers in the conversation that templates are tried with.
const ANSWER: &str = "4711";

/// A template that was found to be prefix-preserving, and what it does around turns.
#[derive(Clone, Debug)]
pub struct TurnTemplate {
    tokenizer: Arc<Tokenizer>,
    tools: Value,
    /// A conversation up to the end of a turn of the model, without the text that follows its last word.
    probe: Vec<Message>,
    /// What the template writes of it, up to the last word of that turn.
    before: String,
    /// What it writes behind that word.
    end: String,
}

impl TurnTemplate {
    /// Checks a template with a conversation's first messages and `call`, a tool call as the model writes it. `answer`
    /// is the role of what follows it. Turns end with one of `stop_ids`.
    ///
    /// # Errors
    /// [`Error::Config`] with the reason where the template cannot be used, [`Error::Model`] with its own words where
    /// it refuses the conversation.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        stop_ids: &[u32],
        tools: &Value,
        prompt: &[Message],
        call: &str,
    ) -> Result<Self> {
        let (first, second) = (turn(call), turn(&format!("Once more. {call}")));
        let mut probe = prompt.to_vec();
        probe.push(first);
        let mut own = Self {
            tokenizer: Arc::clone(tokenizer),
            tools: tools.clone(),
            probe,
            before: String::new(),
            end: String::new(),
        };
        let asked = own.render(prompt, true)?;
        let told = own.render(&own.probe, false)?;
        own.before = asked.clone() + call;
        let Some(end) = told.strip_prefix(&own.before) else {
            let (wrote, expected) = difference(&told, &own.before);
            return Err(refused(&format!(
                "it writes an assistant turn differently from the generation prompt: {wrote} in place of {expected}, \
                 the generation prompt followed by the words of the turn"
            )));
        };
        end.clone_into(&mut own.end);
        own.check_end(stop_ids)?;
        // the same answer after the first turn and after the second
        let answer = tool(ANSWER);
        let between = own.between_text(std::slice::from_ref(&answer))?;
        if !between.contains(ANSWER) {
            return Err(refused("it omits tool answers (messages of the role `tool`)"));
        }
        let mut longer = own.probe.clone();
        longer.extend([answer.clone(), second.clone()]);
        let expected = format!("{}{between}{}", own.before, second.text());
        own.check_prefix(&longer, false, &expected, "once another turn follows")?;
        longer.push(answer);
        let expected = expected + &between;
        own.check_prefix(&longer, true, &expected, "once two turns follow")?;
        Ok(own)
    }

    /// A turn has to end with what ends sampling, or the model would continue where the template does not.
    fn check_end(&self, stop_ids: &[u32]) -> Result<()> {
        let stops =
            stop_ids.iter().map(|&id| Ok(self.tokenizer.decode(&[id], false)?)).collect::<Result<Vec<String>>>()?;
        if stops.iter().any(|s| !s.is_empty() && self.end.starts_with(s)) {
            return Ok(());
        }
        Err(refused(&format!(
            "it ends a turn of the assistant with {:?}, and sampling ends with {stops:?} (`eos_token_id` of the model); name the token \
             there, or write it in the template",
            self.end
        )))
    }

    fn check_prefix(&self, messages: &[Message], prompt: bool, expected: &str, when: &str) -> Result<()> {
        let wrote = self.render(messages, prompt)?;
        if wrote.starts_with(expected) {
            return Ok(());
        }
        let (wrote, expected) = difference(&wrote, expected);
        Err(refused(&format!("it is not prefix-preserving: {when}, it writes {wrote} in place of {expected}")))
    }

    /// What the template writes of a conversation.
    ///
    /// # Errors
    /// `Error::Model` where the template refuses the messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        Ok(self.tokenizer.render_chat_with(messages, self.options(add_generation_prompt))?)
    }

    fn options(&self, add_generation_prompt: bool) -> ChatOptions<'_> {
        ChatOptions { add_generation_prompt, tools: Some(&self.tools), ..ChatOptions::default() }
    }

    /// What stands behind the last word of a turn where these messages and another turn follow.
    fn between_text(&self, messages: &[Message]) -> Result<String> {
        let whole = [&self.probe, messages].concat();
        let wrote = self.render(&whole, true)?;
        match wrote.strip_prefix(&self.before) {
            Some(between) if !between.is_empty() => Ok(between.to_owned()),
            _ => {
                let (wrote, expected) = difference(&wrote, &self.before);
                Err(refused(&format!(
                    "it is not prefix-preserving: once a tool has answered, it writes {wrote} in place of {expected}"
                )))
            }
        }
    }

    /// The tokens between a turn and the next, with these messages between them. `ended` is the token that the turn
    /// ended with, where that ends turns in the template too.
    ///
    /// # Errors
    /// `Error::Model` where the template refuses the messages or tokens cannot be encoded; `Error::Config` where it is
    /// not prefix-preserving: it writes earlier turns differently once there are later ones.
    pub fn between(&self, ended: Option<u32>, messages: &[Message]) -> Result<Vec<u32>> {
        let text = self.between_text(messages)?;
        let ended = ended.map(|id| self.tokenizer.decode(&[id], false));
        let ended = ended.transpose()?.unwrap_or_default();
        let rest = text.strip_prefix(&ended).unwrap_or(&text);
        let whole = [&self.probe, messages].concat();
        let written = format!("{}{text}", self.before);
        let control =
            self.tokenizer.control(&written, &whole, self.probe.len(), self.options(true), &self.tokenizer)?;
        let control = control.after(written.len() - rest.len());
        Ok(self.tokenizer.encode_text(rest, &control, false)?)
    }

    /// The words of a turn, without the token that ended it.
    ///
    /// # Errors
    /// `Error::Model` where the tokens cannot be decoded.
    pub fn words(&self, turn: &[u32], stop_ids: &[u32]) -> Result<String> {
        let words = match turn.split_last() {
            Some((last, words)) if stop_ids.contains(last) => words,
            _ => turn,
        };
        Ok(self.tokenizer.decode(words, false)?)
    }

    /// Whether tokens are what the template writes of a conversation that ends with a turn of the model.
    ///
    /// # Errors
    /// `Error::Model` where the template refuses the messages or the tokens cannot be decoded.
    pub fn writes(&self, tokens: &[u32], messages: &[Message]) -> Result<bool> {
        let text = self.tokenizer.decode(tokens, false)?;
        let wrote = self.render(messages, false)?;
        Ok(wrote.strip_prefix(&text).is_some_and(|rest| self.end.ends_with(rest)))
    }
}

/// A turn of the model.
pub(super) fn turn(content: &str) -> Message {
    Message::new(ASSISTANT, content)
}

fn tool(content: &str) -> Message {
    Message::new(crate::task::environment::TOOL, content)
}

fn refused(why: &str) -> Error {
    Error::Config(format!(
        "the chat template cannot be used for rollouts of several turns, whose tokens are only ever appended: {why}; set \
         `model.chat_template` to one that writes every turn as it was, or remove the environment"
    ))
}

/// A few characters of two texts from where they differ.
fn difference(a: &str, b: &str) -> (String, String) {
    let alike = a.chars().zip(b.chars()).take_while(|(x, y)| x == y).count();
    let from = alike.saturating_sub(16);
    let few = |text: &str| format!("{:?}", text.chars().skip(from).take(48).collect::<String>());
    (few(a), few(b))
}
