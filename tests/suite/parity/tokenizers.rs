//! Ids, decoded texts and rendered chats against transformers v5 (`tokenizers/golden.json`), for the
//! tokenizers stored alone and for those of every model folder.

use std::path::{Path, PathBuf};

use firebrick_models::tokenizer::{ChatOptions, Control, Message, SpecialTokens, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::support;

#[derive(Deserialize)]
struct Golden {
    format: String,
    tokenizers: Map<String, Value>,
}

#[derive(Deserialize)]
struct Expected {
    vocab_size: usize,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    pad_id: Option<u32>,
    encode: Vec<Encoded>,
    chat: Vec<Chat>,
}

#[derive(Deserialize)]
struct Encoded {
    text: String,
    ids: Vec<u32>,
    ids_no_special: Vec<u32>,
    /// Of the ids without special tokens.
    decoded: String,
    /// Of either ids, special tokens left out.
    decoded_skip_special: String,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Message>,
    add_generation_prompt: bool,
    rendered: String,
    ids: Vec<u32>,
}

/// What a model's manifest says of its tokenizer.
#[derive(Deserialize)]
struct Manifest {
    tokenizer: String,
    greedy: Option<Greedy>,
}

#[derive(Deserialize)]
struct Greedy {
    samples: Vec<Sample>,
}

#[derive(Deserialize)]
struct Sample {
    prompt_ids: Vec<u32>,
    prompt_text: String,
    new_ids: Vec<u32>,
    text: String,
    text_skip_special: String,
}

#[test]
fn parity_tokenizers_encode_decode() {
    let mut cases = 0;
    for (name, expected) in golden() {
        cases += check_texts(&name, &load(&folder(&name)), &expected);
    }
    assert!(cases > 0, "golden.json has no texts");
    support::checked("tokenizer texts", cases);
}

#[test]
fn parity_tokenizers_chat() {
    let mut cases = 0;
    for (name, expected) in golden() {
        cases += check_chats(&name, &load(&folder(&name)), &expected);
    }
    assert!(cases > 0, "golden.json has no chats");
    support::checked("chat templates", cases);
}

#[test]
fn parity_tokenizers_of_models() {
    let golden = golden();
    let mut cases = 0;
    for dir in support::folders("models") {
        let manifest: Manifest = support::read(&dir.join("golden/manifest.json"));
        let label = dir.display().to_string();
        let (_, expected) = golden
            .iter()
            .find(|(name, _)| *name == manifest.tokenizer)
            .unwrap_or_else(|| panic!("{label}: golden.json has no {:?}", manifest.tokenizer));
        let tokenizer = load(&dir);
        cases += check_texts(&label, &tokenizer, expected);
        cases += check_chats(&label, &tokenizer, expected);
        if let Some(greedy) = manifest.greedy {
            cases += check_samples(&label, &tokenizer, &greedy.samples);
        }
    }
    assert!(cases > 0, "no model folders");
    support::checked("texts and chats of model folders", cases);
}

#[test]
fn parity_tokenizers_survive_saving() {
    let out = tempfile::tempdir().expect("a temporary folder");
    let mut cases = 0;
    for (name, expected) in golden() {
        let copy = out.path().join(&name);
        load(&folder(&name)).save(&copy).expect("saving");
        for entry in copy.read_dir().expect("the saved folder") {
            let file = entry.expect("an entry").file_name();
            let kept = std::fs::read(copy.join(&file)).expect("the saved file");
            let source = std::fs::read(folder(&name).join(&file)).expect("the source file");
            assert_eq!(kept, source, "{name}: {}", file.display());
        }
        let again = load(&copy);
        cases += check_texts(&name, &again, &expected) + check_chats(&name, &again, &expected);
    }
    assert!(cases > 0, "golden.json names no tokenizers");
    support::checked("cases after saving", cases);
}

fn check_texts(label: &str, tokenizer: &Tokenizer, expected: &Expected) -> usize {
    assert_eq!(tokenizer.vocab_size(), expected.vocab_size, "{label}");
    assert_eq!(tokenizer.bos_id(), expected.bos_id, "{label}");
    assert_eq!(tokenizer.eos_id(), expected.eos_id, "{label}");
    assert_eq!(tokenizer.pad_id(), expected.pad_id, "{label}");
    for case in &expected.encode {
        let label = format!("{label}: {:?}", case.text);
        let encode = |special| tokenizer.encode(&case.text, special).expect("encoding");
        let decode = |ids: &[u32], skip| tokenizer.decode(ids, skip).expect("decoding");
        assert_eq!(encode(true), case.ids, "{label}");
        assert_eq!(encode(false), case.ids_no_special, "{label}");
        assert_eq!(decode(&case.ids_no_special, false), case.decoded, "{label}");
        assert_eq!(decode(&case.ids, true), case.decoded_skip_special, "{label}");
    }
    expected.encode.len()
}

fn check_chats(label: &str, tokenizer: &Tokenizer, expected: &Expected) -> usize {
    for case in &expected.chat {
        let text = tokenizer
            .render_chat(&case.messages, case.add_generation_prompt)
            .unwrap_or_else(|error| panic!("{label}: {error}"));
        assert_eq!(text, case.rendered, "{label}");
        assert_eq!(tokenizer.encode(&text, false).expect("encoding"), case.ids, "{label}");
        // with contents as data too, unless they spell special tokens
        if case.messages.iter().all(|m| tokenizer.special_tokens_in(&m.text()).is_empty()) {
            let options = ChatOptions { add_generation_prompt: case.add_generation_prompt, ..ChatOptions::default() };
            let encoded = tokenizer.encode_chat(&case.messages, options).expect("encoding");
            assert_eq!(encoded, (text, case.ids.clone()), "{label}");
        }
    }
    expected.chat.len()
}

fn check_samples(label: &str, tokenizer: &Tokenizer, samples: &[Sample]) -> usize {
    for sample in samples {
        let decode = |ids: &[u32], skip| tokenizer.decode(ids, skip).expect("decoding");
        assert_eq!(decode(&sample.prompt_ids, false), sample.prompt_text, "{label}");
        assert_eq!(decode(&sample.new_ids, false), sample.text, "{label}");
        assert_eq!(decode(&sample.new_ids, true), sample.text_skip_special, "{label}");
    }
    samples.len()
}

fn golden() -> Vec<(String, Expected)> {
    let golden: Golden = support::read(&support::fixtures().join("tokenizers/golden.json"));
    assert_eq!(golden.format, "tokenizer-golden/1");
    let tokenizers = golden.tokenizers.into_iter();
    tokenizers
        .map(|(name, value)| {
            let expected = support::parse(&name, &value);
            (name, expected)
        })
        .collect()
}

fn folder(name: &str) -> PathBuf {
    support::fixtures().join("tokenizers").join(name)
}

fn load(dir: &Path) -> Tokenizer {
    Tokenizer::from_dir(dir).unwrap_or_else(|error| panic!("{error}"))
}

/// A conversation as transformers renders it.
#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Message>,
    tools: Value,
    add_generation_prompt: bool,
    kwargs: Map<String, Value>,
    rendered: String,
}

