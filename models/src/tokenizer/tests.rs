use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::*;

/// A folder with a character tokenizer, on top of which a test writes its own files.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    Tokenizer::characters("abc .!").unwrap().save(dir.path()).unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn with_template(template: &str) -> Tokenizer {
    let dir = folder(&[("chat_template.jinja", template)]);
    Tokenizer::from_dir(dir.path()).unwrap()
}

fn render(template: &str) -> String {
    with_template(template).render_chat(&hello(), true).unwrap()
}

fn hello() -> Vec<Message> {
    vec![Message::new("user", " <b>\"hé\"</b>\n")]
}

#[test]
fn a_folder_without_tokenizer_json_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_dir(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::MissingFile { file, .. } if file == "tokenizer.json"));
    assert!(error.to_string().contains("Hugging Face checkpoint"), "{error}");

    std::fs::write(dir.path().join("tokenizer.model"), "old").unwrap();
    let error = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("save_pretrained"), "{error}");
}

#[test]
fn corrupt_files_are_named() {
    let dir = folder(&[("tokenizer.json", "{\"version\": \"1.0\", ")]);
    let error = Tokenizer::from_dir(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::Tokenizer { path, .. } if path.ends_with("tokenizer.json")));

    for text in ["[1]", "{", r#"{"added_tokens_decoder": {"x": "y"}}"#, r#"{"chat_template": 3}"#] {
        let dir = folder(&[("tokenizer_config.json", text)]);
        let error = Tokenizer::from_dir(dir.path()).unwrap_err();
        assert!(
            matches!(&error, Error::Config { path, .. } if path.ends_with("tokenizer_config.json")),
            "{text}: {error}"
        );
    }
}

#[test]
fn parts_that_do_not_fit_each_other_are_refused_when_they_are_read() {
    let special = json!([{"SpecialToken": {"id": "none", "type_id": 0}}]);
    let second = json!([{"Sequence": {"id": "B", "type_id": 0}}]);
    for single in [special, second] {
        let dir = folder(&[]);
        let path = dir.path().join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        file["post_processor"] =
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}});
        std::fs::write(&path, file.to_string()).unwrap();
        let error = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains("do not fit each other"), "{error}");
    }
}

#[test]
fn characters_round_trip() {
    let alphabet = "0123456789+= \n<>é日🦀e\u{301}";
    let tokenizer = Tokenizer::characters(alphabet).unwrap();
    assert_eq!((tokenizer.pad_id(), tokenizer.eos_id()), (Some(0), Some(1)));
    assert_eq!((tokenizer.bos_id(), tokenizer.has_chat_template()), (None, false));
    assert_eq!(tokenizer.vocab_size(), 2 + alphabet.chars().count());

    let ids = tokenizer.encode(alphabet, true).unwrap();
    assert_eq!(ids, (2..tokenizer.vocab_size() as u32).collect::<Vec<_>>());
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), alphabet);

    assert_eq!(tokenizer.encode("1+1<eos>", true).unwrap(), [3, 12, 3, 1]);
    assert_eq!(tokenizer.decode(&[3, 12, 3, 1, 0, 999], false).unwrap(), "1+1<eos><pad>");
    assert_eq!(tokenizer.decode(&[3, 12, 3, 1, 0], true).unwrap(), "1+1");
    assert!(tokenizer.encode("", true).unwrap().is_empty());
}

#[test]
fn an_unknown_character_is_named() {
    let tokenizer = Tokenizer::characters("ab").unwrap();
    let error = tokenizer.encode("ab<eos>aé", false).unwrap_err().to_string();
    assert!(error.contains("'é'") && error.contains("U+00E9"), "{error}");
    // The angle bracket is known only as part of the special token.
    let error = tokenizer.encode("<eos>a<", false).unwrap_err().to_string();
    assert!(error.contains("'<'"), "{error}");
}

#[test]
fn an_alphabet_names_each_character_once() {
    assert!(Tokenizer::characters("").is_err());
    let error = Tokenizer::characters("abca").unwrap_err().to_string();
    assert!(error.contains("'a'"), "{error}");
}

