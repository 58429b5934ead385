//! Special tokens that rows spell in their text, counted.

use crate::task::{Example, PromptText, TOOLS};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{Control, Message, SpecialTokens};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Spellings that are named.
const NAMED: usize = 5;

/// Special tokens that are spelled in the text of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpelledTokens {
    /// Rows that were looked at.
    pub looked_at: u64,
    /// Rows with such spellings.
    pub rows: u64,
    /// Rows by spelling.
    pub spellings: BTreeMap<String, u64>,
}

impl SpelledTokens {
    /// Adds a row with the special tokens that it spells.
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

    /// What to know of the rows of a setting; `None` if they spell no special tokens. `key` is how they are encoded.
    #[must_use]
    pub fn warning(&self, what: &str, key: &str, special_tokens: SpecialTokens) -> Option<String> {
        if self.rows == 0 {
            return None;
        }
        let mut most: Vec<(&String, &u64)> = self.spellings.iter().collect();
        most.sort_by_key(|(_, rows)| std::cmp::Reverse(**rows));
        let mut named: Vec<String> = most.iter().take(NAMED).map(|(token, n)| format!("`{token}` in {n}")).collect();
        if most.len() > NAMED {
            named.push(format!("{} more", most.len() - NAMED));
        }
        let (rows, all, named) = (self.rows, self.looked_at, named.join(", "));
        Some(match special_tokens {
            SpecialTokens::Text => format!(
                "{rows} of {all} {what} spell special tokens ({named}), which are encoded as text; set `{key}: allow` if a chat \
                 template has rendered the rows already"
            ),
            SpecialTokens::Allow => format!(
                "{rows} of {all} {what} spell special tokens ({named}), which are encoded as special tokens (`{key}: allow`)"
            ),
        })
    }
}

/// The special tokens that the row of an example spells in its prompt or its solution.
pub(super) fn spelled_in(tokenizer: &Tokenizer, example: &Example) -> BTreeSet<String> {
    let mut spelled = match &example.prompt {
        PromptText::Text(text) => match &example.control {
            // what the configuration spells is meant
            Control::In(literals) => {
                let mut spelled = BTreeSet::new();
                let mut from = 0;
                for literal in literals {
                    spelled.append(&mut tokenizer.special_tokens_in(&text[from..literal.start]));
                    from = literal.end;
                }
                spelled.append(&mut tokenizer.special_tokens_in(&text[from..]));
                spelled
            }
            Control::Everywhere => tokenizer.special_tokens_in(text),
        },
        PromptText::Chat(messages) => spelled_in_chat(tokenizer, messages, example.fields.get(TOOLS)),
    };
    spelled.extend(example.solution.iter().flat_map(|solution| tokenizer.special_tokens_in(solution)));
    spelled
}

/// The special tokens that the messages and tools of a conversation spell.
pub(super) fn spelled_in_chat(tokenizer: &Tokenizer, messages: &[Message], tools: Option<&Value>) -> BTreeSet<String> {
    let fields = messages.iter().flat_map(|message| message.fields().values());
    fields.chain(tools).flat_map(|value| tokenizer.special_tokens_in_value(value)).collect()
}
