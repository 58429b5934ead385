//! Reading of special tokens that data spell, and the characters that mark them.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// What the spelling of a special token, such as `<|im_end|>`, in data is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpecialTokens {
    /// Ordinary text.
    #[default]
    Text,
    /// That special token, for text that a chat template has rendered before.
    Allow,
}

/// Unicode noncharacters, of which one that the data do not have is the mark.
pub(super) const MARKS: RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Bytes of each of them.
pub(super) const MARK_BYTES: usize = 3;
