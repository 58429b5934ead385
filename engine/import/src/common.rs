//! What several engines' keys become in the same way.

use super::facts::{Facts, truth};
use super::key_mapping::{MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use firebrick_engine::hub::HubName;
use serde_json::{Value, json};
use std::path::Path;

/// Endings of files with rows or programs.
const FILES: [&str; 6] = ["parquet", "jsonl", "json", "gz", "py", "jinja"];

/// Rows of the training split of GSM8K.
const GSM8K_ROWS: u64 = 7_473;

/// Machines, or devices of each: the ranks that `mpirun` has to start.
pub(super) fn ranks(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("one rank, as here without mpirun"),
        Some(n) => set_noted(
            key,
            n,
            "a run has as many ranks as `mpirun -n N` starts, and rejects another number; remove the key for one \
             device",
        ),
    }
}

/// Degrees of parallelism above one.
pub(super) fn devices(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("one device, as here"),
        Some(n) => not_needed(format!(
            "results do not depend on it: training is data, tensor, pipeline and sequence parallel, each with a separate \
             key; `firebrick plan CONFIG {} {n}` estimates what each of {n} devices would hold",
            degree(asked.key)
        )),
    }
}

/// Devices that share matrices in training.
pub(super) fn training_groups(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("each rank has whole matrices, as here by default"),
        Some(n) => set_noted(
            "memory.tensor_model_parallel_size",
            n,
            "a run has as many ranks as `mpirun -n N` starts, a multiple of this; remove the key for one device",
        ),
    }
}

/// Stages that layers are divided into in training.
pub(super) fn training_stages(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("each rank has all layers, as here by default"),
        Some(n) => set_noted(
            "memory.pipeline_model_parallel_size",
            n,
            "a run has as many ranks as `mpirun -n N` starts, a multiple of this; remove the key for one device",
        ),
    }
}

/// Ranks that share the tokens of every sequence.
pub(super) fn shared_sequences(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("each rank has its sequences, as here by default"),
        Some(n) => set_noted(
            "memory.ulysses_sequence_parallel_size",
            n,
            "a run has as many ranks as `mpirun -n N` starts, a multiple of this; remove the key for one device",
        ),
    }
}

/// The same of a model that is not the policy, whose degree `policy` says: all have the policy's.
pub(super) fn same_training_groups(asked: &SourceKey, policy: &str) -> MappedKey {
    same_degree(asked, policy, "shard matrices over the same ranks", "memory.tensor_model_parallel_size")
}

/// The same of stages.
pub(super) fn same_training_stages(asked: &SourceKey, policy: &str) -> MappedKey {
    same_degree(asked, policy, "have stages on the same ranks", "memory.pipeline_model_parallel_size")
}

fn same_degree(asked: &SourceKey, policy: &str, what: &str, key: &str) -> MappedKey {
    let shared = asked.facts.whole(policy).unwrap_or(1).max(1);
    match asked.whole().map_or(1, |n| n.max(1)) {
        n if n == shared => not_needed("policy, reference and critic have the same"),
        n => not_needed(format!(
            "policy, reference and critic {what}, with the same results: {policy} is {shared} and this is {n}, and the \
             former applies ({key})"
        )),
    }
}

/// Devices that share matrices while they sample.
pub(super) fn sampling_groups(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("each rank samples by itself, as here by default"),
        Some(n) => set_noted(
            "rollout.tensor_model_parallel_size",
            n,
            "a run has as many ranks as `mpirun -n N` starts, a multiple of this; remove the key for one device",
        ),
    }
}

/// An argument of the chat template, below `start` in the source.
pub(super) fn arguments(asked: &SourceKey, start: &str) -> MappedKey {
    match asked.key.strip_prefix(start) {
        Some(name) if !asked.is_absent() => set(&format!("model.chat_template_kwargs.{name}"), plain(asked.value)),
        _ => not_needed("has no value in the files"),
    }
}

/// A chat template: its text, or a file with it.
pub(super) fn template(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.text() {
        Some(text) if text.contains("{{") || text.contains("{%") => set(key, text),
        Some(file) => set(key, path(asked.facts, file)),
        None if asked.is_off() => not_needed("the tokenizer's, as here by default"),
        None => asked.wrong("a template"),
    }
}

/// The option of `firebrick plan` for a degree of parallelism.
fn degree(key: &str) -> &'static str {
    let has = |part: &str| key.contains(part);
    if has("tensor") || has("model_parallel_size") && !has("pipeline") && !has("context") {
        "--tensor-parallel"
    } else if has("pipeline") {
        "--pipeline-parallel"
    } else if has("sequence") || has("context") {
        "--sequence-parallel"
    } else {
        "--zero-stage 3 --data-parallel"
    }
}

/// A float type for the whole run.
pub(super) fn precision(asked: &SourceKey) -> MappedKey {
    match asked.text().and_then(float_type) {
        Some(precision) => set("precision", precision),
        None if asked.is_absent() || asked.text() == Some("auto") => not_needed("set by the run's precision"),
        None => asked.wrong("a float type: float32, bfloat16 or float16"),
    }
}

/// Our name of a float type.
pub(super) fn float_type(name: &str) -> Option<&'static str> {
    match name.trim_start_matches("torch.").to_ascii_lowercase().as_str() {
        "bfloat16" | "bf16" => Some("bf16"),
        "float16" | "fp16" | "half" => Some("f16"),
        "float32" | "fp32" | "float" => Some("f32"),
        _ => None,
    }
}

