//! The assistant mask of a conversation: the tokens that supervised training scores.
//!
//! A template with `{% generation %}` … `{% endgeneration %}` marks them, as in transformers'
//! `return_assistant_tokens_mask`. With any other template a turn is what the whole conversation has between the
//! generation prompt before the turn and the token that ends it.

use std::ops::Range;

use super::message_words::is_turn;
use super::turn_spans::RenderedChat;
use super::{ChatOptions, Message, Tokenizer};
use crate::error::{Error, Result};

/// A conversation as tokens, with the assistant's tokens marked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTokens {
    /// Token ids of the whole conversation.
    pub tokens: Vec<u32>,
    /// True for tokens with a character of one of the assistant's turns.
    pub assistant_mask: Vec<bool>,
}

impl Tokenizer {
    /// Tokens of a conversation, with those marked that the assistant says in the messages from `from`
    /// on: its text and the token that ends its turn, or what the template marks.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] as in [`Tokenizer::render_chat`], and when the template does not allow
    /// to locate the assistant's turns exactly, with the reason.
    pub fn encode_with_assistant_mask(
        &self,
        messages: &[Message],
        from: usize,
        options: ChatOptions<'_>,
    ) -> Result<ChatTokens> {
        let options = ChatOptions { add_generation_prompt: false, training: true, ..options };
        let (text, spans) = if self.training_template().marks {
            self.marked(messages, from, options)?
        } else {
            let chat = RenderedChat::new(self, messages, options)?;
            let spans = chat.turns(from)?;
            (chat.text, spans)
        };
        let control = self.control(&text, messages, 0, options, self)?;
        let encoded = self.encode_with_offsets(&text, &control)?;
        let assistant_mask = overlapping(&encoded.offsets, &spans);
        Ok(ChatTokens { tokens: self.embedded(encoded.ids)?, assistant_mask })
    }

    /// The spans that the template marks, without those of turns before `from`.
    fn marked(
        &self,
        messages: &[Message],
        from: usize,
        options: ChatOptions<'_>,
    ) -> Result<(String, Vec<Range<usize>>)> {
        let named = &self.settings.named;
        let (text, mut spans) = self.training_template().render_marked(named, messages, options)?;
        if from > 0 {
            let turns = |m: &[Message]| m.iter().filter(|m| is_turn(m)).count();
            if spans.len() != turns(messages) {
                return Err(self.inexact(&format!(
                    "it marks {} spans in {} assistant turns, so the completion's spans cannot be identified",
                    spans.len(),
                    turns(messages)
                )));
            }
            spans.drain(..turns(&messages[..from.min(messages.len())]));
        }
        Ok((text, spans))
    }

    pub(super) fn inexact(&self, why: &str) -> Error {
        Error::ChatTemplate {
            path: self.origin.clone(),
            detail: format!(
                "cannot locate the assistant's tokens exactly: {why}; mark them with {{% generation %}} and {{% \
                 endgeneration %}} in the template, or train on rows of `prompt` and `completion`"
            ),
        }
    }
}

/// Which tokens have a byte in one of the spans, given each token's byte offsets.
///
/// Offsets may leave out leading spaces (`trim_offsets`), so a token begins where the one before it ends. Tokens of one
/// character all have the offsets of that character.
fn overlapping(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let mut mask: Vec<bool> = Vec::with_capacity(offsets.len());
    let mut at = 0;
    for &(_, end) in offsets {
        let is = if end > at {
            spans.iter().any(|s| at < s.end && end > s.start)
        } else {
            mask.last().copied().unwrap_or(false)
        };
        mask.push(is);
        at = at.max(end);
    }
    mask
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
