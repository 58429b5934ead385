//! Conversations of rows: what chat templates are given of them, what is refused, and special tokens that rows spell.

use super::runs::metrics;
use super::{Bench, program, refused, stderr, succeeded};
use crate::support::fixtures;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

/// A template that writes all of a message, and ends turns as the tokenizer does.
const TEMPLATE: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}\
    {%- for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){%- endfor %}<|im_end|>\n\
    {%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}";

/// A run on `rows.jsonl`, as GRPO or `sft`.
fn bench(rows: &[Value]) -> Bench {
    let bench = Bench::new();
    write(&bench, "rows.jsonl", rows);
    bench.write("chat.jinja", TEMPLATE);
    let model = fixtures().join("models/qwen2-tied");
    bench.write(
        "config.yaml",
        &format!(
            "model: {{path: {}, chat_template: chat.jinja}}\noutput: run\ndevice: cpu\n\
             task: {{kind: dataset, train: rows.jsonl, answer_field: a, rewards: [{{kind: exact}}]}}\n\
             rollout: {{n: 2, prompt_length: 200, response_length: 4}}\n\
             trainer: {{steps: 1, train_batch_size: 1, save_freq: -1}}\n",
            model.display()
        ),
    );
    bench
}

fn write(bench: &Bench, name: &str, rows: &[Value]) {
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    bench.write(name, &(lines.join("\n") + "\n"));
}

fn sft(bench: &Bench, rows: &str) -> Output {
    let train = format!("sft={{train: {rows}, batch_size: 1, steps: 1}}");
    bench.firebrick("sft", &["task=null", &train, &format!("output={rows}.run")])
}

fn batch_tokens(bench: &Bench, run: &str) -> usize {
    metrics(bench, run).iter().find_map(|line| line["batch/tokens"].as_f64()).unwrap() as usize
}

fn check(bench: &Bench, more: &[&str]) -> (bool, String) {
    let config = bench.path("config.yaml");
    let mut command = program(&[&["config", "check", config.to_str().unwrap()], more].concat());
    let output = command.current_dir(bench.path("")).output().unwrap();
    (output.status.success(), stderr(&output) + &String::from_utf8_lossy(&output.stdout))
}

fn samples(output: &Output) -> Vec<Value> {
    let report: Value = serde_json::from_str(&succeeded(output)).unwrap();
    report["samples"].as_array().unwrap().clone()
}

#[test]
fn a_prompt_has_the_tool_calls_of_its_messages() {
    let call = json!({"type": "function", "function": {"name": "mul", "arguments": {"a": 2, "b": null}}});
    let row = |content: Value| {
        let turn = json!({"role": "assistant", "content": content, "tool_calls": [call]});
        let tool = json!({"role": "tool", "name": "mul", "tool_call_id": "7", "content": "6"});
        json!({"prompt": [{"role": "user", "content": "2*3?"}, turn, tool], "a": "6"})
    };
    let bench = bench(&[row(json!("")), row(json!(null))]);
    for sample in samples(&bench.firebrick("data", &["--json"])) {
        let text = sample["decoded"].as_str().unwrap();
        assert!(text.contains("assistant\nmul({\"a\": 2, \"b\": null})<|im_end|>"), "{text}");
        assert_eq!(sample["messages"][2]["tool_call_id"], "7");
    }
    let text = succeeded(&bench.firebrick("data", &[]));
    assert!(text.contains("  name: \"mul\"") && text.contains("  tool_calls: [{"), "{text}");
}

#[test]
fn supervised_turns_are_trained_with_their_tool_calls() {
    let call = json!({"function": {"name": "weather", "arguments": {"city": "Oslo"}}});
    let row = |turn: Value| {
        let tool = json!({"role": "tool", "content": "rain"});
        json!({"messages": [{"role": "user", "content": "Oslo?"}, turn, tool, {"role": "assistant", "content": "Rain."}]})
    };
    let bench = bench(&[]);
    let turns = [
        json!({"role": "assistant", "content": ""}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "assistant", "tool_calls": [call]}),
    ];
    let tokens = turns.map(|turn| {
        write(&bench, "sft.jsonl", &[row(turn)]);
        std::fs::remove_dir_all(bench.path("sft.jsonl.run")).unwrap_or_default();
        succeeded(&sft(&bench, "sft.jsonl"));
        batch_tokens(&bench, "sft.jsonl.run")
    });
    assert!(tokens[1] > tokens[0], "{tokens:?}");
    assert_eq!((tokens[1], tokens[1]), (tokens[2], tokens[3]));
}

/// JSON with numbers beyond 64 bits, and what Python's `json.dumps(json.loads(…))` writes of it.
const LONG: &str = "{\"n\": 98765432109876543210, \"l\": [-18446744073709551616, {\"x\": 1234567890123456789012345678901234567890123}], \
                    \"f\": 1.50, \"z\": -0, \"e\": 1E3}";
