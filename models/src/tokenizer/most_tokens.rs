//! How many tokens texts of a length can have.

use serde_json::Value;
use tokenizers::ModelWrapper;

use super::Tokenizer;

/// Parts of a tokenizer under which no token stands for less than a character of ASCII.
const PLAIN: [&str; 14] = [
    "Sequence",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "Split",
    "ByteLevel",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
];

/// Tokens for each byte where parts write marks between words, such as `▁`, which may have no token of their own.
const MARKED: usize = 3;

impl Tokenizer {
    /// Most tokens of the texts that have as many characters of ASCII as this one or fewer, special tokens apart. This
    /// one has `tokens`: a tokenizer with one token a character needs no more for the others.
    #[must_use]
    pub fn most_tokens(&self, text: &str, tokens: usize) -> usize {
        let normalizer = serde_json::to_value(self.backend.get_normalizer()).unwrap_or_default();
        let splitter = serde_json::to_value(self.backend.get_pre_tokenizer()).unwrap_or_default();
        let one_a_character = splitter["type"] == "Split"
            && splitter["behavior"] == "Isolated"
            && splitter["pattern"]["Regex"] == r"[\s\S]"
            && normalizer.is_null()
            && matches!(self.backend.get_model(), ModelWrapper::WordLevel(_));
        if one_a_character {
            return tokens;
        }
        let added = self.backend.encode_fast("", true).map_or(0, |own| own.get_ids().len());
        let each = if is_plain(&normalizer) && is_plain(&splitter) { 1 } else { MARKED };
        text.len() * each + added
    }
}

/// Whether a part, and all parts in it, add nothing to a text.
fn is_plain(part: &Value) -> bool {
    match part {
        Value::Object(fields) => {
            let kind = fields.get("type").and_then(Value::as_str);
            let known = kind.is_none_or(|kind| PLAIN.contains(&kind));
            known && fields.get("add_prefix_space") != Some(&Value::Bool(true)) && fields.values().all(is_plain)
        }
        Value::Array(parts) => parts.iter().all(is_plain),
        _ => true,
    }
}
