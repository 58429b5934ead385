//! `NeMo RL`'s `data` and `env`: rows, prompts, and what grades completions.

use super::policy::prompt_length;
use crate::common::{path, rows, shuffled};
use crate::facts::Facts;
use crate::key_mapping::prelude::*;
use serde_json::json;

const READ_ONCE: &str = "rows are read once, before the first step";
const ROWS: &str = "write the dataset's name on the Hub, or its files, as task.train (docs/guides/data.md)";
const GRADED: &str = "task.rewards grade completions, and are among the values to be replaced";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        ("data.max_input_seq_length", By(length)),
        ("data.shuffle", By(shuffled)),
        ("data.num_workers", NotNeeded(READ_ONCE)),
        ("data.use_multiple_dataloader", Off("task.train takes several files with weights: {path, weight}")),
        ("data.dataset_name data.train.dataset_name data.default.dataset_name", By(dataset)),
        ("data.train.**", Off(ROWS)),
        ("data.train.data_path", To(rows, "task.train")),
        ("data.train.split_validation_size", By(held_out)),
        ("data.train.seed", By(seed)),
        ("data.validation.**", Off("write its name on the Hub, or its files, as task.validation")),
        ("data.validation.data_path", To(rows, "task.validation")),
        ("data.train.input_key data.default.input_key", By(question)),
        ("data.train.output_key data.default.output_key", By(ground_truth)),
        ("data.{train.,default.,}prompt_file", By(prompt)),
        ("data.{train.,default.,}system_prompt_file", By(system_prompt)),
        ("data.validation.{input_key,output_key,prompt_file,system_prompt_file}", NotNeeded(AS_TRAINED)),
        ("data.{train,validation,default}.env_name env.math.** env.dapo.**", NotNeeded(GRADED)),
        ("data.{train,validation,default}.processor", NotNeeded(PROCESSED)),
        ("data.**", NotNeeded("task specifies the source of the rows and the content of a prompt")),
        ("env.**", Off("specify in task.rewards how completions are graded (docs/guides/rewards.md)")),
    ],
);

const AS_TRAINED: &str = "rows of validation have the fields and prompts of training";
const PROCESSED: &str = "task.messages makes a prompt of a row";

/// A setting of the training rows, which has the default of all rows where it has no value of its own.
fn of_rows<'a>(facts: &'a Facts, name: &str) -> Option<&'a str> {
    ["data.train", "data.default", "data"].iter().find_map(|section| facts.text(&format!("{section}.{name}")))
}

fn length(asked: &SourceKey) -> MappedKey {
    match (asked.whole().filter(|n| *n > 0), prompt_length(asked.facts)) {
        (Some(own), Some(prompt)) if own == prompt => set("rollout.prompt_length", prompt),
        (Some(_), _) => not_needed("no less than max_total_sequence_length, which has the lengths of both"),
        _ => asked.off_or_wrong("a number of tokens"),
    }
}

/// A name is of a class that fetches rows; that of files is read from them.
fn dataset(asked: &SourceKey) -> MappedKey {
    let named = asked.text().is_some_and(|name| name != "ResponseDataset");
    if !named || asked.facts.value("data.train.data_path").is_some() {
        return not_needed("rows come from data_path");
    }
    if asked.key == "data.default.dataset_name" && asked.facts.text("data.train.dataset_name").is_some() {
        return not_needed("data.train names a dataset");
    }
    cannot(ROWS)
}

/// The prompt of a row: its question, within the text of a prompt file. Braces there are those of a template here.
fn messages(facts: &Facts) -> Result<MappedKey, String> {
    let field = of_rows(facts, "input_key").unwrap_or("input");
    let content = match of_rows(facts, "prompt_file") {
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|e| format!("cannot read {file}: {e}"))?;
            let asked = with_question(&text, field);
            asked.ok_or_else(|| format!("{file}: expected one {{}}, in place of the question"))?
        }
        None => format!("{{{field}}}"),
    };
    Ok(set("task.messages", json!([{"role": "user", "content": content}])))
}

/// A text of Python's `format` with a field in its one place; doubled braces are braces in both.
fn with_question(text: &str, field: &str) -> Option<String> {
    let (mut whole, mut rest, mut places) = (String::new(), text, 0);
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        whole.push_str(before);
        let pair = brace.get(..2)?;
        match pair {
            "{{" | "}}" => whole.push_str(pair),
            "{}" => {
                places += 1;
                whole.extend(["{", field, "}"]);
            }
            _ => return None,
        }
        rest = &brace[2..];
    }
    whole.push_str(rest);
    (places == 1).then_some(whole)
}

fn prompt(asked: &SourceKey) -> MappedKey {
    if asked.is_off() {
        return not_needed("a prompt is the question");
    }
    messages(asked.facts).unwrap_or_else(|why| cannot(format!("{why}; write the prompt as task.messages")))
}

fn question(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(_) => messages(asked.facts).unwrap_or_else(|_| not_needed("the field is in the prompt of prompt_file")),
        None => asked.off_or_wrong("the name of a field"),
    }
}

fn system_prompt(asked: &SourceKey) -> MappedKey {
    let Some(file) = of_rows(asked.facts, "system_prompt_file") else {
        return not_needed("none, as here by default");
    };
    match std::fs::read_to_string(file) {
        Ok(text) => set("task.system_prompt", text),
        Err(e) => cannot(format!("cannot read {}: {e}; write its text as task.system_prompt", path(asked.facts, file))),
    }
}

fn ground_truth(asked: &SourceKey) -> MappedKey {
    match of_rows(asked.facts, "output_key") {
        Some(field) => set("task.answer_field", field),
        None => asked.off_or_wrong("the name of a field"),
    }
}

/// A share of the rows for validation; it does not count where there are rows of their own.
fn held_out(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("data.validation.data_path").is_some() {
        return not_needed("data.validation has separate rows");
    }
    match asked.number() {
        Some(0.0) => not_needed("nothing is held out, as here by default"),
        Some(share) if 0.0 < share && share < 1.0 => set("task.validation_fraction", share),
        _ => asked.wrong("a share of the rows, from 0 to 1"),
    }
}

/// Which rows are held out.
fn seed(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(seed) if seed >= 0 => set("task.seed", seed),
        _ => asked.off_or_wrong("a whole number, 0 or more"),
    }
}