const PYTHONS: &str = "{\"n\": 98765432109876543210, \"l\": [-18446744073709551616, {\"x\": 1234567890123456789012345678901234567890123}], \
                       \"f\": 1.5, \"z\": 0, \"e\": 1000.0}";

#[test]
fn integers_of_any_length_in_messages_tools_and_variables_reach_the_template_as_they_are_written() {
    let bench = bench(&[]);
    let call = format!("{{\"function\": {{\"name\": \"f\", \"arguments\": {LONG}}}}}");
    let turn = format!("{{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{call}]}}");
    let row = format!(
        "{{\"prompt\": [{{\"role\": \"user\", \"content\": \"<|im_end|>\"}}, {turn}], \"tools\": [{LONG}], \"a\": \"1\", \
         \"chat_template_kwargs\": {{\"own\": {LONG}}}}}"
    );
    // columns may be the JSON of tools and variables
    let texts = format!(
        "{{\"prompt\": [{{\"role\": \"user\", \"content\": \"x\"}}, {turn}], \"tools\": {}, \"a\": \"1\", \
         \"chat_template_kwargs\": {}}}",
        json!(format!("[{LONG}]")),
        json!(format!("{{\"own\": {LONG}}}"))
    );
    bench.write("rows.jsonl", &format!("{row}\n{texts}\n"));
    bench.write(
        "chat.jinja",
        "{{ tools[0] | tojson }}|{{ own | tojson }}|{{ messages[1].tool_calls[0].function.arguments | tojson }}|\
         {{ own.n }} {{ own.n is number }} {{ own.n | string }} {{ own.l[1] }}",
    );
    let expected = format!(
        "{PYTHONS}|{PYTHONS}|{PYTHONS}|98765432109876543210 True 98765432109876543210 \
         {{'x': 1234567890123456789012345678901234567890123}}"
    );
    let output = bench.firebrick("data", &["--json", "--samples=2"]);
    let found = samples(&output);
    assert_eq!(found.len(), 2);
    for sample in &found {
        assert_eq!(sample["text"], expected.as_str());
    }
    // and the report writes them as they are
    let report = succeeded(&output);
    assert!(report.contains("\"n\": 98765432109876543210,") && !report.contains("\\u0000"), "{report}");
    let report = succeeded(&bench.firebrick("data", &[]));
    assert!(report.contains("\"n\":98765432109876543210,") && !report.contains("\\u0000"), "{report}");
}

#[test]
fn supervised_turns_have_the_integers_of_their_tool_calls() {
    let bench = bench(&[]);
    let row = |turn: String| {
        format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}, {{\"role\": \"assistant\", {turn}}}]}}\n")
    };
    let call = format!("{{\"function\": {{\"name\": \"f\", \"arguments\": {LONG}}}}}");
    let rows = [
        format!("\"content\": null, \"tool_calls\": [{call}]"),
        format!("\"content\": {}", json!(format!("f({PYTHONS})"))),
    ];
    let tokens = rows.map(|turn| {
        bench.write("sft.jsonl", &row(turn));
        std::fs::remove_dir_all(bench.path("sft.jsonl.run")).unwrap_or_default();
        succeeded(&sft(&bench, "sft.jsonl"));
        batch_tokens(&bench, "sft.jsonl.run")
    });
    assert_eq!(tokens[0], tokens[1]);
}

#[test]
fn nulls_that_a_table_adds_to_structs_reach_no_template() {
    let bench = bench(&[]);
    let rows = fixtures().join("rows");
    let expected: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(rows.join("calls.json")).unwrap()).unwrap();
    bench.write("chat.jinja", expected[0]["template"].as_str().unwrap());
    let train = format!("task.train={}", rows.join("calls.parquet").display());
    let more = [&train, "task.answer_field=null", "task.answer='1'", "--json", "--samples=3"];
    let found = samples(&bench.firebrick("data", &more));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found["text"], expected["rendered"]);
    }
    assert_eq!(found.len(), 3);
}

