//! What a chat template writes between two turns of the model, found once at set-up.
//!
//! A template serves rollouts of several turns where it is prefix-preserving: what it writes of a conversation begins
//! with what it wrote of the conversation before its last messages. Then the tokens of a turn may stay as they were
//! sampled. Many templates are not: they drop the reasoning of earlier turns, or write the last turn differently from
//! others.

use crate::task::environment::{TOOL, tool_answer};
use crate::task::{ToolCalls, ToolParser, ToolRole};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{ChatOptions, Message};
use serde_json::Value;
use std::borrow::Cow;
use std::sync::Arc;

/// A role that is the model's.
const ASSISTANT: &str = "assistant";

/// The role of answers of tools in templates that have none for tools.
const USER: &str = "user";

/// What a tool answers in the conversation that templates are tried with.
const ANSWER: &str = "4711";

/// Written behind the words of a turn: a noncharacter, which no text has.
const MARK: char = '\u{1FFFE}';

/// A template that was found to be prefix-preserving, and how tools are called and answer in it.
#[derive(Clone, Debug)]
pub struct TurnTemplate {
    tokenizer: Arc<Tokenizer>,
    tools: Value,
    format: ToolParser,
    role: ToolRole,
}

impl TurnTemplate {
    /// Checks a template with a conversation's first messages and a tool call as the model writes it in a format, with
    /// or without reasoning before it. `role` is that of a tool's answer. Turns end with one of `stop_ids`.
    ///
    /// # Errors
    /// [`Error::Config`] with the reason where the template cannot be used.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        stop_ids: &[u32],
        tools: &Value,
        prompt: &[Message],
        format: ToolParser,
        role: ToolRole,
    ) -> Result<Self> {
        let own = Self { tokenizer: Arc::clone(tokenizer), tools: tools.clone(), format, role };
        let call = format.example();
        // the generation prompt may open the reasoning, and the template may write an empty one
        let words = [call.to_owned(), format!("<think>\no\n</think>\n\n{call}"), format!("o\n</think>\n\n{call}")];
        let mut refusal = None;
        for first in &words {
            for second in &words {
                match own.check(stop_ids, prompt, [first, second]) {
                    Ok(()) => return Ok(own),
                    Err(error) => refusal = refusal.or(Some(error)),
                }
            }
        }
        Err(refusal.unwrap_or_else(|| refused("it was not tried")))
    }

    /// The tokenizer with the template.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tool calls in the words of a turn.
    #[must_use]
    pub fn calls(&self, words: &str) -> ToolCalls {
        self.format.parse(words, &self.tools)
    }

    /// Whether the template reads the tools of a conversation.
    #[must_use]
    pub fn reads_tools(&self, prompt: &[Message]) -> bool {
        let options = ChatOptions { tools: None, ..self.options(true) };
        let without = self.tokenizer.render_chat_with(&self.given(prompt), options).ok();
        self.tools.as_array().is_none_or(Vec::is_empty) || without != self.render(prompt, true).ok()
    }

    /// Refuses a template that does not write two turns with these words, and a tool's answer behind each, as they were
    /// sampled.
    fn check(&self, stop_ids: &[u32], prompt: &[Message], words: [&str; 2]) -> Result<()> {
        let [first, second] = words.map(turn);
        let mut told = [prompt, std::slice::from_ref(&first)].concat();
        let before = self.render(prompt, true)? + &first.text();
        let wrote = self.render(&told, false);
        let wrote = wrote.map_err(|error| refused(&format!("it refuses a turn as it was sampled: {error}")))?;
        let Some(end) = wrote.strip_prefix(&before) else {
            let (wrote, expected) = difference(&wrote, &before);
            return Err(refused(&format!(
                "it writes an assistant turn differently from the generation prompt: {wrote} in place of {expected}, \
                 the generation prompt followed by the words of the turn"
            )));
        };
        let answer = [tool_answer("tool", ANSWER)];
        let between = match self.between_text(&told, &answer) {
            Ok(text) if text.contains(ANSWER) => text,
            Ok(_) if self.role == ToolRole::User => return Err(refused("it omits messages of the user")),
            Ok(_) => return Err(refused_role("it omits tool answers (messages of the role `tool`)")),
            Err(Error::Model(error)) if self.role == ToolRole::Tool => {
                return Err(refused_role(&format!("it refuses messages of the role `tool`: {error}")));
            }
            Err(error) => return Err(error),
        };
        self.check_end(stop_ids, end, &between)?;
        let expected = before + &between;
        told.extend(answer.clone());
        self.check_prefix(&told, true, &expected, "once a tool has answered")?;
        let expected = expected + &second.text();
        told.push(second);
        self.check_prefix(&told, false, &expected, "once another turn follows")?;
        let expected = expected + &self.between_text(&told, &answer)?;
        told.extend(answer);
        self.check_prefix(&told, true, &expected, "once two turns follow")
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
        Ok(self.tokenizer.render_chat_with(&self.given(messages), self.options(add_generation_prompt))?)
    }

    /// The messages as the template is given them: answers of tools to a turn may be a message of the user.
    fn given<'m>(&self, messages: &'m [Message]) -> Cow<'m, [Message]> {
        let is_answer = |message: &Message| message.role() == TOOL;
        if self.role == ToolRole::Tool || !messages.iter().any(is_answer) {
            return Cow::Borrowed(messages);
        }
        let groups = messages.chunk_by(|a, b| is_answer(a) && is_answer(b));
        let one = |group: &[Message]| match group {
            [first, ..] if is_answer(first) => {
                let texts: Vec<_> = group.iter().map(Message::text).collect();
                Message::new(USER, texts.join("\n"))
            }
            _ => group[0].clone(),
        };
        Cow::Owned(groups.map(one).collect())
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
        let written = self.render(&[told, messages].concat(), true)?;
        let (told, messages) = (self.given(told), self.given(messages));
        let whole = [&*told, &*messages].concat();
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
        let Some(rest) = wrote.strip_prefix(&text) else { return Ok(false) };
        // a turn that was cut short has no end
        let mut marked = messages.to_vec();
        if let Some(last) = marked.last_mut() {
            last.push_text(&MARK.to_string());
        }
        let marked = self.render(&marked, false)?;
        Ok(rest.is_empty() || marked.rsplit_once(MARK).is_some_and(|(_, end)| end.ends_with(rest)))
    }
}

/// A turn of the model.
pub(super) fn turn(content: &str) -> Message {
    Message::new(ASSISTANT, content)
}

fn refused(why: &str) -> Error {
    Error::Config(format!(
        "the chat template cannot be used for rollouts of several turns, whose tokens are only ever appended: {why}; set \
         `model.chat_template` to one that writes every turn as it was, or remove the environment"
    ))
}

/// The refusal of a template without messages of tools.
fn refused_role(why: &str) -> Error {
    Error::Config(format!(
        "the chat template cannot be used for rollouts of several turns: {why}; set `rollout.multi_turn.tool_role: user` to \
         give tool answers as messages of the user, or `model.chat_template` to one that writes them"
    ))
}

/// A few characters of two texts from where they differ.
fn difference(a: &str, b: &str) -> (String, String) {
    let alike = a.chars().zip(b.chars()).take_while(|(x, y)| x == y).count();
    let from = alike.saturating_sub(16);
    let few = |text: &str| format!("{:?}", text.chars().skip(from).take(48).collect::<String>());
    (few(a), few(b))
}
