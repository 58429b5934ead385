//! Keys outside TRL's configuration classes: `ModelConfig`, the scripts' data, a trainer's own arguments, PEFT's, and
//! open-r1's.

use crate::common::{given, model};
use crate::facts::Facts;
use crate::rules::prelude::*;
use firebrick_engine::hub::HubName;
use serde_json::{Value, json};
use std::path::Path;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: dataset environment model_at_revision other_file peft peft_config prompt_column revision system_prompt targets
        trainer_model;
};

/// A file with more settings.
fn other_file(source: &SourceKey) -> MappedKey {
    match source.text() {
        Some(file) if !source.facts.reads(file) => cannot(format!(
            "its settings are in {file}, which is not among the files: import it before this one, `firebrick import \
             {file} …`"
        )),
        _ => not_needed("the keys of that file are listed in this table"),
    }
}

/// The model's revision, if it is not the main one.
fn other_revision(facts: &Facts) -> Option<&str> {
    let named = ["model_revision", "model_init_kwargs.revision"].into_iter().find_map(|key| facts.text(key));
    named.filter(|revision| *revision != "main")
}

/// The model with its revision, if it has one.
fn model_at_revision(source: &SourceKey) -> MappedKey {
    match (source.text(), other_revision(source.facts)) {
        (Some(name), Some(revision)) if HubName::is_one(name, Path::new(".")) => {
            model(&source.with(&json!(format!("{name}@{revision}"))))
        }
        _ => model(source),
    }
}

fn revision(source: &SourceKey) -> MappedKey {
    let name = ["model_name_or_path", "GRPOTrainer.model", "RLOOTrainer.model", "PPOTrainer.model"];
    let name = name.into_iter().find_map(|key| source.facts.text(key));
    match source.text() {
        None | Some("main") => not_needed("the main revision, as here by default"),
        Some(_) if name.is_some_and(|name| HubName::is_one(name, Path::new("."))) => {
            not_needed("it is in model.path, as owner/name@revision")
        }
        Some(revision) => cannot(format!("model.path takes a revision behind the name, as owner/name@{revision}")),
    }
}

/// A dataset; TRL's and open-r1's scripts use its rows unchanged.
fn dataset(source: &SourceKey) -> MappedKey {
    let facts = source.facts;
    let Some(name) = source.text() else {
        return source.off_or_wrong("a dataset");
    };
    let parts = [("dataset_config", "default"), ("dataset_train_split", "train")];
    let part = parts.into_iter().find_map(|(key, plain)| facts.text(key).filter(|part| *part != plain));
    match part {
        Some(part) => cannot(format!(
            "its part `{part}` is some of its files: write them as task.train, such as \
             hf://datasets/{name}/{part}/*.parquet"
        )),
        None => {
            set("task.train", facts.path(name)).with_note("its rows as they are, without what a program does to them")
        }
    }
}

/// A class by its name, with the file of its definition if the name has its module.
fn environment(source: &SourceKey) -> MappedKey {
    let Some(name) = source.text() else {
        return if source.is_off() {
            not_needed("one turn a rollout, as here without task.environment")
        } else {
            cannot(
                "rollouts of a run have environments of one class here: name it in task.environment ({kind: python, file, class})",
            )
        };
    };
    let python = |file: &str, class: &str| {
        set("task.environment", json!({"kind": "python", "file": source.facts.path(file), "class": class}))
    };
    if let Some(place) = source.facts.definition(name) {
        return python(&place.file, name);
    }
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c));
    match name.rsplit_once('.').filter(|_| is_name) {
        Some((module, class)) => python(&format!("{}.py", module.replace('.', "/")), class),
        None => cannot(format!(
            "write task.environment: {{kind: python, file: FILE, class: {name}}} with the file that defines `{name}`"
        )),
    }
}

fn peft(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return off();
    }
    // PEFT's and TRL's default rank and alpha
    let parameter = |key: &str, default: u64| plain(source.facts.value(key).unwrap_or(&default.into()));
    set_all([("model.lora.rank", parameter("lora_r", 16)), ("model.lora.alpha", parameter("lora_alpha", 32))])
}

/// TRL's flag takes a list, of which one word may mean all modules.
fn targets(source: &SourceKey) -> MappedKey {
    let all_linear = json!("all-linear");
    let is_all = source.value.as_array().is_some_and(|list| list.len() == 1 && list[0] == all_linear);
    given(&if is_all { source.with(&all_linear) } else { *source }, "model.lora.target_modules")
}

fn trainer_model(source: &SourceKey) -> MappedKey {
    match source.text() {
        Some(name) if name.contains('/') && !name.contains(['(', ' ']) => model_at_revision(source),
        _ if source.facts.value("model_name_or_path").is_some() || source.facts.value("sft_model_path").is_some() => {
            not_needed("set by model_name_or_path")
        }
        _ => cannot("it is an object of the program: write the model's folder as model.path"),
    }
}

fn peft_config(source: &SourceKey) -> MappedKey {
    let is_listed = source.facts.keys().any(|key| key.starts_with("LoraConfig."));
    match source.text() {
        // a call without arguments has PEFT's defaults
        Some(call) if call.contains("LoraConfig(") && !is_listed => {
            set_all([("model.lora.rank", 8.into()), ("model.lora.alpha", 8.into())]).with_note("PEFT's defaults")
        }
        Some(_) if is_listed || source.facts.keys().any(|key| key == "use_peft") => {
            not_needed("its arguments are listed in this table")
        }
        None => not_needed("no adapters, as here by default"),
        Some(_) => cannot("it is an object of the program: write rank and alpha under model.lora"),
    }
}

/// A message of the user with the text of a column.
fn messages(column: &str) -> (&'static str, Value) {
    ("task.messages", json!([{"role": "user", "content": format!("{{{column}}}")}]))
}

fn prompt_column(source: &SourceKey) -> MappedKey {
    set_all([messages(source.text().unwrap_or_default())]).with_note("the column has the message of the user")
}

fn system_prompt(source: &SourceKey) -> MappedKey {
    let Some(text) = source.text().filter(|text| !text.is_empty()) else {
        return source.off_or_wrong("a text");
    };
    let column = (!source.facts.is_written("dataset_prompt_column")).then(|| messages("prompt"));
    set_all([("task.system_prompt", json!(text))].into_iter().chain(column))
}