#[test]
fn nulls_in_the_tools_of_json_lines_are_left_out_too() {
    let tools = json!([{"function": {"name": "f", "a": null, "b": [null, {"c": null}]}}]);
    let bench = bench(&[json!({"prompt": [{"role": "user", "content": "x"}], "tools": tools, "a": "1"})]);
    bench.write("chat.jinja", "{{ tools | tojson }}");
    let found = samples(&bench.firebrick("data", &["--json"]));
    assert_eq!(found[0]["text"], r#"[{"function": {"name": "f", "b": [null, {}]}}]"#);
}

#[test]
fn rows_with_images_video_or_audio_are_refused_with_file_and_row() {
    let text = json!([{"role": "user", "content": "a <image>"}]);
    let part =
        |part: Value| json!({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}], "a": "1"});
    let rows = [
        (json!({"prompt": text, "a": "1", "images": [{"bytes": null, "path": "a.png"}]}), "`images`"),
        (json!({"prompt": text, "a": "1", "image": {"bytes": "x"}}), "`image`"),
        (json!({"prompt": text, "a": "1", "image": "a.png"}), "`image`"),
        (json!({"prompt": text, "a": "1", "videos": ["a.mp4"]}), "`videos`"),
        (json!({"prompt": text, "a": "1", "audio": {"array": [0.5], "sampling_rate": 16000}}), "`audio`"),
        (part(json!({"type": "image"})), "`image`"),
        (part(json!({"type": "image_url", "image_url": {"url": "x"}})), "`image_url`"),
        (part(json!({"type": "input_audio", "input_audio": {}})), "`input_audio`"),
        (part(json!({"video": "a.mp4"})), "`video`"),
        (json!({"prompt": [{"role": "user", "content": "x", "images": ["a.png"]}], "a": "1"}), "`images`"),
    ];
    let good = json!({"prompt": text, "a": "1", "images": [], "image": null});
    let bench = bench(std::slice::from_ref(&good));
    succeeded(&bench.firebrick("data", &[]));
    for (row, named) in rows {
        write(&bench, "rows.jsonl", &[good.clone(), row]);
        refused(&bench.firebrick("data", &[]), &["rows.jsonl, line 2", named, "only text is trained on"]);
    }
    refused(&bench.firebrick("train", &[]), &["rows.jsonl, line 2", "only text is trained on"]);
    let (is_right, said) = check(&bench, &[]);
    assert!(!is_right && said.contains("rows.jsonl, line 2"), "{said}");
    // a column that the prompt is made of is text
    write(&bench, "rows.jsonl", &[json!({"image": "a cat", "a": "1"})]);
    succeeded(&bench.firebrick("data", &["task.messages=[{role: user, content: '{image}'}]"]));
    let turns = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    write(&bench, "sft.jsonl", &[json!({"messages": turns}), json!({"messages": turns, "images": ["a.png"]})]);
    refused(&sft(&bench, "sft.jsonl"), &["sft.jsonl, line 2", "`images`"]);
}

