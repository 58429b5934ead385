//! Conversations of several turns by the chat templates of some model families: their tokens and the trained ones,
//! against TRL's templates for training (`chat_templates/training_turns.json`).

use std::path::Path;
use std::sync::Arc;

use firebrick_engine::task::{ToolParser, ToolRole};
use firebrick_engine::turns::TurnTemplate;
use firebrick_models::tokenizer::{ChatOptions, ChatTokens, EndTokens, Message, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::support::{checked, fixtures, is_foreign, parse, read};

#[derive(Deserialize)]
struct Case {
    template: String,
    names: Map<String, Value>,
    special: Vec<String>,
    conversations: Vec<Conversation>,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
    text: String,
    scored: Vec<String>,
}

impl Conversation {
    fn messages(&self) -> Vec<Message> {
        parse("messages", &Value::Array(self.messages.clone()))
    }
}

impl Case {
    fn tokenizer(&self) -> Tokenizer {
        family_tokenizer(&self.jinja(), &self.names, &self.special)
    }

    fn jinja(&self) -> String {
        jinja(&self.template)
    }
}

/// An original template.
pub(super) fn jinja(name: &str) -> String {
    let file = fixtures().join("chat_templates").join(format!("{name}.jinja"));
    std::fs::read_to_string(file).expect("a template")
}

/// A small vocabulary with a family's special tokens and its template.
pub(super) fn family_tokenizer(template: &str, names: &Map<String, Value>, special: &[String]) -> Tokenizer {
    let dir = tempfile::tempdir().expect("a folder");
    let vocabulary = fixtures().join("tokenizers/qwen/tokenizer.json");
    std::fs::copy(vocabulary, dir.path().join("tokenizer.json")).expect("copied");
    let mut config = names.clone();
    config.insert("extra_special_tokens".to_owned(), json!(special));
    let config = Value::Object(config).to_string();
    std::fs::write(dir.path().join("tokenizer_config.json"), config).expect("written");
    std::fs::write(dir.path().join("chat_template.jinja"), template).expect("written");
    Tokenizer::from_dir(dir.path()).expect("a tokenizer")
}

fn cases() -> Vec<Case> {
    let path = fixtures().join("chat_templates/training_turns.json");
    if is_foreign() && !path.is_file() { Vec::new() } else { read(&path) }
}

/// The text of each run of marked tokens.
fn scored(tokenizer: &Tokenizer, encoded: &ChatTokens) -> Vec<String> {
    let pairs: Vec<(u32, bool)> = encoded.tokens.iter().copied().zip(encoded.assistant_mask.iter().copied()).collect();
    let runs = pairs.chunk_by(|a, b| a.1 == b.1).filter(|run| run[0].1);
    runs.map(|run| {
        let ids: Vec<u32> = run.iter().map(|(id, _)| *id).collect();
        tokenizer.decode(&ids, false).expect("a text")
    })
    .collect()
}

/// Without the day, which gpt-oss's template writes.
pub(super) fn undated(text: &str) -> String {
    const DATE: &str = "Current date: ";
    match text.find(DATE) {
        Some(at) => {
            let at = at + DATE.len();
            format!("{}0{}", &text[..at], &text[at + "2026-11-27".len()..])
        }
        None => text.to_owned(),
    }
}

#[test]
fn the_turns_of_a_conversation_are_those_that_trl_trains_on() {
    let mut turns = 0;
    for case in cases() {
        let tokenizer = case.tokenizer();
        for conversation in &case.conversations {
            let messages = conversation.messages();
            let options = ChatOptions { tools: conversation.tools.as_ref(), ..ChatOptions::default() };
            let encoded = tokenizer.encode_with_assistant_mask(&messages, 0, options);
            let encoded = encoded.unwrap_or_else(|error| panic!("{}: {error}", case.template));
            let text = tokenizer.decode(&encoded.tokens, false).expect("a text");
            assert_eq!(undated(&text), conversation.text, "{}", case.template);
            assert_eq!(scored(&tokenizer, &encoded), conversation.scored, "{}: {text}", case.template);
            turns += conversation.scored.len();
        }
    }
    if !is_foreign() || turns > 0 {
        checked("turns of conversations", turns);
    }
}

#[test]
fn the_turns_of_a_template_that_is_set_are_found_where_it_writes_them() {
    for case in cases() {
        let tokenizer = case.tokenizer().with_chat_template(&case.jinja(), Path::new("set")).expect("a template");
        assert_eq!(tokenizer.training_family(), None);
        // DeepSeek's takes no arguments that are objects
        let is_written = |own: &&Conversation| own.tools.is_none() || case.template != "deepseekv3";
        for conversation in case.conversations.iter().filter(is_written) {
            let messages = conversation.messages();
            let options = ChatOptions { tools: conversation.tools.as_ref(), ..ChatOptions::default() };
            let encoded = tokenizer.encode_with_assistant_mask(&messages, 0, options);
            let encoded = encoded.unwrap_or_else(|error| panic!("{}: {error}", case.template));
            let turns = conversation.messages.iter().filter(|message| message["role"] == "assistant");
            let (found, turns) = (scored(&tokenizer, &encoded), turns.collect::<Vec<_>>());
            assert_eq!(found.len(), turns.len(), "{}: {found:?}", case.template);
            for ((found, expected), turn) in found.iter().zip(&conversation.scored).zip(turns) {
                // the words behind the reasoning, and the token that ends them
                let words = turn["content"].as_str().unwrap_or_default();
                let words = words.rsplit("</think>").next().unwrap_or_default().trim();
                let end = &expected[expected.rfind(words).expect("the words")..];
                assert!(found.ends_with(end), "{}: {found:?} does not end with {end:?}", case.template);
            }
        }
    }
}

#[test]
fn rollouts_of_several_turns_use_the_templates_of_families_that_write_turns_otherwise() {
    let cases = cases();
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]);
    let prompt: Vec<Message> = parse("a prompt", &json!([{"role": "user", "content": "ab"}]));
    if cases.is_empty() {
        return;
    }
    let of = |name: &str| cases.iter().find(|case| case.template == name).expect(name);
    for (name, family, end, answer) in [
        (
            "qwen3",
            "Qwen 3",
            "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n4711\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3_5_think",
            "Qwen 3.5",
            "<|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n4711\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "deepseekv3",
            "DeepSeek",
            "<｜end▁of▁sentence｜>",
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4711<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        ),
    ] {
        let tokenizer = of(name).tokenizer();
        assert_eq!(tokenizer.training_family(), Some(family));
        let tokenizer = Arc::new(tokenizer.for_turns());
        let ends = EndTokens::new(&[], &tokenizer);
        let (format, role) = (ToolParser::Hermes, ToolRole::Tool);
        let call = format.example();
        let template = TurnTemplate::new(&tokenizer, &ends.ids, &tools, &prompt, format, role);
        let template = template.unwrap_or_else(|error| panic!("{name}: {error}"));
        let turn = json!({"role": "assistant", "content": format!("<think>\no\n</think>\n\n{call}")});
        let told = [prompt.clone(), parse("a turn", &json!([turn]))].concat();
        let said = parse::<Vec<Message>>("an answer", &json!([{"role": "tool", "content": "4711"}]));
        let between = template.between(tokenizer.token_id(end), &told, &said).expect("tokens");
        assert_eq!(tokenizer.decode(&between, false).expect("a text"), answer, "{name}");
    }
}
