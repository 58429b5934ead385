//! Conversions that several engines share.

use super::facts::Facts;
use super::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: arguments judge_model model trackers;
    To: path ranks rows tracked;
};

/// Rows of the training split of GSM8K.
const GSM8K_ROWS: u64 = 7_473;

/// An argument of the chat template.
fn arguments(source: &SourceKey) -> MappedKey {
    match source.key.split_once("chat_template_kwargs.") {
        Some((_, name)) if !source.is_absent() => {
            set(&format!("model.chat_template_kwargs.{name}"), plain(source.value))
        }
        _ => absent(),
    }
}

/// The model: a folder, or a name on the Hub, which is one here too.
pub(super) fn model(source: &SourceKey) -> MappedKey {
    let Some(name) = source.text() else {
        return if source.is_absent() { absent() } else { source.wrong("a model's folder or name") };
    };
    let path = source.facts.path(name);
    let is_name = !path.starts_with(['/', '.']) && path.matches('/').count() == 1;
    let note = if is_name { "a folder next to the configuration file, or else downloaded from the Hub" } else { "" };
    set("model.path", path).with_note(note)
}

/// A reward model by its folder.
pub(super) fn reward_model(facts: &Facts, folder: &str) -> MappedKey {
    set("task.rewards[]", json!({"kind": "model", "path": facts.path(folder)}))
}

/// The strings of a list, or the only one.
pub(super) fn texts(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(texts) => texts.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Files of rows under a Firebrick key: one, or a list.
fn rows(source: &SourceKey, key: &str) -> MappedKey {
    let mut paths: Vec<Value> = texts(source.value).iter().map(|file| source.facts.path(file).into()).collect();
    match paths.len() {
        0 => source.off_or_wrong("a file, or a list of files"),
        1 => set(key, paths.remove(0)),
        _ => set(key, paths),
    }
}

/// Steps of `epochs` passes over the training rows, if their number is known. The rest of a pass is dropped.
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
    let steps_per_epoch = rows / prompts.max(1);
    let steps = (epochs * steps_per_epoch as f64).ceil().max(1.0) as u64;
    let note = format!("{epochs} x {steps_per_epoch} steps of {prompts} prompts out of {rows} rows");
    set("trainer.steps", steps).with_note(note)
}

/// Metric trackers.
pub(super) fn trackers(source: &SourceKey) -> MappedKey {
    let (ours, others): (Vec<&str>, Vec<&str>) =
        texts(source.value).into_iter().partition(|name| ["tensorboard", "trackio"].contains(name));
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
    set("trainer.logger", json!(loggers)).with_note(note)
}

/// Name of a run or a project in trackers.
fn tracked(source: &SourceKey, key: &str) -> MappedKey {
    match source.value {
        Value::String(name) if !name.is_empty() => set(key, name.as_str()),
        // a name of digits is a number in YAML
        Value::Number(name) => set(key, name.to_string()),
        _ => source.off_or_wrong("a name"),
    }
}

/// A positive integer under a Firebrick key.
pub(super) fn size(source: &SourceKey, key: &str) -> MappedKey {
    source.count().map_or_else(|| source.off_or_wrong("a whole number above 0"), |n| set(key, n))
}

/// A value under a Firebrick key, if there is one.
pub(super) fn given(source: &SourceKey, key: &str) -> MappedKey {
    if source.is_absent() { absent() } else { set(key, plain(source.value)) }
}

/// A folder or file under a Firebrick key.
fn path(source: &SourceKey, key: &str) -> MappedKey {
    set(key, source.facts.path(source.text().unwrap_or_default()))
}

/// A reward model, by its folder.
fn judge_model(source: &SourceKey) -> MappedKey {
    reward_model(source.facts, source.text().unwrap_or_default())
}

/// Machines, or devices of each: the ranks that `mpirun` has to start.
pub(super) fn ranks(source: &SourceKey, key: &str) -> MappedKey {
    match source.whole() {
        None | Some(-1..=1) => not_needed("one rank, as here without mpirun"),
        Some(n) => set(key, n).with_note(
            "a run has as many ranks as `mpirun -n N` starts, and rejects another number; remove the key for one \
             device",
        ),
    }
}