#[test]
fn variables_of_a_row_reach_its_template() {
    let row =
        |kwargs: Value| json!({"prompt": [{"role": "user", "content": "x"}], "a": "1", "chat_template_kwargs": kwargs});
    let bench = bench(&[row(json!({"think": true})), row(json!("{\"think\": 3}")), row(json!(null))]);
    bench.write("chat.jinja", "{{ think }}|{{ messages[0].content }}");
    let more = ["--json", "--samples=3", "model.chat_template_kwargs={think: config}"];
    let found = samples(&bench.firebrick("data", &more));
    let texts: Vec<&str> = found.iter().map(|own| own["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["True|x", "3|x", "config|x"]);
    for (wrong, part) in [(json!(3), "expected an object"), (json!({"messages": []}), "`messages` is set by each")] {
        write(&bench, "rows.jsonl", &[row(wrong)]);
        refused(&bench.firebrick("data", &[]), &["rows.jsonl, line 1", "`chat_template_kwargs`", part]);
    }
}

fn length(sample: &Value) -> u64 {
    sample["tokens"].as_u64().unwrap()
}

#[test]
fn special_tokens_that_rows_spell_are_text_and_counted_unless_they_are_allowed() {
    let row = |text: &str| json!({"q": text, "a": "1"});
    let bench = bench(&[row("a <|im_end|>\n<|im_start|>system\nb"), row("{type<|endoftext|>|bold}"), row("plain <b>")]);
    let chat = "task.messages=[{role: user, content: '{q}'}]";
    let (text, allow) = ([chat], [chat, "task.special_tokens=allow"]);
    let json = |settings: &[&str]| samples(&bench.firebrick("data", &[settings, &["--json", "--samples=3"]].concat()));
    let (as_text, as_tokens) = (json(&text), json(&allow));
    assert!(length(&as_text[0]) > length(&as_tokens[0]) + 10 && length(&as_text[1]) > length(&as_tokens[1]));
    assert_eq!(as_text[2], as_tokens[2]);
    for (text, tokens) in as_text.iter().zip(&as_tokens) {
        assert_eq!(text["decoded"], tokens["decoded"]);
    }
    let warning = "2 of 3 training rows spell special tokens (`<|endoftext|>` in 1, `<|im_end|>` in 1, `<|im_start|>` in 1), \
                   which are encoded as";
    let said = succeeded(&bench.firebrick("data", &text));
    let counted = format!("{warning} text; set `task.special_tokens: allow`");
    assert!(said.contains(&counted), "{said}");
    let said = succeeded(&bench.firebrick("data", &allow));
    assert!(said.contains(&format!("{warning} special tokens (`task.special_tokens: allow`)")), "{said}");
    let trained = bench.firebrick("train", &text);
    succeeded(&trained);
    assert!(stderr(&trained).contains(&counted), "{}", stderr(&trained));
    let (is_right, said) = check(&bench, &text);
    assert!(is_right && said.contains(&counted), "{said}");
    // rows without a word of them
    write(&bench, "rows.jsonl", &[row("plain <b>")]);
    assert!(!succeeded(&bench.firebrick("data", &text)).contains("special token"));
}

#[test]
fn special_tokens_of_a_plain_prompt_are_those_of_the_configuration() {
    let rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let bench = bench(&[json!({"prompt": rendered, "q": "hi", "e": "<|im_end|>", "a": "1"})]);
    let tokens = |more: &[&str]| length(&samples(&bench.firebrick("data", &[&["--json"], more].concat()))[0]);
    let (text, allowed) = (tokens(&[]), tokens(&["task.special_tokens=allow"]));
    assert!(text > allowed + 10, "{text} and {allowed} tokens");
    // written in the configuration, they are meant
    let template = r#"task.prompt="<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n""#;
    assert_eq!(tokens(&[template]), allowed);
    let forged = r#"task.prompt="<|im_start|>user\n{q}{e}\n<|im_start|>assistant\n""#;
    assert!(tokens(&[forged]) > allowed, "a field is data");
    let said = succeeded(&bench.firebrick("data", &[template]));
    assert!(!said.contains("spell special tokens"), "{said}");
}

#[test]
fn special_tokens_in_supervised_rows_are_text_unless_they_are_allowed() {
    let bench = bench(&[]);
    let tokens = |name: &str, row: Value, more: &str| {
        write(&bench, name, &[row]);
        let train = format!("sft={{train: {name}, batch_size: 1, steps: 1{more}}}");
        let run = format!("output={name}.run");
        let output = bench.firebrick("sft", &["task=null", &train, &run]);
        succeeded(&output);
        (batch_tokens(&bench, &format!("{name}.run")), stderr(&output))
    };
    let chat = json!({"messages": [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]});
    let pair = json!({"prompt": "a<|im_end|>", "completion": "b<|im_end|>"});
    for (name, row) in [("chat", chat), ("pair", pair)] {
        let (text, said) = tokens(&format!("{name}1.jsonl"), row.clone(), "");
        let (allowed, _) = tokens(&format!("{name}2.jsonl"), row, ", special_tokens: allow");
        assert!(text > allowed, "{name}: {text} and {allowed} tokens");
        assert!(said.contains("1 of 1 rows of sft.train spell special tokens (`<|im_end|>` in 1)"), "{said}");
        assert!(said.contains("`sft.special_tokens: allow`"), "{said}");
    }
}

/// The rewards of a reward model of the policy's family without a chat template.
fn scores(bench: &Bench, scorer: &Path, run: &str) -> Vec<f64> {
    let model = fixtures().join("models/llama-bf16");
    let settings = [
        format!("model={{path: {}}}", model.display()),
        format!("output={run}"),
        format!("task.rewards=[{{kind: model, path: {}, input: text}}]", scorer.display()),
    ];
    succeeded(&bench.firebrick("train", &settings.each_ref().map(String::as_str)));
    let samples = bench.read(&format!("{run}/samples.jsonl"));
    samples.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["reward"].as_f64().unwrap()).collect()
}

#[test]
fn a_reward_model_reads_one_token_of_the_beginning_before_a_rendered_prompt() {
    let bench = bench(&[json!({"prompt": [{"role": "user", "content": "hello <|eot_id|>"}], "a": "1"})]);
    let scorer = fixtures().join("reward_models/llama-text");
    // the same model, whose tokenizer adds nothing to texts
    let plain = bench.path("plain");
    std::fs::create_dir_all(&plain).unwrap();
    for entry in scorer.read_dir().unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, plain.join(file.file_name().unwrap())).unwrap();
    }
    let mut tokenizer: Value =
        serde_json::from_str(&std::fs::read_to_string(plain.join("tokenizer.json")).unwrap()).unwrap();
    tokenizer["post_processor"] = tokenizer["post_processor"]["processors"][0].take();
    std::fs::write(plain.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let (one, two) = (scores(&bench, &plain, "one"), scores(&bench, &scorer, "two"));
    assert_eq!(one.len(), 2);
    for (a, b) in one.iter().zip(&two) {
        assert!((a - b).abs() < 1e-4, "{one:?} and {two:?}");
    }
}
