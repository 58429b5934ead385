//! Answers that rules read in completions.

use serde::{Deserialize, Serialize};

/// The answer that a rule read in a completion, and the ground truth, both in the rule's normal form:
/// equivalent spellings of an answer are equal texts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Reading {
    /// The reward's name.
    pub reward: String,
    /// The answer; absent if none was found.
    pub parsed: Option<String>,
    /// The ground truth.
    pub gold: Option<String>,
    /// Reason why the rule could not compare the two; the reward is then 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undecided: Option<String>,
}

/// Longest text of a reading, in bytes.
const MAX_BYTES: usize = 400;

impl Reading {
    /// Shortens a text to at most 400 bytes, at a character boundary.
    pub fn short(text: &str) -> String {
        let end = text.floor_char_boundary(MAX_BYTES);
        if end == text.len() { text.to_owned() } else { format!("{}…", &text[..end]) }
    }
}
