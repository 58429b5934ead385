//! What a reward model cannot read: known before the first step, or a completion without a score.

use super::runs::metrics;
use super::{Bench, refused, stderr, succeeded};
use crate::support::fixtures;
use serde_json::{Value, json};
use std::path::Path;

const CONFIG: &str = "
model: {path: MODEL}
task:
  kind: dataset
  train: rows.jsonl
  prompt: '{q}'
  rewards: [{kind: model, name: judge, path: judge, input: text}]
output: run
device: cpu
rollout: {n: 4, prompt_length: 16, response_length: 16}
trainer: {steps: 3, train_batch_size: 2}
";

/// A run whose reward model has a tokenizer without merges: a token a byte, and one for the beginning.
fn bench() -> Bench {
    let bench = Bench::new();
    std::fs::create_dir_all(bench.path("judge")).unwrap();
    for entry in std::fs::read_dir(fixtures().join("reward_models/llama-text")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, bench.path("judge").join(path.file_name().unwrap())).unwrap();
    }
    edit(&bench.path("judge/tokenizer.json"), |tokenizer| {
        tokenizer["model"]["merges"] = json!([]);
        tokenizer["model"]["ignore_merges"] = false.into();
    });
    let model = fixtures().join("models/qwen2-tied");
    bench.write("config.yaml", &CONFIG.replace("MODEL", model.to_str().unwrap()));
    bench.write("rows.jsonl", "{\"q\": \"ab\"}\n{\"q\": \"cd\"}\n");
    bench
}

/// Edits a JSON file.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// Gives the reward model a chat template.
fn set_template(bench: &Bench, template: &str) {
    edit(&bench.path("judge/tokenizer_config.json"), |config| config["chat_template"] = template.into());
}

#[test]
fn a_damaged_reward_model_of_a_checkpoint_is_named() {
    let bench = bench();
    succeeded(&bench.firebrick("train", &["trainer.steps=1", "output=earlier"]));
    let model = bench.path("earlier/checkpoints/step-000001/model");
    let weights = std::fs::read(model.join("model.safetensors")).unwrap();
    std::fs::write(model.join("model.safetensors"), &weights[..weights.len() - 1]).unwrap();
    let judge = format!("task.rewards=[{{kind: model, path: {}, input: text}}]", model.display());
    for command in ["train", "eval"] {
        refused(&bench.firebrick(command, &[&judge]), &["model.safetensors: it is damaged", "copy the folder out"]);
    }
}

/// Trains, and holds the completions without a score to those of which `is_unreadable` is true.
fn trains(bench: &Bench, more: &[&str], reason: &str, is_unreadable: impl Fn(&str) -> bool) {
    let output = bench.firebrick("train", more);
    succeeded(&output);
    let said = stderr(&output);
    assert_eq!(said.matches("it has no score").count(), 1, "{said}");
    assert!(said.contains(reason) && said.contains("reward/judge/missing"), "{said}");
    let samples = bench.read("run/samples.jsonl");
    let (mut missing, mut scored) = (0, 0);
    for line in samples.lines() {
        let sample: Value = serde_json::from_str(line).unwrap();
        let text = sample["completion"].as_str().unwrap();
        let score = &sample["reward_parts"][0][1];
        assert_eq!(score.is_null(), is_unreadable(text), "{reason}: {sample}");
        assert!(sample["reward_error"].is_null(), "{sample}");
        if score.is_null() {
            missing += 1;
        } else {
            scored += 1;
        }
    }
    assert!(missing > 0 && scored > 0, "{reason}: {missing} and {scored}");
    let lines = metrics(bench, "run");
    let counted = |key: &str| lines.iter().filter_map(|line| line[key].as_f64()).sum::<f64>() as usize;
    assert_eq!(counted("reward/judge/missing"), missing, "{reason}");
    assert_eq!(counted("rollout/unjudged"), missing, "{reason}");
}

#[test]
fn completions_that_a_reward_model_cannot_read_have_no_score_and_are_counted_and_said_once() {
    let too_long = bench();
    // the token of the beginning, two of the prompt, and the completion's
    let limit = ["task.rewards.0.score_tokens=32"];
    trains(&too_long, &limit, "its budget is 32; raise its score_tokens", |text| 3 + text.len() > 32);
    let beyond = bench();
    edit(&beyond.path("judge/tokenizer.json"), |tokenizer| {
        let added = json!({"id": 512, "content": " s", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false});
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    });
    let reason = "the token \" s\" has id 512, but the model's embedding has 512 rows";
    trains(&beyond, &[], reason, |text| text.contains(" s"));
    let templates = bench();
    set_template(
        &templates,
        "{% for m in messages %}{% if 'e' in m.content %}{{ raise_exception('no e') }}{% endif %}{{ m.content }}{% endfor %}",
    );
    trains(&templates, &["task.rewards.0.input=chat"], "no e", |text| text.contains('e'));
}

#[test]
fn prompts_that_a_reward_model_cannot_read_are_refused_before_the_first_step_with_their_row() {
    let refusing = bench();
    set_template(&refusing, "{% if 'c' in messages[0].content %}{{ raise_exception('no c') }}{% endif %}ab");
    let chat = ["task.rewards.0.input=chat"];
    refused(&refusing.firebrick("train", &chat), &["reward `judge`: train row 1", "no c"]);
    let beyond = bench();
    edit(&beyond.path("judge/tokenizer.json"), |tokenizer| {
        let added = json!({"id": 512, "content": "cd", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false});
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    });
    let parts = ["reward `judge`: train row 1", "the token \"cd\" has id 512"];
    refused(&beyond.firebrick("train", &[]), &parts);
    // what is validated too, and before an evaluation
    let validation = ["task.validation=rows.jsonl", "task.train=others.jsonl"];
    beyond.write("others.jsonl", "{\"q\": \"ab\"}\n{\"q\": \"ac\"}\n");
    for command in ["train", "eval"] {
        let output = beyond.firebrick(command, &validation);
        refused(&output, &["reward `judge`: validation row 1", "the token \"cd\" has id 512"]);
    }
    assert!(!refusing.path("run").exists() && !beyond.path("run").exists());
}

#[test]
fn another_tokenizer_that_may_need_more_tokens_is_a_warning_before_the_first_step() {
    let bench = bench();
    edit(&bench.path("judge/tokenizer.json"), |tokenizer| {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let (name, id) =
            vocab.iter().find(|(name, _)| name.chars().count() > 2).map(|(n, i)| (n.clone(), i.clone())).unwrap();
        vocab.remove(&name);
        vocab.insert("another token".into(), id);
    });
    let output = bench.firebrick("train", &["task.rewards.0.score_tokens=18"]);
    succeeded(&output);
    let said = stderr(&output);
    let expected =
        "a prompt of 3 tokens with a completion of 16 (rollout.response_length): reward `judge` needs 19 tokens";
    assert!(said.contains(expected) && said.contains("raise its score_tokens"), "{said}");
    // no prompt leaves room
    refused(&bench.firebrick("train", &["task.rewards.0.score_tokens=3", "output=other"]), &["its budget is 3"]);
}
