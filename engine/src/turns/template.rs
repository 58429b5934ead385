//! Text of a chat template between two turns of the model, checked once at set-up.
//!
//! Multi-turn rollouts need a prefix-preserving template: its text of a conversation begins with its text of the
//! conversation without the last messages. Then the tokens of a turn stay as sampled. Many templates are not: they drop
//! the reasoning of earlier turns, or write the last turn differently from others.

use crate::task::environment::{TOOL, tool_answer};
use crate::task::{ToolCalls, ToolParser, ToolRole};
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{ChatOptions, Message};
use serde_json::Value;
use std::borrow::Cow;
use std::sync::Arc;

/// Role of the model.
const ASSISTANT: &str = "assistant";

/// Role of tool responses in templates without a role for tools.
const USER: &str = "user";

/// Tool response in the conversation with which templates are tested.
const ANSWER: &str = "4711";

/// Mark after the text of a turn: a noncharacter, which no text contains.
const MARK: char = '\u{1FFFE}';

/// A prefix-preserving template, with the format of tool calls and the role of tool responses.
#[derive(Clone, Debug)]
pub struct TurnTemplate {
    pub(super) tokenizer: Arc<Tokenizer>,
    tools: Value,
    format: ToolParser,
    role: ToolRole,
}

impl TurnTemplate {
    /// Checks a template with a conversation's first messages and a tool call in a format, with or without reasoning
    /// before it. `role` is that of tool responses. Turns end with one of `stop_ids`.
    ///
    /// # Errors
    /// [`Error::Config`] with the reason if the template cannot be used.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        stop_ids: &[u32],
        tools: &Value,
        prompt: &[Message],
        format: ToolParser,
        role: ToolRole,
    ) -> Result<Self> {
        let template = Self { tokenizer: Arc::clone(tokenizer), tools: tools.clone(), format, role };
        let call = format.example();
        // the generation prompt may open the reasoning, and the template may write an empty one
        let texts = [call.to_owned(), format!("<think>\no\n</think>\n\n{call}"), format!("o\n</think>\n\n{call}")];
        let mut refusal = None;
        for first in &texts {
            for second in &texts {
                match template.check(stop_ids, prompt, [first, second]) {
                    Ok(()) => return Ok(template),
                    Err(error) => refusal = refusal.or(Some(error)),
                }
            }
        }
        Err(refusal.unwrap_or_else(|| refused("it was not tried")))
    }

    /// Tool calls in the text of a turn.
    pub fn calls(&self, text: &str) -> ToolCalls {
        self.format.parse(text, &self.tools)
    }

    /// Returns true if the template reads the tools of a conversation.
    pub fn reads_tools(&self, prompt: &[Message]) -> bool {
        let options = ChatOptions { tools: None, ..self.options(true) };
        let without = self.tokenizer.render_chat_with(&self.adapted(prompt), options).ok();
        self.tools.as_array().is_none_or(Vec::is_empty) || without != self.render(prompt, true).ok()
    }

    /// Rejects a template that does not preserve two turns with these texts, each followed by a tool response.
    fn check(&self, stop_ids: &[u32], prompt: &[Message], texts: [&str; 2]) -> Result<()> {
        let [first, second] = texts.map(turn);
        let mut conversation = [prompt, std::slice::from_ref(&first)].concat();
        let before = self.render(prompt, true)? + &first.text();
        let rendered = self.render(&conversation, false);
        let rendered = rendered.map_err(|error| refused(&format!("it refuses a turn as it was sampled: {error}")))?;
        let Some(end) = rendered.strip_prefix(&before) else {
            let (rendered, expected) = difference(&rendered, &before);
            return Err(refused(&format!(
                "it writes an assistant turn differently from the generation prompt: {rendered} in place of {expected}, \
                 the generation prompt followed by the words of the turn"
            )));
        };
        let answer = [tool_answer("tool", ANSWER)];
        let between = match self.between_text(&conversation, &answer) {
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
        conversation.extend(answer.clone());
        self.check_prefix(&conversation, true, &expected, "once a tool has answered")?;
        let expected = expected + &second.text();
        conversation.push(second);
        self.check_prefix(&conversation, false, &expected, "once another turn follows")?;
        let expected = expected + &self.between_text(&conversation, &answer)?;
        conversation.extend(answer);
        self.check_prefix(&conversation, true, &expected, "once two turns follow")
    }

    /// Checks that a turn ends with a stop token, or sampling would continue where the template does not.
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
        let rendered = self.render(messages, prompt)?;
        if rendered.starts_with(expected) {
            return Ok(());
        }
        let (rendered, expected) = difference(&rendered, expected);
        Err(refused(&format!("it is not prefix-preserving: {when}, it writes {rendered} in place of {expected}")))
    }

    /// The template's text of a conversation.
    ///
    /// # Errors
    /// `Error::Model` if the template rejects the messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        Ok(self.tokenizer.render_chat_with(&self.adapted(messages), self.options(add_generation_prompt))?)
    }

    /// Messages for the template: with [`ToolRole::User`], the tool responses to a turn become one user message.
    fn adapted<'m>(&self, messages: &'m [Message]) -> Cow<'m, [Message]> {
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

    /// Text between the last turn of a conversation and the next turn, with these messages between them.
    fn between_text(&self, conversation: &[Message], messages: &[Message]) -> Result<String> {
        let mut whole = marked(conversation);
        whole.extend_from_slice(messages);
        match self.render(&whole, true)?.rsplit_once(MARK) {
            Some((_, between)) if !between.is_empty() => Ok(between.to_owned()),
            _ => Err(refused("once a tool has answered, it omits the words of the turn before")),
        }
    }

    /// Tokens between the last turn of a conversation and the next turn, with these messages between them. `end` is the
    /// stop token of that turn, if it has one.
    ///
    /// # Errors
    /// `Error::Model` if the template rejects the messages or tokens cannot be encoded; `Error::Config` if it omits the
    /// turn once later messages follow.
    pub fn between(&self, end: Option<u32>, conversation: &[Message], messages: &[Message]) -> Result<Vec<u32>> {
        let text = self.between_text(conversation, messages)?;
        let end = end.map(|id| self.tokenizer.decode(&[id], false)).transpose()?.unwrap_or_default();
        let rest = text.strip_prefix(&end).unwrap_or(&text);
        let rendered = self.render(&[conversation, messages].concat(), true)?;
        let (conversation, messages) = (self.adapted(conversation), self.adapted(messages));
        let (whole, from) = ([&*conversation, &*messages].concat(), conversation.len());
        let control = self.tokenizer.control(&rendered, &whole, from, self.options(true), &self.tokenizer)?;
        let control = control.after(rendered.len().saturating_sub(rest.len()));
        Ok(self.tokenizer.encode_text(rest, &control, false)?)
    }

    /// Text of a turn, without its stop token.
    ///
    /// # Errors
    /// `Error::Model` if the tokens cannot be decoded.
    pub fn text(&self, turn: &[u32], stop_ids: &[u32]) -> Result<String> {
        let tokens = match turn.split_last() {
            Some((last, tokens)) if stop_ids.contains(last) => tokens,
            _ => turn,
        };
        Ok(self.tokenizer.decode(tokens, false)?)
    }

    /// Returns true if tokens are the template's text of a conversation that ends with a turn of the model.
    ///
    /// # Errors
    /// `Error::Model` if the template rejects the messages or the tokens cannot be decoded.
    pub fn writes(&self, tokens: &[u32], messages: &[Message]) -> Result<bool> {
        let text = self.tokenizer.decode(tokens, false)?;
        let rendered = self.render(messages, false)?;
        let Some(rest) = rendered.strip_prefix(&text) else { return Ok(false) };
        // a truncated turn has no end
        let marked = self.render(&marked(messages), false)?;
        Ok(rest.is_empty() || marked.rsplit_once(MARK).is_some_and(|(_, end)| end.ends_with(rest)))
    }
}

/// Messages with [`MARK`] after the last one.
fn marked(messages: &[Message]) -> Vec<Message> {
    let mut messages = messages.to_vec();
    if let Some(last) = messages.last_mut() {
        last.push_text(&MARK.to_string());
    }
    messages
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

/// Error of a template without messages of tools.
fn refused_role(why: &str) -> Error {
    Error::Config(format!(
        "the chat template cannot be used for rollouts of several turns: {why}; set `rollout.multi_turn.tool_role: user` to \
         give tool answers as messages of the user, or `model.chat_template` to one that writes them"
    ))
}

/// Excerpts of two texts around their first difference.
fn difference(a: &str, b: &str) -> (String, String) {
    let common = a.chars().zip(b.chars()).take_while(|(x, y)| x == y).count();
    let from = common.saturating_sub(16);
    let excerpt = |text: &str| format!("{:?}", text.chars().skip(from).take(48).collect::<String>());
    (excerpt(a), excerpt(b))
}
