//! Bound on the tokens of texts of a length.

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
        let added = self.backend.encode_fast("", true).map_or(0, |encoding| encoding.get_ids().len());
        let each = if is_plain(&normalizer) && is_plain(&splitter) { 1 } else { MARKED };
        text.len() * each + added
    }
}

/// True if a part, and all parts in it, add nothing to a text.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;
    use std::path::Path;

    #[test]
    fn no_text_of_as_many_characters_has_more_tokens() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
        let mut seen = 0;
        for entry in std::fs::read_dir(models).unwrap() {
            let Ok(tokenizer) = Tokenizer::from_dir(&entry.unwrap().path()) else { continue };
            seen += 1;
            let mut draws = Stream::new(seen, 0);
            for length in [1, 7, 40] {
                let most = tokenizer.most_tokens(&"a".repeat(length), 0);
                for _ in 0..50 {
                    let text: String = (0..length).map(|_| char::from(b' ' + draws.below(95) as u8)).collect();
                    // a character without a token
                    let Ok(ids) = tokenizer.encode(&text, true) else { continue };
                    assert!(ids.len() <= most, "{text:?} has {} tokens, more than {most}: {tokenizer:?}", ids.len());
                }
            }
        }
        assert!(seen > 3, "{seen} tokenizers");
    }

    #[test]
    fn with_a_token_a_character_the_longest_text_is_the_bound() {
        let tokenizer = Tokenizer::characters_and_words("0123456789+=", &["<user>"]).unwrap();
        let text = "<user>99+99=";
        let tokens = tokenizer.encode(text, false).unwrap().len();
        assert_eq!(tokenizer.most_tokens(text, tokens), 7);
    }
}
