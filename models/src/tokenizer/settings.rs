//! Settings of `tokenizer_config.json` and `special_tokens_map.json`: special tokens, their roles, and the chat
//! template.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::files::{CHAT_TEMPLATE, CONFIG, Files, SPECIAL_TOKENS};
use crate::checkpoint::json::parse_object;
use crate::error::{Error, Result};

/// The roles transformers knows; templates see each one that is set as a variable of that name.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Lists of further special tokens: the v5 name and the v4 one, which counts without the other.
const LISTS: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// The chat template, if any.
pub(super) enum TemplateSource {
    Absent,
    Text(String),
    /// A list of named templates without a `default`.
    NoDefault(Vec<String>),
}

/// Settings of a tokenizer beyond `tokenizer.json`.
pub(super) struct Settings {
    /// Role (`eos_token`, …) to token.
    pub named: BTreeMap<String, String>,
    /// Every token that is to be special.
    pub special: Vec<AddedToken>,
    /// Tokens of `added_tokens_decoder`, by their ids.
    pub declared: BTreeMap<u32, AddedToken>,
    pub chat_template: TemplateSource,
    clean_up: bool,
    clean_up_bpe: bool,
}

impl Settings {
    pub(super) fn parse(dir: &Path, files: &Files) -> Result<Self> {
        let mut config = object(dir, CONFIG, files)?;
        let declared = declared_tokens(dir, &config)?;
        // Since v5 the map only speaks where the configuration does not list its added tokens.
        if !config.contains_key("added_tokens_decoder") {
            config.extend(object(dir, SPECIAL_TOKENS, files)?);
        }

        let mut named = BTreeMap::new();
        let mut special = Vec::new();
        for role in ROLES {
            if let Some(token) = config.get(role).and_then(special_token) {
                named.insert(role.to_owned(), token.content.clone());
                special.push(token);
            }
        }
        // Roles of one model family (`image_token`, …): special, but no variables of templates.
        let roles = config.iter().filter(|(key, _)| key.ends_with("_token") && !ROLES.contains(&key.as_str()));
        special.extend(roles.filter_map(|(_, value)| special_token(value)));
        if let Some(list) = LISTS.iter().find_map(|&name| further_tokens(config.get(name)?)) {
            special.extend(list);
        }

        let flag = |name: &str| config.get(name).and_then(Value::as_bool).unwrap_or(false);
        Ok(Self {
            named,
            special,
            declared,
            chat_template: template_source(dir, files, config.get("chat_template"))?,
            clean_up: flag("clean_up_tokenization_spaces"),
            clean_up_bpe: flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"),
        })
    }

    /// True if decoding joins punctuation to words. Many BPE checkpoints carry the setting by accident, where it would
    /// delete real spaces, so v5 ignores it there unless told twice.
    pub(super) fn cleans_up(&self, bpe: bool) -> bool {
        self.clean_up && (!bpe || self.clean_up_bpe)
    }
}

/// The JSON object in file `name`, empty when there is no such file.
fn object(dir: &Path, name: &str, files: &Files) -> Result<Map<String, Value>> {
    files.get(name).map_or_else(|| Ok(Map::new()), |bytes| parse_object(&dir.join(name), bytes))
}

fn declared_tokens(dir: &Path, config: &Map<String, Value>) -> Result<BTreeMap<u32, AddedToken>> {
    let wrong = |detail: String| Error::Config { path: dir.join(CONFIG), detail };
    let Some(value) = config.get("added_tokens_decoder") else {
        return Ok(BTreeMap::new());
    };
    let Value::Object(entries) = value else {
        return Err(wrong(format!("`added_tokens_decoder` must map token ids to tokens, found {value}")));
    };
    entries
        .iter()
        .map(|(id, entry)| {
            let number = id
                .parse()
                .map_err(|_| wrong(format!("`added_tokens_decoder` has the key {id:?}, which is not a token id")))?;
            let token = added_token(entry, false)
                .ok_or_else(|| wrong(format!("`added_tokens_decoder` has no content for token {id}: {entry}")))?;
            Ok((number, token))
        })
        .collect()
}

fn special_token(value: &Value) -> Option<AddedToken> {
    added_token(value, true).map(|token| token.special(true))
}

/// A token written as a string or as an object with its matching rules; null and empty are none.
fn added_token(value: &Value, special: bool) -> Option<AddedToken> {
    let content = value.as_str().or_else(|| value.get("content")?.as_str())?;
    if content.is_empty() {
        return None;
    }
    let rule = |name: &str, otherwise| value.get(name).and_then(Value::as_bool).unwrap_or(otherwise);
    let special = rule("special", special);
    Some(
        AddedToken::from(content, special)
            .single_word(rule("single_word", false))
            .lstrip(rule("lstrip", false))
            .rstrip(rule("rstrip", false))
            .normalized(rule("normalized", !special)),
    )
}

/// A list of tokens or, as multimodal checkpoints have it, a map of roles to tokens.
fn further_tokens(value: &Value) -> Option<Vec<AddedToken>> {
    let tokens: Vec<AddedToken> = match value {
        Value::Array(list) => list.iter().filter_map(special_token).collect(),
        Value::Object(roles) => roles.values().filter_map(special_token).collect(),
        _ => return None,
    };
    (!tokens.is_empty()).then_some(tokens)
}

fn template_source(dir: &Path, files: &Files, value: Option<&Value>) -> Result<TemplateSource> {
    if let Some(bytes) = files.get(CHAT_TEMPLATE) {
        let text = std::str::from_utf8(bytes).map_err(|cause| Error::Config {
            path: dir.join(CHAT_TEMPLATE),
            detail: format!("expected UTF-8 text: {cause}"),
        })?;
        // Python's text mode, with which transformers reads it.
        return Ok(TemplateSource::Text(text.replace("\r\n", "\n")));
    }
    match value {
        None | Some(Value::Null) => Ok(TemplateSource::Absent),
        Some(Value::String(text)) => Ok(TemplateSource::Text(text.clone())),
        Some(Value::Array(list)) => {
            let templates: Vec<(&str, &str)> = list
                .iter()
                .filter_map(|one| Some((one.get("name")?.as_str()?, one.get("template")?.as_str()?)))
                .collect();
            Ok(match templates.iter().find(|(name, _)| *name == "default") {
                Some((_, text)) => TemplateSource::Text((*text).to_owned()),
                None => TemplateSource::NoDefault(templates.iter().map(|(name, _)| (*name).to_owned()).collect()),
            })
        }
        Some(other) => Err(Error::Config {
            path: dir.join(CONFIG),
            detail: format!("`chat_template` must be a string or a list of {{name, template}}, found {other}"),
        }),
    }
}
