//! What several engines' keys become in the same way.

use super::facts::{Facts, truth};
use super::key_mapping::prelude::*;
use firebrick_engine::hub::HubName;
use serde_json::{Value, json};
use std::path::Path;

/// Endings of files with rows or programs.
const FILES: [&str; 6] = ["parquet", "jsonl", "json", "gz", "py", "jinja"];

/// Rows of the training split of GSM8K.
const GSM8K_ROWS: u64 = 7_473;

pub(super) const NO_PYTHON: &str = "no Python is run: model families are built in";
pub(super) const OWN_ENGINE: &str = "the sampling engine is built in, and samples from the weights that are trained";
pub(super) const ONE_POOL: &str = "sampling uses the memory that training leaves free: the two alternate in one pool";
pub(super) const VALIDATED: &str =
    "validation samples rollout.max_num_seqs sequences at a time, regardless of its size";
pub(super) const PACKED: &str = "rows are packed without padding by default";
pub(super) const OWN_CONFIG: &str = "the model's config.json defines the model: edit it in the folder";
pub(super) const ONE_RATIO: &str = "1 changes nothing";

/// Machines, or devices of each: the ranks that `mpirun` has to start.
pub(super) fn ranks(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("one rank, as here without mpirun"),
        Some(n) => set(key, n).noted(
            "a run has as many ranks as `mpirun -n N` starts, and rejects another number; remove the key for one \
             device",
        ),
    }
}

/// Degrees of parallelism above one that change no result.
pub(super) fn devices(asked: &SourceKey) -> MappedKey {
    let has = |part: &str| asked.key.contains(part);
    let option = if has("tensor") || has("model_parallel_size") && !has("pipeline") && !has("context") {
        "--tensor-parallel"
    } else if has("pipeline") {
        "--pipeline-parallel"
    } else if has("sequence") || has("context") {
        "--sequence-parallel"
    } else {
        "--zero-stage 3 --data-parallel"
    };
    match asked.whole() {
        None | Some(-1..=1) => not_needed("one device, as here"),
        Some(n) => not_needed(format!(
            "results do not depend on it: training is data, tensor, pipeline and sequence parallel, each with a separate \
             key; `firebrick plan CONFIG {option} {n}` estimates what each of {n} devices would hold"
        )),
    }
}

/// Ranks that are a group for something: matrices, stages, sequences.
pub(super) fn grouped(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        None | Some(-1..=1) => not_needed("each rank works by itself, as here by default"),
        Some(n) => set(key, n).noted(
            "a run has as many ranks as `mpirun -n N` starts, a multiple of this; remove the key for one device",
        ),
    }
}

/// An argument of the chat template.
pub(super) fn arguments(asked: &SourceKey) -> MappedKey {
    match asked.key.split_once("chat_template_kwargs.") {
        Some((_, name)) if !asked.is_absent() => set(&format!("model.chat_template_kwargs.{name}"), plain(asked.value)),
        _ => absent(),
    }
}