#[test]
fn saved_files_are_the_loaded_ones_and_give_the_same_ids() {
    let source = folder(&[("chat_template.jinja", "{{ messages[0].content }}"), ("vocab.json", "{ \"kept\":1}")]);
    let loaded = Tokenizer::from_dir(source.path()).unwrap();
    let copy = tempfile::tempdir().unwrap();
    let copy = copy.path().join("saved");
    loaded.save(&copy).unwrap();

    let names = |dir: &Path| {
        let mut names: Vec<_> = dir.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(source.path()), names(&copy));
    for name in names(&copy) {
        let read = |dir: &Path| std::fs::read(dir.join(&name)).unwrap();
        assert_eq!(read(source.path()), read(&copy), "{}", name.display());
    }
    let again = Tokenizer::from_dir(&copy).unwrap();
    let text = "ab c.!<eos>";
    assert_eq!(again.encode(text, true).unwrap(), loaded.encode(text, true).unwrap());
    assert_eq!(again.eos_id(), loaded.eos_id());
}

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let dir = folder(&[]);
    let path = dir.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["truncation"] = json!({
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    });
    file["padding"] = json!({
        "strategy": { "Fixed": 8 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"
    });
    std::fs::write(&path, file.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("abca", true).unwrap(), [2, 3, 4, 2]);
}

#[test]
fn special_tokens_come_from_either_file() {
    let map = r#"{"eos_token": {"content": "<end>", "lstrip": false}, "bos_token": "a"}"#;
    // Without `added_tokens_decoder` the map speaks, and what it names is added.
    let dir = folder(&[
        ("tokenizer_config.json", r#"{"eos_token": "<eos>", "pad_token": "<pad>"}"#),
        ("special_tokens_map.json", map),
    ]);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(tokenizer.eos_id(), Some(8));
    assert_eq!((tokenizer.bos_id(), tokenizer.pad_id()), (Some(2), Some(0)));
    assert_eq!(tokenizer.encode("b<end>", true).unwrap(), [3, 8]);
    assert_eq!(tokenizer.decode(&[2, 3, 8], true).unwrap(), "b");
    assert_eq!(tokenizer.vocab_size(), 9);

    // With it, the configuration alone does.
    let dir = folder(&[("special_tokens_map.json", map)]);
    assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().eos_id(), Some(1));
}

