//! Every mistake gets one clear message that says what was expected, what was found, where, and what to do.

use super::{Bench, copy_model, firebrick, program, refused};

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    let output = Bench::new().firebrick("train", &["trainer.stepz=3"]);
    refused(&output, &["config.yaml", "trainer", "unknown key `stepz`", "did you mean `steps`?"]);
}

#[test]
fn an_unknown_value_is_refused_with_the_known_ones() {
    let output = Bench::new().firebrick("train", &["objective=gpro"]);
    refused(&output, &["unknown value `gpro`", "`grpo`"]);
}

#[test]
fn a_wrong_type_names_the_key_and_what_it_found() {
    let output = Bench::new().firebrick("train", &["trainer.steps=many"]);
    refused(&output, &["trainer.steps must be an integer", "many"]);
}

#[test]
fn a_config_that_is_not_there_or_not_yaml_is_named() {
    refused(&firebrick(&["train", "no/such.yaml"]), &["cannot read no/such.yaml"]);
    let bench = Bench::new();
    bench.write("config.yaml", "model: [unclosed");
    refused(&bench.firebrick("train", &[]), &["config.yaml", "not YAML"]);
}

#[test]
fn a_missing_model_says_what_a_model_folder_is() {
    let bench = Bench::new();
    let output = bench.firebrick("train", &["model.arch=null", "model.path=no/such/model"]);
    refused(&output, &["no/such/model", "Hugging Face checkpoint"]);
    let empty = bench.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let output = firebrick(&["generate", "--model", empty.to_str().unwrap(), "--prompt", "x"]);
    refused(&output, &["config.json"]);
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let output = Bench::new().firebrick("train", &["model.arch.model_type=mamba"]);
    refused(&output, &["\"mamba\"", "LlamaForCausalLM", "Gemma2ForCausalLM"]);
}

#[test]
fn an_empty_dataset_is_named() {
    let bench = Bench::new();
    bench.write("empty.jsonl", "");
    bench.write("tokenizer/tokenizer.json", "{}");
    let task = "task={kind: jsonl, train: empty.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: exact}]}";
    let output = bench.firebrick("train", &[task]);
    refused(&output, &["empty.jsonl", "no rows"]);
}

#[test]
fn a_missing_dataset_is_named() {
    let task = "task={kind: jsonl, train: nowhere.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: exact}]}";
    refused(&Bench::new().firebrick("train", &[task]), &["nowhere.jsonl"]);
}

