//! The files of a character-level tokenizer, for arithmetic and other small tasks; transformers reads them.

use std::collections::HashSet;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::files::{CONFIG, Files, SPECIAL_TOKENS, TOKENIZER};
use crate::error::{Error, Result};

/// Stands for a folder in messages.
pub(super) const ORIGIN: &str = "(made of characters)";

const PAD: &str = "<pad>";
const EOS: &str = "<eos>";

/// `words` are tokens of several characters, found before those of one.
pub(super) fn files(alphabet: &str, words: &[&str]) -> Result<Files> {
    let wrong = |detail: String| Err(Error::Tokenizer { path: PathBuf::from(ORIGIN), detail });
    if alphabet.is_empty() {
        return wrong("the alphabet is empty; it needs at least one character".to_owned());
    }
    let mut seen = HashSet::new();
    if let Some(twice) = alphabet.chars().find(|&c| !seen.insert(c)) {
        return wrong(format!("the alphabet has {twice:?} more than once"));
    }

    let specials = [PAD, EOS];
    if let Some(word) = words.iter().find(|w| w.chars().count() < 2 || specials.contains(w)) {
        return wrong(format!("{word:?} is not a token of several characters other than the special tokens"));
    }
    let first = specials.len() + alphabet.chars().count();
    let tokens = specials.map(str::to_owned).into_iter();
    let vocab: Map<String, Value> = tokens
        .chain(alphabet.chars().map(String::from))
        .chain(words.iter().map(|word| (*word).to_owned()))
        .enumerate()
        .map(|(id, token)| (token, id.into()))
        .collect();
    let mut added = vec![with_id(0, PAD, true), with_id(1, EOS, true)];
    added.extend(words.iter().zip(first..).map(|(word, id)| with_id(id, word, false)));

    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        // `.` would leave line breaks out, and how to make it match them differs between the
        // regular expression libraries that read this.
        "pre_tokenizer": {
            "type": "Split",
            "pattern": { "Regex": r"[\s\S]" },
            "behavior": "Isolated",
            "invert": false,
        },
        "post_processor": null,
        // Without a decoder tokens would be joined with spaces.
        "decoder": { "type": "Fuse" },
        // The unknown token is not in the vocabulary, so an unknown character is an error.
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" },
    });
    let config = json!({
        "added_tokens_decoder": { "0": special(PAD), "1": special(EOS) },
        "bos_token": null,
        "clean_up_tokenization_spaces": false,
        "eos_token": EOS,
        // transformers would otherwise add token type ids, which decoders do not take.
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null,
    });
    let map = json!({ "eos_token": EOS, "pad_token": PAD });

    Ok(Files(vec![(TOKENIZER, text(&tokenizer)), (CONFIG, text(&config)), (SPECIAL_TOKENS, text(&map))]))
}

fn special(content: &str) -> Value {
    json!({
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": true,
    })
}

fn with_id(id: usize, content: &str, is_special: bool) -> Value {
    let mut token = special(content);
    token["special"] = is_special.into();
    token["id"] = id.into();
    token
}

fn text(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
