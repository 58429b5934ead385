//! Counts of special tokens in the text of rows.

use crate::task::{Example, PromptText, TOOLS};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{Control, Message, SpecialTokens};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Special tokens named in a warning.
const MAX_NAMED: usize = 5;

/// Special tokens in the text of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpelledTokens {
    /// Examined rows.
    pub looked_at: u64,
    /// Rows with special tokens in their text.
    pub rows: u64,
    /// Rows by special token.
    pub spellings: BTreeMap<String, u64>,
}

impl SpelledTokens {
    /// Adds a row with the special tokens in its text.
    pub fn add(&mut self, spelled: BTreeSet<String>) {
        let rows = u64::from(!spelled.is_empty());
        self.join(Self { looked_at: 1, rows, spellings: spelled.into_iter().map(|spelling| (spelling, 1)).collect() });
    }

    /// Adds other rows.
    pub fn join(&mut self, other: Self) {
        self.looked_at += other.looked_at;
        self.rows += other.rows;
        for (spelling, rows) in other.spellings {
            *self.spellings.entry(spelling).or_default() += rows;
        }
    }

    /// Warning for the rows of a setting; `None` without special tokens. `key` is the setting of their encoding.
    pub fn warning(&self, what: &str, key: &str, special_tokens: SpecialTokens) -> Option<String> {
        if self.rows == 0 {
            return None;
        }
        let mut sorted: Vec<(&String, &u64)> = self.spellings.iter().collect();
        sorted.sort_by_key(|(_, rows)| std::cmp::Reverse(**rows));
        let mut named: Vec<String> =
            sorted.iter().take(MAX_NAMED).map(|(token, n)| format!("`{token}` in {n}")).collect();
        if sorted.len() > MAX_NAMED {
            named.push(format!("{} more", sorted.len() - MAX_NAMED));
        }
        let (rows, total, named) = (self.rows, self.looked_at, named.join(", "));
        Some(match special_tokens {
            SpecialTokens::Text => format!(
                "{rows} of {total} {what} spell special tokens ({named}), which are encoded as text; set `{key}: allow` if a chat \
                 template has rendered the rows already"
            ),
            SpecialTokens::Allow => format!(
                "{rows} of {total} {what} spell special tokens ({named}), which are encoded as special tokens (`{key}: allow`)"
            ),
        })
    }
}

/// Special tokens in the text of an example's prompt and solution.
pub(super) fn spelled_in(tokenizer: &Tokenizer, example: &Example) -> BTreeSet<String> {
    let mut spelled = match &example.prompt {
        PromptText::Text(text) => match &example.control {
            // except in literals of the configuration
            Control::In(literals) => {
                let ends = literals.iter().map(|literal| literal.start).chain([text.len()]);
                let starts = [0].into_iter().chain(literals.iter().map(|literal| literal.end));
                starts.zip(ends).flat_map(|(start, end)| tokenizer.special_tokens_in(&text[start..end])).collect()
            }
            Control::Everywhere => tokenizer.special_tokens_in(text),
        },
        PromptText::Chat(messages) => spelled_in_chat(tokenizer, messages, example.fields.get(TOOLS)),
    };
    spelled.extend(example.solution.iter().flat_map(|solution| tokenizer.special_tokens_in(solution)));
    spelled
}

/// Special tokens in the messages and tools of a conversation.
pub(super) fn spelled_in_chat(tokenizer: &Tokenizer, messages: &[Message], tools: Option<&Value>) -> BTreeSet<String> {
    let fields = messages.iter().flat_map(|message| message.fields().values());
    fields.chain(tools).flat_map(|value| tokenizer.special_tokens_in_value(value)).collect()
}
