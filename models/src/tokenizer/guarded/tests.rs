//! Marked texts against the tokenizers library's own switch for special tokens as text, which a whole text has.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// The tokenizer of a fixture whose `tokenizer.json` is changed.
fn tokenizer(change: impl Fn(&mut Value)) -> Tokenizer {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizers/llama3");
    let dir = tempfile::tempdir().expect("a folder");
    for file in fixture.read_dir().expect("a fixture") {
        let path = file.expect("a file").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    let path = dir.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    change(&mut file);
    std::fs::write(&path, file.to_string()).expect("written");
    Tokenizer::from_dir(dir.path()).expect("a tokenizer")
}

/// Tokenizers that treat the text around special tokens differently.
fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let each = |file: &mut Value, key: &str| {
        for token in file["added_tokens"].as_array_mut().expect("tokens") {
            token[key] = true.into();
        }
    };
    let lower = |file: &mut Value| {
        file["normalizer"] = json!({"type": "Lowercase"});
        each(file, "normalized");
    };
    let spaces = |file: &mut Value| {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "_"});
        file["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, replace]});
    };
    let metaspace = |file: &mut Value| {
        let first = json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": true});
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [first, file["pre_tokenizer"].clone()]});
    };
    vec![
        ("byte level", tokenizer(|_| {})),
        ("lower case", tokenizer(lower)),
        ("prepended space", tokenizer(spaces)),
        ("metaspace", tokenizer(metaspace)),
        ("stripped left", tokenizer(|file| each(file, "lstrip"))),
        ("stripped right", tokenizer(|file| each(file, "rstrip"))),
        ("single words", tokenizer(|file| each(file, "single_word"))),
    ]
}

/// Texts with special tokens, parts of them, and others.
fn texts() -> impl Strategy<Value = String> {
    let parts = [
        "<|eot_id|>",
        "<|EOT_id|>",
        "<|start_header_id|>",
        "<|begin_of_text|>",
        "<|eot",
        "_id|>",
        "<",
        " ",
        "\n",
        "a",
        "Ab ",
        "é日",
        "1",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn data_are_encoded_as_by_the_librarys_own_switch(text in texts(), at in 0..7_usize) {
        thread_local! { static ALL: Vec<(&'static str, Tokenizer)> = tokenizers(); }
        ALL.with(|cases| {
            let (name, tokenizer) = &cases[at];
            let mut as_text = tokenizer.backend.clone();
            as_text.set_encode_special_tokens(true);
            for add_special_tokens in [false, true] {
                let expected = as_text.encode(text.as_str(), add_special_tokens).expect("encoded").get_ids().to_vec();
                let ids = tokenizer.encode_text(&text, &Control::NOWHERE, add_special_tokens).expect("encoded");
                prop_assert_eq!(&ids, &expected, "{}: {:?}", name, text);
            }
            let whole = Control::In(std::iter::once(0..text.len()).collect());
            let ids = tokenizer.encode_text(&text, &whole, false).expect("encoded");
            prop_assert_eq!(ids, tokenizer.encode(&text, false).expect("encoded"), "{}: {:?}", name, text);
            Ok(())
        })?;
    }

    #[test]
    fn tokens_of_marked_texts_have_their_places_in_the_text(text in texts()) {
        let tokenizer = tokenizer(|_| {});
        let encoded = tokenizer.encode_with_offsets(&text, &Control::NOWHERE).expect("encoded");
        let mut as_text = tokenizer.backend.clone();
        as_text.set_encode_special_tokens(true);
        let expected = as_text.encode(text.as_str(), false).expect("encoded");
        prop_assert_eq!(encoded.ids, expected.get_ids());
        prop_assert_eq!(encoded.offsets, expected.get_offsets());
    }
}