/// A chat template: its text, or a file with it.
pub(super) fn template(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(text) if text.contains("{{") || text.contains("{%") => set("model.chat_template", text),
        Some(file) => set("model.chat_template", path(asked.facts, file)),
        None if asked.is_off() => not_needed("the tokenizer's, as here by default"),
        None => asked.wrong("a template"),
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
    let Some(name) = asked.text() else {
        return if asked.is_absent() { absent() } else { asked.wrong("a model's folder or name") };
    };
    let path = path(asked.facts, name);
    let is_name = !path.starts_with(['/', '.']) && path.matches('/').count() == 1;
    let note = if is_name { "a folder next to the configuration file, or else downloaded from the Hub" } else { "" };
    set("model.path", path).noted(note)
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

/// A folder or file under a key of ours.
pub(super) fn folder(asked: &SourceKey, key: &str) -> MappedKey {
    asked.text().map_or_else(|| asked.off_or_wrong("a path"), |text| set(key, path(asked.facts, text)))
}

/// A reward model by its folder.
pub(super) fn reward_model(facts: &Facts, folder: &str) -> MappedKey {
    set("task.rewards[]", json!({"kind": "model", "path": path(facts, folder)}))
}

/// The strings of a list, or the only one.
pub(super) fn texts(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(texts) => texts.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Files of rows under a key of ours: one, or a list.
pub(super) fn rows(asked: &SourceKey, key: &str) -> MappedKey {
    let mut paths: Vec<Value> = texts(asked.value).iter().map(|file| path(asked.facts, file).into()).collect();
    match paths.len() {
        0 => asked.off_or_wrong("a file, or a list of files"),
        1 => set(key, paths.remove(0)),
        _ => set(key, paths),
    }
}

/// Steps of so many passes over the training rows, where their number is known. What is left of a pass is dropped.
pub(super) fn epochs(facts: &Facts, epochs: f64, prompts: u64) -> MappedKey {
    let is_gsm8k = ["data.train_files", "dataset_name", "load_dataset.argument_1"]
        .iter()
        .filter_map(|key| facts.value(key))
        .any(|value| value.to_string().contains("gsm8k") && !value.to_string().contains(','));
    let Some(rows) = facts.rows.or(is_gsm8k.then_some(GSM8K_ROWS)) else {
        return cannot(
            "the length of a run is in steps here, and the files do not specify the number of rows: pass --rows N, or \
             set trainer.steps to epochs x rows / trainer.train_batch_size",
        );
    };
    let each = rows / prompts.max(1);
    let steps = (epochs * each as f64).ceil().max(1.0) as u64;
    let note = format!("{epochs} x {each} steps of {prompts} prompts out of {rows} rows");
    set("trainer.steps", steps).noted(note)
}

/// Whether rows are drawn in shuffled order.
pub(super) fn shuffled(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("rows are drawn in shuffled epochs");
    }
    cannot("rows are always drawn in shuffled epochs; the rows of a step depend only on trainer.seed")
}

/// Where metrics go.
pub(super) fn trackers(asked: &SourceKey) -> MappedKey {
    let (ours, others): (Vec<&str>, Vec<&str>) =
        texts(asked.value).into_iter().partition(|name| ["tensorboard", "trackio"].contains(name));
    let others: Vec<&str> = others.into_iter().filter(|name| !["console", "file", "none"].contains(name)).collect();
    let mut loggers = [vec!["console", "file"], ours].concat();
    if !others.is_empty() {
        loggers.push("trackio");
    }
    loggers.dedup();
    let note = match others[..] {
        [] => String::new(),
        _ => format!("no {} here; trackio is used instead", others.join(", ")),
    };
    set("trainer.logger", json!(loggers)).noted(note)
}

/// What trackers call a run, or the project that it belongs to.
pub(super) fn tracked(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.value {
        Value::String(name) if !name.is_empty() => set(key, name.as_str()),
        // a name of digits is a number in YAML
        Value::Number(name) => set(key, name.to_string()),
        _ => asked.off_or_wrong("a name"),
    }
}

/// A switch that is built in: on it is what happens anyway, off it cannot be had.
pub(super) fn built_in(asked: &SourceKey, what: &str) -> MappedKey {
    let end = if truth(asked.value) == Some(false) { ", and nothing is lost by it" } else { "" };
    not_needed(format!("{what}{end}"))
}

/// A truth value under a key of ours.
pub(super) fn switch(asked: &SourceKey, key: &str) -> MappedKey {
    set(key, asked.is_on())
}

/// A value under a key of ours, where there is one.
pub(super) fn given(asked: &SourceKey, key: &str) -> MappedKey {
    if asked.is_absent() { absent() } else { set(key, plain(asked.value)) }
}

/// A whole number above zero under a key of ours.
pub(super) fn size(asked: &SourceKey, key: &str) -> MappedKey {
    asked.count().map_or_else(|| asked.off_or_wrong("a whole number above 0"), |n| set(key, n))
}

/// The same; any other means that there is no bound, as here by default.
pub(super) fn bound(asked: &SourceKey, key: &str) -> MappedKey {
    asked.count().map_or_else(|| not_needed("none, as here by default"), |n| set(key, n))
}

/// Most checkpoints that are kept.
pub(super) fn keep(asked: &SourceKey) -> MappedKey {
    let key = "trainer.max_ckpt_to_keep";
    let why = format!("a number of checkpoints is kept: {key}, 3 by default");
    asked.count().map_or_else(|| not_needed(why), |n| set(key, n))
}

/// The likeliest tokens that are drawn from; all of them where it is no number above 0.
pub(super) fn top_k(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        Some(k) => set(key, if k > 0 { k } else { -1 }),
        None => asked.off_or_wrong("a whole number"),
    }
}

/// A penalty of repetition.
pub(super) fn penalty(asked: &SourceKey) -> MappedKey {
    if asked.number() == Some(1.0) {
        return not_needed(ONE_RATIO);
    }
    cannot("no penalty of repetition; a reward of {kind: length} or a stop text bounds completions")
}

/// Weights, gradients and the optimizer's update on the host, segment by segment.
pub(super) fn streamed(asked: &SourceKey, recomputes: bool) -> MappedKey {
    match (asked.is_on(), recomputes) {
        (false, _) => off(),
        (true, true) => set_all([
            ("memory.param_offload", "streamed".into()),
            ("memory.grad_offload", true.into()),
            ("memory.optimizer_offload", "cpu".into()),
        ])
        .noted("gradients and the update are on the host too"),
        (true, false) => not_needed(
            "weights are streamed segment by segment only if segments are recomputed: turn gradient checkpointing on too",
        ),
    }
}