/// The model: a folder, or a name on the Hub, which is one here too.
pub(super) fn model(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(name) => {
            let path = path(asked.facts, name);
            let is_name = !path.starts_with(['/', '.']) && path.matches('/').count() == 1;
            let note =
                if is_name { "a folder next to the configuration file, or else downloaded from the Hub" } else { "" };
            set_noted("model.path", path, note)
        }
        None if asked.is_absent() => not_needed("has no value in the files"),
        None => asked.wrong("a model's folder or name"),
    }
}

/// A path as it is in the configuration: with the user's home folder in place of `~`, and from the configuration's
/// folder where it was from the working folder. Names of the Hub stay.
pub(super) fn path(facts: &Facts, text: &str) -> String {
    match (text.strip_prefix("~/"), &facts.home, &facts.way_back) {
        (Some(rest), Some(home), _) => format!("{home}/{rest}"),
        (_, _, Some(back)) if is_relative(text) => format!("{back}/{text}"),
        _ => text.to_owned(),
    }
}

/// Whether a text is a path from the working folder.
fn is_relative(text: &str) -> bool {
    !text.is_empty()
        && !text.contains("://")
        && !Path::new(text).is_absolute()
        && (Path::new(text).extension().is_some_and(|ending| FILES.iter().any(|own| ending == *own))
            || !HubName::is_one(text, Path::new(".")))
}

/// Files of rows under a key of ours: one, or a list.
pub(super) fn rows(asked: &SourceKey, key: &str) -> MappedKey {
    let files: Vec<&str> = match asked.value {
        Value::String(file) => vec![file],
        Value::Array(files) => files.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    match files[..] {
        [] if asked.is_off() => not_needed("has no value in the files"),
        [] => asked.wrong("a file, or a list of files"),
        [file] => set(key, path(asked.facts, file)),
        _ => {
            let paths: Vec<Value> = files.iter().map(|file| path(asked.facts, file).into()).collect();
            set(key, paths)
        }
    }
}

/// Steps of so many passes over the training rows, where their number is known.
pub(super) fn epochs(facts: &Facts, epochs: f64, prompts: u64, drops_last: bool) -> MappedKey {
    let is_gsm8k = ["data.train_files", "dataset_name", "load_dataset.argument_1"]
        .iter()
        .filter_map(|key| facts.value(key))
        .any(|value| value.to_string().contains("gsm8k") && !value.to_string().contains(','));
    let known = if is_gsm8k { Some(GSM8K_ROWS) } else { None };
    let Some(rows) = facts.rows.or(known) else {
        return cannot(
            "the length of a run is in steps here, and the files do not specify the number of rows: pass --rows N, or \
             set trainer.steps to epochs x rows / trainer.train_batch_size",
        );
    };
    let each = if drops_last { rows / prompts.max(1) } else { rows.div_ceil(prompts.max(1)) };
    let steps = (epochs * each as f64).ceil().max(1.0) as u64;
    set_noted("trainer.steps", steps, format!("{epochs} x {each} steps of {prompts} prompts out of {rows} rows"))
}

/// Where metrics go.
pub(super) fn trackers(asked: &SourceKey) -> MappedKey {
    let names: Vec<&str> = match asked.value {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let known = |name: &&str| ["console", "file", "tensorboard", "trackio"].contains(name);
    let foreign: Vec<&str> = names.iter().copied().filter(|name| !known(name) && *name != "none").collect();
    let mut loggers = vec!["console", "file"];
    let known = names.iter().filter(|name| ["tensorboard", "trackio"].contains(name));
    loggers.extend(known);
    if !foreign.is_empty() {
        loggers.push("trackio");
    }
    loggers.dedup();
    let note = match foreign[..] {
        [] => String::new(),
        _ => format!("no {} here; trackio is used instead", foreign.join(", ")),
    };
    set_noted("trainer.logger", json!(loggers), note)
}

/// What trackers call a run, or the project that it belongs to.
pub(super) fn tracked(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.value {
        Value::String(name) if !name.is_empty() => set(key, name.as_str()),
        // a name of digits is a number in YAML
        Value::Number(name) => set(key, name.to_string()),
        _ if asked.is_off() => not_needed("has no value in the files"),
        _ => asked.wrong("a name"),
    }
}

/// A reward in Python, by file and function.
pub(super) fn python_reward(file: Option<String>, function: &str) -> MappedKey {
    match file {
        Some(file) => {
            set("task.rewards[]", json!({"kind": "python", "file": file, "function": function, "name": function}))
        }
        None => cannot(format!(
            "put `{function}` into a separate file, and write rewards: \
             [{{kind: python, file: FILE, function: {function}}}]"
        )),
    }
}

/// A switch that is built in: on it is what happens anyway, off it cannot be had.
pub(super) fn built_in(asked: &SourceKey, what: &str) -> MappedKey {
    match truth(asked.value) {
        Some(false) => not_needed(format!("{what}, and nothing is lost by it")),
        _ => not_needed(what),
    }
}

/// Offload of a model's state between phases, of the policy or under `memory.critic`.
pub(super) fn idle(asked: &SourceKey, key: &str) -> MappedKey {
    if asked.is_on() {
        return set(key, "idle");
    }
    not_needed("off, as here by default")
}

/// A whole number above zero under a key of ours.
pub(super) fn size(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set(key, n),
        _ if asked.is_off() => not_needed("has no value in the files"),
        _ => asked.wrong("a whole number above 0"),
    }
}
