//! `firebrick data`: what a task's rows look like.

use super::{Bench, refused, succeeded};
use serde_json::{Value, json};

/// Settings that read `rows.jsonl` with a tokenizer that has a chat template.
fn settings(task: &str) -> Vec<String> {
    let model = crate::support::fixtures().join("models/llama-rope-llama3");
    vec![
        "model.arch=null".to_owned(),
        format!("model.path={}", model.display()),
        format!("task={{kind: dataset, train: rows.jsonl, rewards: [{{kind: exact}}]{task}}}"),
        "rollout.prompt_length=40".to_owned(),
    ]
}

fn look(bench: &Bench, task: &str, more: &[&str]) -> std::process::Output {
    let settings = settings(task);
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    bench.firebrick("data", &[&settings[..], more].concat())
}

fn row(content: &str, answer: &str) -> String {
    let row = json!({
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 3, "split": "train"},
    });
    format!("{row}\n")
}

#[test]
fn rows_are_summed_up_for_people_and_for_programs() {
    let bench = Bench::new();
    let long = "many words ".repeat(60);
    let rows = row("Jean has 30", "30") + &row("Jean has 30", "31") + &row(&long, "32");
    bench.write("rows.jsonl", &rows);
    bench.write("held_out.jsonl", &row("Jean has 30", "30"));
    let task = ", validation: held_out.jsonl";
    let text = succeeded(&look(&bench, task, &[]));
    for part in [
        "dataset training: 3 rows",
        "reward_model  {style: text, ground_truth: text}",
        "prompt        messages",
        "1 longer than rollout.prompt_length = 40, 1 duplicates of an earlier prompt",
        "1 validation prompts are training prompts too",
        "the chat template was given",
        "| user: Jean has 30",
        "| <|begin_of_text|><|start_header_id|>user<|end_header_id|>",
        "answer: 30",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let json = succeeded(&look(&bench, task, &["--json", "--samples", "2"]));
    let report: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["samples"].as_array().unwrap().len(), 2);
    assert_eq!(report["train"]["over_long"], 1);
    assert_eq!(report["train"]["prompt_tokens"]["counted"], 3);
    assert_eq!(report["validation"]["rows"], 1);
    assert_eq!(report["samples"][1]["answer"], "31");
}

#[test]
fn a_template_file_and_its_variables_are_what_a_prompt_is_made_by() {
    let bench = Bench::new();
    bench.write("rows.jsonl", &row("Jean", "30"));
    let template = bench.write("chat.jinja", "{% if not think %}<|eot_id|>{% endif %}{{ messages[0].content }}");
    let file = format!("model.chat_template={}", template.display());
    let text = succeeded(&look(&bench, "", &[&file, "model.chat_template_kwargs.think=false"]));
    assert!(text.contains("| think: false"), "{text}");
    assert!(text.contains("| <|eot_id|>Jean\n"), "{text}");
    let text = succeeded(&look(&bench, "", &[&file, "model.chat_template_kwargs={think: true}"]));
    assert!(text.contains("| Jean\n"), "{text}");
    refused(
        &look(&bench, "", &["model.chat_template_kwargs.messages=1"]),
        &["chat_template_kwargs", "`messages` is set by each conversation"],
    );
}

#[test]
fn an_endless_task_shows_some_of_its_prompts() {
    let text = succeeded(&Bench::new().firebrick("data", &[]));
    assert!(text.contains("arithmetic training: endless"), "{text}");
    assert!(text.contains("plain text, as the model reads it"), "{text}");
    assert!(text.contains("solution"), "{text}");
}

#[test]
fn a_bad_row_is_named() {
    let bench = Bench::new();
    bench.write("rows.jsonl", &(row("Jean", "30") + "{\"prompt\": 3}\n"));
    refused(&look(&bench, "", &[]), &["rows.jsonl, line 2", "ground truth"]);
}