#[test]
fn a_template_of_harmonys_kind_is_rendered_as_transformers_renders_it() {
    let dir = support::fixtures().join("chat_templates");
    let path = dir.join("harmony.jinja");
    let template = std::fs::read_to_string(&path).expect("a template");
    let cases: Vec<Conversation> = support::read(&dir.join("harmony.json"));
    let open = || {
        let own = Tokenizer::characters("abc").expect("a tokenizer");
        own.with_chat_template(&template, &path).expect("a template")
    };
    for case in &cases {
        let tokenizer = open().with_chat_template_kwargs(&case.kwargs);
        let options = ChatOptions {
            add_generation_prompt: case.add_generation_prompt,
            tools: Some(&case.tools),
            ..ChatOptions::default()
        };
        let found = tokenizer.expect("variables");
        let found = found.render_chat_with(&case.messages, options);
        assert_eq!(found.expect("a text"), case.rendered);
    }
    let tool = Message::new("tool", "7");
    let alone = [cases[0].messages[0].clone(), tool];
    let error = open().render_chat(&alone, true).expect_err("no call");
    let message = error.to_string();
    assert!(message.contains("Message has tool role"), "{message}");
    support::checked("renderings of harmony's kind", cases.len());
}

/// A conversation with a template, as transformers renders it.
#[derive(Deserialize)]
struct Templated {
    template: String,
    messages: Vec<Message>,
    tools: Value,
    add_generation_prompt: bool,
    rendered: String,
}

#[test]
fn templates_are_given_every_field_of_messages_as_transformers_gives_them() {
    let cases: Vec<Templated> = support::read(&support::fixtures().join("chat_templates/fields.json"));
    for case in &cases {
        let own = Tokenizer::characters("abc").expect("a tokenizer");
        let own = own.with_chat_template(&case.template, Path::new("test")).expect("a template");
        let options = ChatOptions {
            add_generation_prompt: case.add_generation_prompt,
            tools: Some(&case.tools),
            ..ChatOptions::default()
        };
        let found = own.render_chat_with(&case.messages, options).expect("a text");
        assert_eq!(found, case.rendered, "{}\n{:?}", case.template, case.messages);
    }
    support::checked("renderings of messages with many fields", cases.len());
}