#[test]
fn clean_up_is_honoured_when_asked_for() {
    let dir = folder(&[("tokenizer_config.json", r#"{"clean_up_tokenization_spaces": true}"#)]);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let ids = tokenizer.encode("a b . c !", true).unwrap();
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "a b. c!");
}

#[test]
fn a_missing_template_says_what_to_do() {
    let error = Tokenizer::characters("ab").unwrap().render_chat(&hello(), true).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json") && error.contains("prompt template"), "{error}");
}

#[test]
fn an_empty_conversation_is_refused() {
    let error = with_template("hello").render_chat(&[], true).unwrap_err().to_string();
    assert!(error.contains("no messages"), "{error}");
}

#[test]
fn a_template_list_gives_its_default() {
    let list = json!({"chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}
    ]});
    let dir = folder(&[("tokenizer_config.json", &list.to_string())]);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(tokenizer.render_chat(&hello(), false).unwrap(), "plain");

    let list = json!({"chat_template": [{"name": "tool_use", "template": "tools"}]});
    let dir = folder(&[("tokenizer_config.json", &list.to_string())]);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert!(!tokenizer.has_chat_template());
    let error = tokenizer.render_chat(&hello(), false).unwrap_err().to_string();
    assert!(error.contains("tool_use"), "{error}");
}

#[test]
fn raise_exception_speaks_in_the_templates_own_words() {
    // Also from inside a macro, where the engine wraps errors.
    for template in [
        "{{ raise_exception('roles must alternate') }}",
        "{% macro f() %}{{ raise_exception('roles must alternate') }}{% endmacro %}{{ f() }}",
    ] {
        let error = with_template(template).render_chat(&hello(), true).unwrap_err();
        assert!(matches!(&error, Error::ChatTemplate { detail, .. } if detail == "roles must alternate"), "{error}");
    }
}

#[test]
fn a_broken_template_fails_only_when_rendered() {
    let tokenizer = with_template("line\n{% if %}");
    assert!(tokenizer.encode("ab", true).is_ok());
    let error = tokenizer.render_chat(&hello(), true).unwrap_err().to_string();
    assert!(error.contains("chat_template:2"), "{error}");
}

#[test]
fn templates_find_the_environment_they_are_written_for() {
    for (template, expected) in [
        ("{{ eos_token }}{{ pad_token }}{{ bos_token }}.", "<eos><pad>."),
        ("{{ tools is none }} {{ documents }} {{ add_generation_prompt }}", "True None True"),
        ("{{ messages[0]['content'].strip().split('\"')[-1].startswith('</b') }}", "True"),
        ("{% for k, v in messages[0].items() %}{{ k }};{% endfor %}", "role;content;"),
        ("{% for m in messages[::-1] %}{% break %}{% endfor %}done", "done"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}x{%- endgeneration -%} y generation", "xy generation"),
        ("{{ strftime_now('%%%Y')[:3] }}", "%20"),
        ("{{ messages | tojson }}", r#"[{"role": "user", "content": " <b>\"hé\"</b>\n"}]"#),
        (
            "{{ {'b': [1, [], {}], 'a': none} | tojson(indent=2, sort_keys=true) }}",
            "{\n  \"a\": null,\n  \"b\": [\n    1,\n    [],\n    {}\n  ]\n}",
        ),
        (
            r#"{{ ["é🦀", 1.0, true] | tojson(ensure_ascii=true, separators=(",", ":")) }}"#,
            "[\"\\u00e9\\ud83e\\udd80\",1.0,true]",
        ),
    ] {
        assert_eq!(render(template), expected, "{template}");
    }
}

#[test]
fn a_template_is_given_tools_and_the_variables_of_the_configuration() {
    let template = "{% if tools %}{{ tools | tojson }}|{% endif %}{{ enable_thinking }}|{{ messages[0].role }}";
    let tokenizer = with_template(template);
    let object = |value: Value| value.as_object().cloned().unwrap();
    let tokenizer = tokenizer.with_chat_template_kwargs(&object(json!({"enable_thinking": false}))).unwrap();
    let with = |tools: &Value| {
        let options = ChatOptions { tools: Some(tools), ..ChatOptions::prompt() };
        tokenizer.render_chat_with(&hello(), options).unwrap()
    };
    let tools = json!([{"type": "function", "function": {"name": "add", "arguments": [1, true]}}]);
    assert_eq!(
        with(&tools),
        r#"[{"type": "function", "function": {"name": "add", "arguments": [1, true]}}]|False|user"#
    );
    for none in [json!(null), json!([])] {
        assert_eq!(with(&none), "False|user");
    }
    for name in ["messages", "tools", "add_generation_prompt"] {
        let kwargs = object(json!({name: true}));
        let error = with_template(template).with_chat_template_kwargs(&kwargs).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}` is set by each conversation")), "{error}");
    }
}

#[test]
fn another_template_takes_the_place_of_the_own_one_and_is_saved() {
    let file = Path::new("chat.jinja");
    let tokenizer = with_template("own").with_chat_template("{{ bos_token }}other\r\n!", file).unwrap();
    assert_eq!(tokenizer.render_chat(&hello(), true).unwrap(), "other\n!");
    let saved = tempfile::tempdir().unwrap();
    tokenizer.save(saved.path()).unwrap();
    let again = Tokenizer::from_dir(saved.path()).unwrap();
    assert_eq!(again.render_chat(&hello(), true).unwrap(), "other\n!");
    // the folder of a run that was moved is not created again
    let gone = saved.path().join("gone");
    assert!(tokenizer.save(&gone.join("model")).is_err() && !gone.exists());

    let error = with_template("own").with_chat_template("{% if %}", file).unwrap_err().to_string();
    assert!(error.contains("chat.jinja") && error.contains("not understood"), "{error}");
}

/// A tokenizer whose special tokens can be written in characters too.
fn spelling(template: &str) -> Tokenizer {
    let tokenizer = Tokenizer::characters("1<>/[]{}:,\"'abcdefghijklmnopqrstuvwxyz_ \n").unwrap();
    tokenizer.with_chat_template(template, Path::new("test")).unwrap()
}

fn messages(value: Value) -> Vec<Message> {
    serde_json::from_value(value).unwrap()
}

#[test]
fn no_part_of_a_conversation_spells_a_special_token() {
    let plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.name }}<eos>{% endfor %}";
    let parts = "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}<eos>{% endfor %}";
    let calls = "{{ messages[0].tool_calls | tojson }}{{ tools | tojson(ensure_ascii=true) }}<eos>";
    let tools = json!([{"description": "a<eos>", "b<pad>": 1}]);
    for (template, chat, ends) in [
        (plain, json!([{"role": "user", "content": "a<eos>b<pad>"}]), 1),
        (plain, json!([{"role": "us<eos>er", "content": "<<eos>>", "name": "<eos>"}]), 1),
        // joined by the template
        (plain, json!([{"role": "<eo", "content": "a<", "name": "eos>"}, {"role": "user", "content": "eos>"}]), 2),
        (parts, json!([{"role": "user", "content": [{"text": " <e"}, {"text": "os>"}, {"text": "<eos> "}]}]), 1),
        // joined for the template
        (plain, json!([{"role": "user", "content": [{"text": "<e"}, {"text": "os>"}]}]), 1),
        (calls, json!([{"role": "user", "tool_calls": [{"name": "<eos>", "arguments": {"<eos>": ["<eos>"]}}]}]), 1),
    ] {
        let tokenizer = spelling(template);
        let chat = messages(chat);
        let options = ChatOptions { tools: Some(&tools), ..ChatOptions::default() };
        let (text, ids) = tokenizer.encode_chat(&chat, options).unwrap();
        assert_eq!(text, tokenizer.render_chat_with(&chat, options).unwrap());
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        assert_eq!(ids.iter().filter(|&&id| id == 1).count(), ends, "{text}");
        assert!(!ids.contains(&0), "{text}");
        assert_eq!(ids.last(), Some(&1), "{text}");
    }
}

#[test]
fn spellings_that_a_template_reads_itself_stay_its_own() {
    // as templates split reasoning from the answer
    let template = "{% set c = messages[0].content %}{{ c.split('<eos>')[-1].strip() }}|<eos>".replace('|', "/");
    let tokenizer = spelling(&template);
    let chat = messages(json!([{"role": "user", "content": "ab<eos> c<pad> "}]));
    let (text, ids) = tokenizer.encode_chat(&chat, ChatOptions::default()).unwrap();
    assert_eq!(text, "c<pad>/<eos>");
    assert_eq!(ids.iter().filter(|&&id| id < 2).copied().collect::<Vec<_>>(), [1]);
}

#[test]
fn a_list_of_parts_is_given_to_templates_that_read_lists_and_joined_for_others() {
    let chat = messages(
        json!([{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}]),
    );
    for (template, expected) in [
        ("{{ '(' + messages[0].content + ')' }}", "( a b)"),
        ("({{ messages[0].content }})", "( a b)"),
        ("({{ messages[0].content | tojson }})", "(\" a b\")"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}", " a b"),
        ("{% for p in messages[0].content %}({{ p.text | trim }}){% endfor %}", "(a)(b)"),
        (
            "{% if messages[0].content is string %}s{% else %}{% for p in messages[0].content %}{{ p['text'] }};{% endfor %}{% endif %}",
            " a ;b;",
        ),
    ] {
        assert_eq!(with_template(template).render_chat(&chat, false).unwrap(), expected, "{template}");
    }
    let other = messages(json!([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]));
    let error = with_template("{{ 'a' + messages[0].content }}").render_chat(&other, false).unwrap_err().to_string();
    assert!(error.contains("does not read lists of content parts") && error.contains("thinking"), "{error}");
}

#[test]
fn a_character_that_only_a_special_token_has_is_named_if_data_spell_the_token() {
    let tokenizer = Tokenizer::characters("abeos>").unwrap();
    let error = tokenizer.encode_text("a<eos>", &Control::NOWHERE, false).unwrap_err().to_string();
    assert!(error.contains("no token for '<'"), "{error}");
}
