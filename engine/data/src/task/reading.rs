//! What a rule read in a completion, beside what it compared it with.

use serde::{Deserialize, Serialize};

/// What a rule read in a completion, and the ground truth as the rule reads it, both in the rule's own spelling: two
/// readings are equal texts where the rule takes them for the same answer written in two ways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Reading {
    /// The reward's name.
    pub reward: String,
    /// What was read; absent where nothing was found.
    pub parsed: Option<String>,
    /// The ground truth.
    pub gold: Option<String>,
    /// Why the rule could not tell whether the two are equal, where it could not: the reward is 0 then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undecided: Option<String>,
}

/// Bytes of a text that a reading keeps.
const LONGEST: usize = 400;

impl Reading {
    /// A text as readings keep it: its first 400 bytes, cut between two characters.
    #[must_use]
    pub fn short(text: &str) -> String {
        let end = text.floor_char_boundary(LONGEST);
        if end == text.len() { text.to_owned() } else { format!("{}…", &text[..end]) }
    }
}