#[test]
fn lengths_beyond_the_context_are_refused_before_anything_runs() {
    let bench = Bench::new();
    let output = bench.firebrick("train", &["rollout.prompt_length=30", "rollout.response_length=10"]);
    refused(&output, &["is 40", "context is 32", "lower one of them"]);
    assert!(!bench.path("run").exists(), "a refused run leaves nothing behind");
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_by_generate() {
    let model = crate::support::fixtures().join("models/llama-gqa");
    let prompt = "word ".repeat(400);
    let output = firebrick(&["generate", "--model", model.to_str().unwrap(), "--prompt", &prompt, "--device", "cpu"]);
    refused(&output, &["context is 512", "shorten it"]);
}

#[test]
fn prompts_that_are_all_too_long_are_refused() {
    let bench = Bench::new();
    let output = bench.firebrick("train", &["rollout.prompt_length=2"]);
    refused(&output, &["all 10 validation prompts", "rollout.prompt_length = 2", "raise it"]);
    let path = format!("model.path={}", crate::support::fixtures().join("models/llama-gqa").display());
    bench.write("rows.jsonl", "{\"q\": \"one two three\", \"a\": \"4\"}\n");
    let task = "task={kind: jsonl, train: rows.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: exact}]}";
    let output = bench.firebrick("train", &[task, "model.arch=null", &path, "rollout.prompt_length=2"]);
    refused(&output, &["all 1 training prompts", "rollout.prompt_length = 2", "the shortest has"]);
    assert!(!bench.path("run").exists(), "a refused run leaves nothing behind");
}

#[test]
fn an_unwritable_run_folder_is_named() {
    let bench = Bench::new();
    let file = bench.write("file", "not a folder");
    let output = bench.firebrick("train", &[&format!("output={}", file.join("run").display())]);
    refused(&output, &["cannot create the run folder", "file/run"]);
}

#[test]
fn a_folder_that_holds_a_run_is_not_overwritten() {
    let bench = Bench::new();
    super::succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    refused(&bench.firebrick("train", &[]), &["already contains a run", "--resume"]);
}

#[test]
fn truncated_weights_name_the_tensor_that_is_cut() {
    let bench = Bench::new();
    let model = bench.path("model");
    copy_model("llama-gqa", &model);
    let file = std::fs::OpenOptions::new().write(true).open(model.join("model.safetensors")).unwrap();
    file.set_len(file.metadata().unwrap().len() - 10).unwrap();
    let output = firebrick(&["generate", "--model", model.to_str().unwrap(), "--prompt", "x"]);
    refused(&output, &["model.safetensors is truncated", "tensor ", "copy it again"]);
}

#[test]
fn tensors_that_do_not_fit_the_config_are_each_their_own_error() {
    let edits = [
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "lacks 9 tensor(s)", "model.layers.2."),
        ("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "has 9 unexpected tensor(s)", "model.layers.1."),
        ("\"intermediate_size\": 160", "\"intermediate_size\": 96", "expected [96, 64]", "[160, 64]"),
    ];
    for (from, to, first, second) in edits {
        let bench = Bench::new();
        let model = bench.path("model");
        copy_model("llama-gqa", &model);
        let config = bench.read("model/config.json");
        assert!(config.contains(from));
        bench.write("model/config.json", &config.replace(from, to));
        let output = firebrick(&["generate", "--model", model.to_str().unwrap(), "--prompt", "x"]);
        refused(&output, &[first, second]);
    }
}

#[test]
fn an_end_token_beyond_the_embedding_is_refused_with_its_number() {
    let bench = Bench::new();
    let model = bench.path("model");
    copy_model("llama-gqa", &model);
    let output =
        bench.firebrick("train", &["model.arch.vocab_size=100", &format!("model.tokenizer={}", model.display())]);
    refused(&output, &["end token 511", "100 rows"]);
}

#[test]
fn a_device_that_is_not_there_gets_one_line_and_a_suggestion() {
    refused(&Bench::new().firebrick("train", &["--device", "cuda:7"]), &["cuda", "cpu"]);
    refused(&Bench::new().firebrick("train", &["--device", "tpu"]), &["tpu", "cuda[:n]"]);
}

#[test]
fn resuming_another_run_is_refused() {
    let bench = Bench::new();
    super::succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    let output = bench.firebrick("train", &["optim.lr=0.5", "--resume"]);
    refused(&output, &["differs from that of the run in optim.lr (0.5, it was 0.001)"]);
}

#[test]
fn a_budget_below_a_sequence_names_the_smallest_that_would_do() {
    let output = Bench::new().firebrick("train", &["memory.train_tokens=8"]);
    refused(&output, &["memory.train_tokens is 8", "raise it to at least 10"]);
}

#[test]
fn a_bad_line_of_input_is_named_by_logprobs() {
    let bench = Bench::new();
    let input = bench.write("in.jsonl", "{\"input_ids\": [1, 2]}\n{\"ids\": 3}\n");
    let model = crate::support::fixtures().join("models/llama-gqa");
    let args = |input: &std::path::Path| {
        let out = bench.path("out.jsonl");
        firebrick(&[
            "logprobs",
            "--device",
            "cpu",
            "--model",
            model.to_str().unwrap(),
            "--input",
            input.to_str().unwrap(),
            "--output",
            out.to_str().unwrap(),
        ])
    };
    refused(&args(&input), &["in.jsonl line 2", "input_ids"]);
    let input = bench.write("in.jsonl", "{\"input_ids\": [1, 9999]}\n");
    refused(&args(&input), &["line 1", "9999", "vocabulary of 512"]);
}

#[test]
fn a_damaged_checkpoint_is_named_with_the_way_back() {
    let bench = Bench::new();
    super::succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    let path = bench.path("run/checkpoints/step-000001/trainer/optimizer.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
    let output = bench.firebrick("train", &["trainer.steps=2", "--resume"]);
    refused(&output, &["optimizer.safetensors", "restore the named files"]);
    let model = bench.path("run/checkpoints/step-000001/model");
    let weights = std::fs::read(model.join("model.safetensors")).unwrap();
    std::fs::write(model.join("model.safetensors"), &weights[..weights.len() - 1]).unwrap();
    let model = model.to_str().unwrap();
    let generated = firebrick(&["generate", "--model", model, "--prompt", "1+1=", "--device", "cpu"]);
    for output in [bench.firebrick("eval", &["--model", model]), generated] {
        refused(&output, &["model.safetensors: it is damaged", "copy the folder out"]);
    }
}

#[test]
fn a_reward_model_is_no_policy() {
    let model = crate::support::fixtures().join("heads/llama-score");
    if !model.is_dir() {
        crate::support::report("no heads/llama-score in this fixtures folder");
        return;
    }
    let output = firebrick(&["generate", "--model", model.to_str().unwrap(), "--prompt", "x", "--device", "cpu"]);
    refused(&output, &["causal language model", "classification head"]);
}

/// A configuration is text, which names its files.
#[cfg(unix)]
#[test]
fn a_file_whose_name_is_not_utf_8_is_refused_with_a_reason() {
    use std::os::unix::ffi::OsStrExt;
    let bench = Bench::new();
    let mut command = program(&["train", bench.path("config.yaml").to_str().unwrap(), "--plan"]);
    let output = command.arg(std::ffi::OsStr::from_bytes(b"\xff.json")).output().unwrap();
    refused(&output, &["UTF-8", "rename the file or folder"]);
}
