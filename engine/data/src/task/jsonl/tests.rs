//! Examples of rows, and rejected configurations and rows.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::task::{PromptText, TaskConfig};
use firebrick_models::tokenizer::Message;

/// Builds a task of `kind: jsonl` whose training rows are `rows`, with more settings as JSON.
fn build(rows: &str, settings: &str) -> Result<Box<dyn Task>, String> {
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::write(folder.path().join("train.jsonl"), rows).expect("written");
    std::fs::write(folder.path().join("test.jsonl"), "{\"q\": \"v1\"}\n{\"q\": \"v2\"}\n").expect("written");
    let json = format!(r#"{{"kind": "jsonl", "train": "train.jsonl", {settings}}}"#);
    let config: TaskConfig = serde_json::from_str(&json).map_err(|e| e.to_string())?;
    config.build(folder.path()).map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

fn first(rows: &str, settings: &str) -> Example {
    build(rows, settings).expect("builds").example(Split::Train, 0).expect("example")
}

fn refused(rows: &str, settings: &str) -> String {
    build(rows, settings).err().expect("refused")
}

fn chat(messages: &[(&str, &str)]) -> PromptText {
    PromptText::Chat(messages.iter().map(|&(role, content)| Message::new(role, content)).collect())
}

const FREE: &str = r#""rewards": [{"kind": "length", "max": 9}]"#;
const GSM8K: &str = r#"{"question": "How many?", "answer": "500+500=1,000\n#### 1,000"}"#;

#[test]
fn plain_gsm8k_rows_work_without_preparation() {
    let settings = r#""prompt": "Question: {question}\nAnswer:", "answer_field": "answer",
        "answer_extract": "gsm8k", "solution_field": "answer", "rewards": [{"kind": "gsm8k"}]"#;
    let task = build(GSM8K, settings).expect("builds");
    let example = task.example(Split::Train, 0).expect("example");
    assert_eq!(example.prompt, PromptText::Text("Question: How many?\nAnswer:".into()));
    assert_eq!(example.answer, "1000");
    assert_eq!(example.solution.as_deref(), Some("500+500=1,000\n#### 1,000"));
    let text = example.solution.clone().expect("solution");
    let completion = Completion { text: &text, tokens: &[1], finished: true, max_tokens: 8, in_thought: false };
    assert!(task.reward(&example, &completion).expect("judged").total > 0.5);
}

#[test]
fn verl_rows_hold_messages_and_a_nested_ground_truth() {
    let row = r#"{"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": 2}}"#
        .replace('\n', "");
    let settings = r#""answer_field": "reward_model.ground_truth", "rewards": [{"kind": "number"}]"#;
    let example = first(&row, settings);
    assert_eq!(example.prompt, chat(&[("user", "1+1?")]));
    assert_eq!(example.answer, "2");
    assert_eq!(example.fields["data_source"], "gsm8k");
}

#[test]
fn the_ground_truth_of_verls_rows_needs_no_setting() {
    let number = r#""rewards": [{"kind": "number"}]"#;
    let verl = r#"{"prompt": "1+1?", "reward_model": {"style": "rule", "ground_truth": "2"}, "two": "3"}"#;
    assert_eq!(first(verl, number).answer, "2");
    // what is set goes before it
    let set = first(verl, &format!(r#""answer_field": "two", {number}"#));
    assert_eq!(set.answer, "3");
    let rows = format!("{verl}\n{{\"prompt\": \"?\", \"id\": 1}}");
    assert_eq!(
        refused(&rows, number),
        "train.jsonl, line 2: reward `number` compares with a ground truth, but the task has none: neither `answer_field` nor \
         `answer` is set, and the row has no `reward_model.ground_truth`; its fields are `prompt`, `id` (setting \
         `task.answer_field`)"
    );
}

#[test]
fn the_tools_of_a_conversation_are_a_list_or_the_json_of_one() {
    let row = |tools: &str| format!(r#"{{"prompt": [{{"role": "user", "content": "?"}}], "tools": {tools}}}"#);
    let list = r#"[{"type":"function","function":{"name":"add"}}]"#;
    let expected: serde_json::Value = serde_json::from_str(list).expect("JSON");
    assert_eq!(first(&row(list), FREE).fields["tools"], expected);
    let text = serde_json::to_string(list).expect("JSON");
    assert_eq!(first(&row(&text), FREE).fields["tools"], expected);
    assert!(first(&row("null"), FREE).fields["tools"].is_null());
    let message = refused(&row("\"hammer\""), FREE);
    assert!(message.contains("field `tools` is \"hammer\", expected a list of tools"), "{message}");
    let plain = r#"{"prompt": "?", "tools": "hammer"}"#;
    assert_eq!(first(plain, FREE).fields["tools"], "hammer");
}

#[test]
fn a_task_is_called_as_its_kind_unless_it_has_a_name() {
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::write(folder.path().join("t.jsonl"), "{\"prompt\": \"p\"}").expect("written");
    let name = |kind: &str, more: &str| {
        let json = format!(r#"{{"kind": "{kind}", "train": "t.jsonl", {more} {FREE}}}"#);
        let mut config: TaskConfig = serde_json::from_str(&json).expect("parses");
        let built = config.build(folder.path()).expect("builds").name().to_owned();
        config.spell_out();
        let rows = config.rows().expect("rows");
        assert_eq!(rows.name.as_deref(), Some(built.as_str()));
        built
    };
    assert_eq!(name("jsonl", ""), "jsonl");
    assert_eq!(name("dataset", ""), "dataset");
    assert_eq!(name("dataset", r#""name": "gsm8k","#), "gsm8k");
}

#[test]
fn sources_with_weights_are_mixed_and_may_hold_rows_out() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let write = |name: &str, rows: usize| {
        let rows: Vec<String> = (0..rows).map(|i| format!("{{\"prompt\": \"{name}{i}\"}}")).collect();
        std::fs::write(folder.path().join(name), rows.join("\n")).expect("written");
    };
    write("a", 10);
    write("b", 30);
    let task = |more: &str| {
        let json = format!(
            r#"{{"kind": "dataset", "train": [{{"path": "a", "weight": 3}}, {{"path": "b", "weight": 1}}], {more} {FREE}}}"#
        );
        let config: TaskConfig = serde_json::from_str(&json).expect("parses");
        config.build(folder.path()).map_err(|error| error.to_string())
    };
    let prompts = |task: &dyn Task, split| -> Vec<String> {
        let example = |at| match task.example(split, at).expect("example").prompt {
            PromptText::Text(text) => text,
            PromptText::Chat(_) => panic!("plain text"),
        };
        (0..task.len(split).expect("finite")).map(example).collect()
    };
    let mixed = task("").expect("builds");
    let drawn = prompts(mixed.as_ref(), Split::Train);
    // b once, and three times as many of a
    assert_eq!(drawn.len(), 120);
    assert_eq!(drawn.iter().filter(|p| p.starts_with('a')).count(), 90);
    assert_eq!(drawn.iter().collect::<HashSet<_>>().len(), 40);
    let held = task(r#""validation_size": 8,"#).expect("builds");
    let kept: HashSet<_> = prompts(held.as_ref(), Split::Train).into_iter().collect();
    let out: HashSet<_> = prompts(held.as_ref(), Split::Validation).into_iter().collect();
    assert!(kept.is_disjoint(&out));
    assert_eq!((kept.len(), out.len()), (32, 8));
    let text = task(r#""limit": 5,"#).err().expect("refused");
    assert!(text.contains("cannot go with weights"), "{text}");
    let text = task(r#""validation": [{"path": "a", "weight": 1}],"#).err().expect("refused");
    assert!(text.contains("takes no weights"), "{text}");
}

#[test]
fn trl_rows_hold_a_prompt_and_any_columns() {
    let example = first(r#"{"prompt": "Write {x}", "hint": 3}"#, FREE);
    assert_eq!(example.prompt, PromptText::Text("Write {x}".into()));
    assert_eq!((example.answer.as_str(), example.solution), ("", None));
    assert_eq!(example.fields["hint"], 3);
}

#[test]
fn chat_templates_and_a_system_prompt_make_messages() {
    let settings =
        format!(r#""messages": [{{"role": "user", "content": "{{q}}?"}}], "system_prompt": "Be brief.", {FREE}"#);
    let example = first(r#"{"q": "Why"}"#, &settings);
    assert_eq!(example.prompt, chat(&[("system", "Be brief."), ("user", "Why?")]));
}

#[test]
fn a_system_prompt_is_refused_where_it_would_be_dropped_or_doubled() {
    let system = format!(r#""system_prompt": "S", {FREE}"#);
    let text = refused(r#"{"prompt": "p"}"#, &format!(r#""prompt": "p", {system}"#));
    assert!(text.contains("needs a conversation, but `prompt` is plain text"), "{text}");
    let text = refused(r#"{"prompt": "p"}"#, &system);
    assert!(text.contains("line 1: field `prompt` is plain text"), "{text}");
    let text = refused(r#"{"prompt": [{"role": "system", "content": "T"}]}"#, &system);
    assert!(text.contains("already begins with a system message"), "{text}");
}

#[test]
fn answers_are_taken_out_by_a_pattern_with_or_without_a_group() {
    let answer = |pattern: &str| {
        let settings = format!(
            r#""answer": "x={{a}}", "answer_extract": {{"regex": "{pattern}"}}, "prompt": "p",
            "rewards": [{{"kind": "exact"}}]"#
        );
        first(r#"{"a": "1 x=2"}"#, &settings).answer
    };
    assert_eq!(answer("x=([0-9])"), "2");
    assert_eq!(answer("[0-9]"), "2");
}

#[test]
fn a_row_whose_answer_cannot_be_read_is_named_before_training() {
    let settings = r#""prompt": "p", "answer_field": "answer", "rewards": [{"kind": "gsm8k"}]"#;
    let rows = "{\"answer\": 4}\n{\"answer\": \"#### 5\"}";
    assert_eq!(
        refused(rows, settings),
        "train.jsonl, line 2: reward `gsm8k` failed on this sample: the ground truth \"#### 5\" \
         is not a decimal number; for GSM8K rows set `answer_extract: gsm8k` (setting \
         `task.rewards`)"
    );
    let settings = format!(r#""answer_extract": "gsm8k", {settings}"#);
    assert_eq!(
        refused(rows, &settings),
        "train.jsonl, line 1: expected `#### ` and a number in the answer, found \"4\" \
         (setting `task.answer_extract`)"
    );
}

#[test]
fn a_missing_field_names_the_setting_and_the_fields_of_the_row() {
    let text = refused(r#"{"problem": "x", "id": 1}"#, FREE);
    assert_eq!(
        text,
        "train.jsonl, line 1: the row has no field `prompt` (set by `task.prompt_field`); its \
         fields are `problem`, `id`"
    );
}

#[test]
fn a_prompt_that_is_neither_text_nor_messages_is_refused() {
    let text = refused(r#"{"prompt": 3}"#, FREE);
    assert!(text.contains("field `prompt` is 3, expected a string or a list"), "{text}");
    let text = refused(r#"{"prompt": [{"role": "user"}]}"#, FREE);
    assert!(text.contains(r#"has the message {"role":"user"}, expected an object"#), "{text}");
}

#[test]
fn contradictory_settings_are_refused() {
    let row = r#"{"prompt": "p"}"#;
    let with = |settings: &str| refused(row, &format!("{settings}, {FREE}"));
    assert!(with(r#""prompt": "p", "prompt_field": "q""#).contains("at most one of `prompt`"));
    assert!(with(r#""answer": "p", "answer_field": "q""#).contains("and `task.answer_field`"));
    assert!(with(r#""answer_extract": "gsm8k""#).contains("no answer to extract it from"));
    assert!(with(r#""messages": []"#).contains("`task.messages`: must have at least 1 entry, found 0"));
    assert!(with(r#""limit": 0"#).contains("`task.limit`: must be at least 1, found 0: remove it to read all rows"));
    assert!(with(r#""validation_size": 1"#).contains("holding out 1 of 1 rows leaves none"));
    assert!(with(r#""validation_fraction": 1"#).contains("`task.validation_fraction`: must be below 1, found 1"));
    let text = refused(row, r#""rewards": [{"kind": "exact"}]"#);
    assert!(text.contains("reward `exact` compares with a ground truth"), "{text}");
}

#[test]
fn a_validation_file_is_read_whole_or_up_to_its_size() {
    let settings = format!(r#""prompt": "{{q}}", "validation": "test.jsonl", {FREE}"#);
    let rows = "{\"q\": \"t1\"}\n{\"q\": \"t2\"}\n{\"q\": \"t3\"}";
    let sizes = |more: &str| {
        let task = build(rows, &format!("{more}{settings}")).expect("builds");
        (task.len(Split::Train), task.len(Split::Validation))
    };
    assert_eq!(sizes(""), (Some(3), Some(2)));
    assert_eq!(sizes(r#""validation_size": 1, "limit": 2,"#), (Some(2), Some(1)));
    let text = refused(rows, &format!(r#""validation_size": 3, {settings}"#));
    assert!(text.contains("at most the 2 rows of the `validation` files, found 3"), "{text}");
    let text = refused(rows, &format!(r#""validation_fraction": 0.5, {settings}"#));
    assert!(text.contains("is a fraction of `train`"), "{text}");
}

#[test]
fn an_example_beyond_the_end_is_an_error() {
    let task = build(r#"{"prompt": "p"}"#, FREE).expect("builds");
    assert!(task.is_empty(Split::Validation));
    let error = task.example(Split::Train, 1).expect_err("refused").to_string();
    assert_eq!(error, "task `jsonl` has 1 train examples; there is no example 1 (from 0)");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn train_and_validation_are_disjoint_and_complete(
        len in 2usize..60, share in 0.01..0.99f64, seed in 0u64..1000,
    ) {
        let rows: Vec<_> = (0..len).map(|i| format!("{{\"prompt\": \"{i}\"}}")).collect();
        let settings = format!(r#""validation_fraction": {share}, "seed": {seed}, {FREE}"#);
        match build(&rows.join("\n"), &settings) {
            Ok(task) => {
                let prompts = |split| -> HashSet<String> {
                    (0..task.len(split).expect("finite"))
                        .map(|i| format!("{:?}", task.example(split, i).expect("example").prompt))
                        .collect()
                };
                let (train, validation) = (prompts(Split::Train), prompts(Split::Validation));
                prop_assert!(train.is_disjoint(&validation));
                prop_assert!(!train.is_empty() && !validation.is_empty());
                prop_assert_eq!(train.len() + validation.len(), len);
            }
            Err(text) => prop_assert!(text.contains("leaves none to train on"), "{}", text),
        }
    }
}
