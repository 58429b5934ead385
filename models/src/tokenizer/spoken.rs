//! Which tokens of a conversation the assistant says: what supervised training scores.
//!
//! A template with `{% generation %}` … `{% endgeneration %}` says it itself, as transformers'
//! `return_assistant_tokens_mask` reads it. For any other the turn is what the template writes
//! between the generation prompt and the end of the conversation up to that turn, provided that
//! both are beginnings of the whole; a template that writes an earlier turn otherwise once later
//! ones follow has no such place, and is refused.

use std::ops::Range;

use super::{Message, Tokenizer};
use crate::error::{Error, Result};

/// The role whose turns are scored.
const ASSISTANT: &str = "assistant";

/// A conversation as tokens, and which of them the assistant says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTokens {
    /// Token ids of the whole conversation.
    pub tokens: Vec<u32>,
    /// Whether each is the assistant's: a token is that has a character of one of its turns.
    pub spoken: Vec<bool>,
}

impl Tokenizer {
    /// Tokens of a conversation, and which of them the assistant says in the messages from `from` on:
    /// its words and the token that ends its turn, as far as the template's marks go.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] as [`Tokenizer::render_chat`] has it, and when the template does not
    /// let the assistant's turns be told exactly, with the reason.
    pub fn encode_spoken(&self, messages: &[Message], from: usize) -> Result<ChatTokens> {
        let (text, spans) = if self.template.marks_generation() {
            self.marked(messages, from)?
        } else {
            self.between_prefixes(messages, from)?
        };
        let encoding =
            self.backend
                .encode(text.as_str(), false)
                .map_err(|cause| Error::Tokenizer {
                    path: self.origin.clone(),
                    detail: format!("cannot encode {text:?}: {cause}"),
                })?;
        let spoken = overlapping(encoding.get_offsets(), &spans);
        Ok(ChatTokens {
            tokens: encoding.get_ids().to_vec(),
            spoken,
        })
    }

    /// The spans that the template marks, those of turns before `from` apart.
    fn marked(&self, messages: &[Message], from: usize) -> Result<(String, Vec<Range<usize>>)> {
        let named = self.settings.named();
        let (text, mut spans) = self.template.render_marked(named, messages, false)?;
        if from > 0 {
            let turns = |m: &[Message]| m.iter().filter(|m| m.role == ASSISTANT).count();
            if spans.len() != turns(messages) {
                return Err(self.inexact(&format!(
                    "it marks {} spans in {} turns of the assistant, so that those of the completion cannot be told",
                    spans.len(),
                    turns(messages)
                )));
            }
            spans.drain(..turns(&messages[..from.min(messages.len())]));
        }
        Ok((text, spans))
    }

    /// What stands between the generation prompt and the end of each of the assistant's turns.
    fn between_prefixes(
        &self,
        messages: &[Message],
        from: usize,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let text = self.render_chat(messages, false)?;
        let mut spans = Vec::new();
        for (i, message) in messages.iter().enumerate().skip(from) {
            if message.role != ASSISTANT {
                continue;
            }
            if i == 0 {
                return Err(self.inexact("the conversation begins with the assistant's turn"));
            }
            let before = self.render_chat(&messages[..i], true)?;
            let after = self.render_chat(&messages[..=i], false)?;
            for (part, what) in [
                (&before, "the generation prompt of"),
                (&after, "the conversation up to"),
            ] {
                if !text.starts_with(part.as_str()) {
                    let at = common(&text, part);
                    return Err(self.inexact(&format!(
                        "{what} turn {i} is written otherwise when the rest follows: {:?} is {:?} in the whole",
                        excerpt(part, at),
                        excerpt(&text, at)
                    )));
                }
            }
            if after.len() < before.len() {
                return Err(
                    self.inexact(&format!("turn {i} ends before its generation prompt does"))
                );
            }
            spans.push(before.len()..self.end_of_turn(&text, before.len()..after.len()));
        }
        Ok((text, spans))
    }

    /// Space that a template writes behind the token that ends a turn is no part of it.
    fn end_of_turn(&self, text: &str, turn: Range<usize>) -> usize {
        let words = text[turn.clone()].trim_end();
        let added = self.backend.get_added_tokens_decoder();
        let ended = added
            .values()
            .any(|token| token.special && words.ends_with(&token.content));
        if ended {
            turn.start + words.len()
        } else {
            turn.end
        }
    }

    fn inexact(&self, why: &str) -> Error {
        Error::ChatTemplate {
            path: self.origin.clone(),
            detail: format!(
                "the assistant's turns cannot be told exactly: {why}; put them between {{% generation %}} and \
                 {{% endgeneration %}} in the template, or train on rows of `prompt` and `completion`"
            ),
        }
    }
}

/// Bytes that two texts begin with alike, up to a character's start.
fn common(a: &str, b: &str) -> usize {
    let pairs = a.char_indices().zip(b.chars());
    let alike = pairs.take_while(|((_, x), y)| x == y);
    alike
        .map(|((at, c), _)| at + c.len_utf8())
        .last()
        .unwrap_or(0)
}

/// A few characters from a place on.
fn excerpt(text: &str, at: usize) -> String {
    text[at..].chars().take(24).collect()
}

/// Which tokens have a byte in one of the spans, given each token's bytes.
///
/// Offsets may leave out spaces that a token begins with (`trim_offsets`), so that a token is taken to begin where the one
/// before it ends; and all tokens of one character have the whole of it.
fn overlapping(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let mut spoken = Vec::with_capacity(offsets.len());
    let mut at = 0;
    for &(_, end) in offsets {
        let is = if end > at {
            spans.iter().any(|s| at < s.end && end > s.start)
        } else {
            spoken.last().copied().unwrap_or(false)
        };
        spoken.push(is);
        at = at.max(end);
    }
    spoken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_with_a_byte_in_a_span_are_in_it() {
        // "ab cd": the space belongs to the second token, whose offsets leave it out
        let offsets = [(0, 2), (3, 5), (5, 9), (5, 9), (9, 10)];
        let of = |one: Range<usize>, other| overlapping(&offsets, &[one, other]);
        assert_eq!(of(2..3, 0..0), [false, true, false, false, false]);
        assert_eq!(of(1..2, 9..10), [true, false, false, false, true]);
        assert_eq!(of(0..0, 5..9), [false, false, true, true, false]);
        assert_eq!(of(0..0, 10..10), [false; 5]);
    }
}
