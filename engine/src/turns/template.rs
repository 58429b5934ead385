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

/// Written behind the words of a turn: a noncharacter, which no text has.
const MARK: char = '\u{1FFFE}';

/// A template that was found to be prefix-preserving, and what it does around turns.
#[derive(Clone, Debug)]
pub struct TurnTemplate {
    tokenizer: Arc<Tokenizer>,
    tools: Value,
    /// What the template writes behind the last word of a conversation's last turn.
    end: String,
}

impl TurnTemplate {
    /// Checks a template with a conversation's first messages and `call`, a tool call as the model writes it, with or
    /// without reasoning before it. `answer` is the role of what follows it. Turns end with one of `stop_ids`.
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
        let own = Self { tokenizer: Arc::clone(tokenizer), tools: tools.clone(), end: String::new() };
        // the generation prompt may open the reasoning, and the template may write an empty one
        let words = [call.to_owned(), format!("<think>\no\n</think>\n\n{call}"), format!("o\n</think>\n\n{call}")];
        let mut refusal = None;
        for first in &words {
            for second in &words {
                match own.checked(stop_ids, prompt, [first, second]) {
                    Ok(end) => return Ok(Self { end, ..own }),
                    Err(error) => refusal = refusal.or(Some(error)),
                }
            }
        }
        Err(refusal.unwrap_or_else(|| refused("it was not tried")))
    }

    /// What the template writes behind the last word of a turn, provided that it writes two turns with these words, and
    /// a tool's answer behind each, as they were sampled.
    fn checked(&self, stop_ids: &[u32], prompt: &[Message], words: [&str; 2]) -> Result<String> {
        let [first, second] = words.map(turn);
        let mut told = [prompt, std::slice::from_ref(&first)].concat();
        let before = self.render(prompt, true)? + &first.text();
        let wrote = self.render(&told, false)?;
        let Some(end) = wrote.strip_prefix(&before) else {
            let (wrote, expected) = difference(&wrote, &before);
            return Err(refused(&format!(
                "it writes an assistant turn differently from the generation prompt: {wrote} in place of {expected}, \
                 the generation prompt followed by the words of the turn"
            )));
        };
        let answer = std::slice::from_ref(&tool(ANSWER)).to_vec();
        let between = self.between_text(&told, &answer)?;
        self.check_end(stop_ids, end, &between)?;
        if !between.contains(ANSWER) {
            return Err(refused("it omits tool answers (messages of the role `tool`)"));
        }
        let expected = before + &between;
        told.extend(answer.clone());
        self.check_prefix(&told, true, &expected, "once a tool has answered")?;
        let expected = expected + &second.text();
        told.push(second);
        self.check_prefix(&told, false, &expected, "once another turn follows")?;
        let expected = expected + &self.between_text(&told, &answer)?;
        told.extend(answer);
        self.check_prefix(&told, true, &expected, "once two turns follow")?;
        Ok(end.to_owned())
    }

    /// A turn has to end with what ends sampling, or the model would continue where the template does not.
    fn check_end(&self, stop_ids: &[u32], end: &str, between: &str) -> Result<()> {
        let stops =
            stop_ids.iter().map(|&id| Ok(self.tokenizer.decode(&[id], false)?)).collect::<Result<Vec<String>>>()?;
        // the token that begins the next message may end a turn
        if stops.iter().any(|s| !s.is_empty() && (end.starts_with(s) || between.starts_with(s))) {
            return Ok(());
        }
        Err(refused(&format!(
            "it ends a turn of the assistant with {end:?}, and sampling ends with {stops:?} (`eos_token_id` of the model); name the token \
             there, or write it in the template"
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

    /// What is behind the last word of a conversation that ends with a turn, where these messages and another turn
    /// follow.
    fn between_text(&self, told: &[Message], messages: &[Message]) -> Result<String> {
        let mut whole = told.to_vec();
        if let Some(last) = whole.last_mut() {
            last.push_text(&MARK.to_string());
        }
        whole.extend_from_slice(messages);
        let wrote = self.render(&whole, true)?;
        match wrote.rsplit_once(MARK) {
            Some((_, between)) if !between.is_empty() => Ok(between.to_owned()),
            _ => Err(refused("once a tool has answered, it omits the words of the turn before")),
        }
    }

    /// The tokens between a turn and the next, with these messages between them. `told` are the messages up to that
    /// turn, and `ended` is the token that it ended with, where that ends turns in the template too.
    ///
    /// # Errors
    /// `Error::Model` where the template refuses the messages or tokens cannot be encoded; `Error::Config` where it
    /// does not write the turn once there are later messages.
    pub fn between(&self, ended: Option<u32>, told: &[Message], messages: &[Message]) -> Result<Vec<u32>> {
        let text = self.between_text(told, messages)?;
        let ended = ended.map(|id| self.tokenizer.decode(&[id], false));
        let ended = ended.transpose()?.unwrap_or_default();
        let rest = text.strip_prefix(&ended).unwrap_or(&text);
        let whole = [told, messages].concat();
        let written = self.render(&whole, true)?;
        let control = self.tokenizer.control(&written, &whole, told.len(), self.options(true), &self.tokenizer)?;
        let control = control.after(written.len().saturating_sub(rest.len()));
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