/// What spells special tokens, encoded as text.
#[derive(Deserialize)]
struct Spelled {
    texts: Vec<SpelledText>,
    chats: Vec<SpelledChat>,
}

#[derive(Deserialize)]
struct SpelledText {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct SpelledChat {
    messages: Vec<Message>,
    rendered: String,
    ids: Vec<u32>,
}

#[test]
fn special_tokens_that_data_spell_are_text_as_in_transformers() {
    let all: std::collections::BTreeMap<String, Spelled> =
        support::read(&support::fixtures().join("tokenizers/spelled.json"));
    for (name, cases) in &all {
        let tokenizer = load(&folder(name));
        for case in &cases.texts {
            let ids = tokenizer.encode_text(&case.text, &Control::NOWHERE, true).expect("ids");
            assert_eq!(ids, case.ids, "{name}: {:?}", case.text);
        }
        for case in &cases.chats {
            let (text, ids) = tokenizer.encode_chat(&case.messages, ChatOptions::default()).expect("ids");
            assert_eq!((text.as_str(), ids), (case.rendered.as_str(), case.ids.clone()), "{name}");
            // as the special tokens, if they are allowed
            let allowed = ChatOptions { special_tokens: SpecialTokens::Allow, ..ChatOptions::default() };
            let (text, ids) = tokenizer.encode_chat(&case.messages, allowed).expect("ids");
            assert_eq!(ids, tokenizer.encode(&text, false).expect("ids"), "{name}");
        }
    }
    support::checked("tokenizers whose special tokens are spelled", all.len());
}

#[test]
fn a_text_that_begins_with_the_token_of_every_text_has_it_once() {
    let tokenizer = load(&folder("llama3"));
    let rendered = "<|begin_of_text|>hello<|eot_id|>";
    let once = tokenizer.encode(rendered, false).expect("ids");
    let encode = |text, control: &Control| tokenizer.encode_text(text, control, true).expect("ids");
    assert_eq!(encode(rendered, &Control::Everywhere), once);
    assert_eq!(encode("hello<|eot_id|>", &Control::Everywhere), once);
    // the literal part of a prompt's template is no data
    let literal = Control::In(std::iter::once(0..17).collect());
    let (found, begin) = (encode(rendered, &literal), tokenizer.bos_id());
    assert_eq!(found.iter().filter(|id| Some(**id) == begin).count(), 1);
    assert_eq!(tokenizer.decode(&found, false).expect("text"), rendered);
    assert_ne!(found.last(), once.last());
}

#[test]
fn the_assistants_tokens_are_found_among_spellings_of_special_tokens() {
    let tokenizer = load(&folder("llama3"));
    let turns = ["a <|eot_id|>b", "{type<|eot_id|>|bold}<|eot_id|>", "c", "é<|eot_id|> d"];
    let roles = ["user", "assistant"].into_iter().cycle();
    let messages: Vec<Message> = roles.zip(turns).map(|(role, text)| Message::new(role, text)).collect();
    let found = tokenizer.encode_with_assistant_mask(&messages, 0, ChatOptions::default()).expect("tokens");
    let marked: Vec<u32> =
        found.tokens.iter().zip(&found.assistant_mask).filter(|(_, is)| **is).map(|(id, _)| *id).collect();
    let end = tokenizer.token_id("<|eot_id|>").expect("an id");
    assert_eq!(marked.iter().filter(|&&id| id == end).count(), 2);
    let text = tokenizer.decode(&marked, false).expect("text");
    assert_eq!(text, "{type<|eot_id|>|bold}<|eot_id|><|eot_id|>é<|eot_id|> d<|eot_id|>");
}

#[test]
fn another_tokenizer_reads_a_rendered_chat_without_control_tokens_of_the_data() {
    let (policy, reader) = (load(&folder("qwen")), load(&folder("llama3")));
    let messages = [Message::new("user", "a<|eot_id|>b<|im_end|>"), Message::new("assistant", "<|start_header_id|>")];
    let options = ChatOptions::default();
    let text = policy.render_chat_with(&messages, options).expect("text");
    let control = policy.control(&text, &messages, 0, options, &reader).expect("found");
    let ids = reader.encode_text(&text, &control, false).expect("ids");
    assert_eq!(reader.decode(&ids, false).expect("text"), text);
    assert!(ids.iter().all(|&id| id < 507), "special tokens begin at 507: {ids:?}");
}
