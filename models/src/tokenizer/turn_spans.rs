//! Places of the assistant's turns in a rendered conversation.
//!
//! A turn begins behind the generation prompt that the model sees before it, and ends with the token that ends it.
//! Templates may write a turn otherwise once others follow: without its reasoning, or with another end. So both places
//! are looked for in the text of the whole conversation. Where that begins with the text of the conversation up to
//! there, the place is the end of that. Otherwise the words of single messages are marked or replaced in further
//! renderings, which show where the template writes them.

use super::message_words::{is_turn, map_words};
use super::{ChatOptions, Message, Tokenizer};
use crate::error::{Error, Result};
use std::ops::Range;

/// Written behind the words of a turn, and behind those of the message before it: noncharacters, which no text has.
const MARKS: [char; 2] = ['\u{1FFFE}', '\u{1FFFF}'];

/// A conversation as the template for training writes it.
pub(super) struct RenderedChat<'a> {
    tokenizer: &'a Tokenizer,
    messages: &'a [Message],
    options: ChatOptions<'a>,
    pub text: String,
}

impl<'a> RenderedChat<'a> {
    pub fn new(tokenizer: &'a Tokenizer, messages: &'a [Message], options: ChatOptions<'a>) -> Result<Self> {
        let mut chat = Self { tokenizer, messages, options, text: String::new() };
        chat.text = chat.render(messages, false)?;
        Ok(chat)
    }

    /// The bytes of each of the assistant's turns among the messages from `from` on.
    pub fn turns(&self, from: usize) -> Result<Vec<Range<usize>>> {
        let mut spans: Vec<Range<usize>> = Vec::new();
        for (i, message) in self.messages.iter().enumerate().skip(from) {
            if !is_turn(message) {
                continue;
            }
            let start = self.start(i)?;
            let span = start..self.end(i, start)?;
            if span.is_empty() || spans.last().is_some_and(|last| last.end > span.start) {
                return Err(self.inexact(&format!("turn {i} is not written behind the turns before it")));
            }
            spans.push(span);
        }
        Ok(spans)
    }

    fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.tokenizer.render_chat_with(messages, ChatOptions { add_generation_prompt, ..self.options })
    }

    /// Length of the text of a part of the conversation, where the whole text begins with it.
    fn prefix(&self, messages: &[Message], add_generation_prompt: bool) -> Option<usize> {
        let part = self.render(messages, add_generation_prompt).ok()?;
        self.text.starts_with(&part).then_some(part.len())
    }

    /// Start of a turn: after the generation prompt.
    fn start(&self, i: usize) -> Result<usize> {
        if i == 0 {
            return Err(self.inexact("the conversation begins with an assistant turn"));
        }
        let before = &self.messages[..i];
        if let Some(start) = self.prefix(before, true) {
            return Ok(start);
        }
        let words = self.words_begin(i);
        let otherwise = || self.inexact(&format!("the generation prompt of turn {i} is not before the turn"));
        let marked = |messages: &[Message]| mark(messages, i - 1, MARKS[0]);
        let at = self.marked_end(&marked(self.messages)).ok_or_else(otherwise)?;
        let prompt = self.render(&marked(before), true)?;
        let prompt = prompt.rsplit_once(MARKS[0]).map(|(_, prompt)| prompt).ok_or_else(otherwise)?;
        if self.text[at..].starts_with(prompt) {
            return Ok(at + prompt.len());
        }
        // a prompt that ends otherwise (`<think>`), or one that begins otherwise: the part that the turn has too
        let words = words.filter(|words| *words >= at).ok_or_else(otherwise)?;
        let gap = &self.text[at..words];
        let first = common(gap, prompt);
        // not the beginning of another tag
        let first = gap[..first].trim_end_matches('<').len();
        match (first, common_end(gap, prompt)) {
            // the template writes nothing between the message before and the turn
            (0, 0) => {
                let last = self.render(&marked(before), false)?;
                let last = last.rsplit_once(MARKS[0]).map(|(_, last)| last).filter(|last| gap.starts_with(last));
                last.map(|last| at + last.len()).ok_or_else(otherwise)
            }
            (first, last) if first >= last => Ok(at + first),
            _ => Ok(words),
        }
    }

    /// End of a turn: after the token that ends it.
    fn end(&self, i: usize, start: usize) -> Result<usize> {
        if let Some(end) = self.prefix(&self.messages[..=i], false).filter(|end| *end > start) {
            return Ok(self.end_of_turn(start..end));
        }
        let marked = mark(self.messages, i, MARKS[0]);
        let at = self.marked_end(&marked).filter(|at| *at >= start).ok_or_else(|| {
            self.inexact(&format!(
                "turn {i} is rendered differently when later turns follow: its last words are missing"
            ))
        })?;
        let next = self.messages[i + 1..].iter().position(|next| mark_one(next, MARKS[0]) != *next);
        let next = next.and_then(|next| self.words_begin(i + 1 + next));
        let behind = &self.text[at..next.filter(|next| *next > at).unwrap_or(self.text.len())];
        if let Some(end) = self.tokenizer.end_of_turn_in(behind) {
            return Ok(at + end);
        }
        // without a token that ends it: as far as the template writes the same behind a last turn
        let last = self.render(&marked[..=i], false)?;
        let last = last.rsplit_once(MARKS[0]).map_or("", |(_, last)| last);
        Ok(at + common(behind, last))
    }

    /// The end of a turn, without whitespace that the template writes after its end-of-turn token.
    fn end_of_turn(&self, turn: Range<usize>) -> usize {
        let words = self.text[turn.clone()].trim_end();
        let added = self.tokenizer.backend.get_added_tokens_decoder();
        let ended = added.values().any(|token| token.special && words.ends_with(&token.content));
        if ended {
            return turn.start + words.len();
        }
        turn.end + self.tokenizer.end_by_next(&self.text[turn.end..]).unwrap_or(0)
    }

    /// Place of the last mark in the text, if the marks change nothing else.
    fn marked_end(&self, messages: &[Message]) -> Option<usize> {
        let text = self.render(messages, false).ok()?;
        let (before, behind) = text.rsplit_once(MARKS[0])?;
        let before = before.replace(MARKS[0], "");
        let rest = self.text.strip_prefix(&before)?;
        (rest == behind).then_some(before.len())
    }

    /// First place at which the text depends on the words of a message.
    fn words_begin(&self, i: usize) -> Option<usize> {
        let mut others = self.messages.to_vec();
        others[i] = map_words(&others[i], |_| MARKS[1].to_string());
        let text = self.render(&others, false).ok()?;
        (text != self.text).then(|| common(&self.text, &text))
    }

    fn inexact(&self, why: &str) -> Error {
        self.tokenizer.inexact(why)
    }
}

/// The messages, one of them with a mark behind each of its texts.
fn mark(messages: &[Message], i: usize, mark: char) -> Vec<Message> {
    let mut marked = messages.to_vec();
    marked[i] = mark_one(&marked[i], mark);
    marked
}

/// A mark behind each of a message's texts, before whitespace at its end, which templates may strip.
fn mark_one(message: &Message, mark: char) -> Message {
    map_words(message, |words| {
        let end = words.trim_end().len();
        format!("{}{mark}{}", &words[..end], &words[end..])
    })
}

/// Length in bytes of the common prefix of two texts.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(x, y)| x == y).map(|(c, _)| c.len_utf8()).sum()
}

/// Length in bytes of their common suffix.
fn common_end(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(x, y)| x == y).map(|(c, _)| c.len_utf8()).sum()
}
