//! What open-r1's configurations have beside TRL's.

use crate::common::tracked;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, not_needed};
use serde_json::json;

const OF_REWARDS: &str = "an argument of a reward of reward_funcs, and in its `arguments`";
const HUB: &str = "checkpoints stay in the run folder; `hf upload` puts one on the hub";
const SANDBOX: &str = "an argument of rewards that run programs, which reward_funcs names";

pub(super) const TABLE: &[KeyRule] = &[
    ("system_prompt", By(system_prompt)),
    ("dataset_prompt_column", By(prompt_column)),
    ("cosine_min_value_wrong", NotNeeded(OF_REWARDS)),
    ("cosine_max_value_wrong", NotNeeded(OF_REWARDS)),
    ("cosine_min_value_correct", NotNeeded(OF_REWARDS)),
    ("cosine_max_value_correct", NotNeeded(OF_REWARDS)),
    ("cosine_max_len", NotNeeded(OF_REWARDS)),
    ("repetition_n_grams", NotNeeded(OF_REWARDS)),
    ("repetition_max_penalty", NotNeeded(OF_REWARDS)),
    ("code_language", NotNeeded(OF_REWARDS)),
    ("max_completion_len", NotNeeded(OF_REWARDS)),
    ("soft_punish_cache", NotNeeded(OF_REWARDS)),
    ("code_eval_test_batch_size", NotNeeded(SANDBOX)),
    ("code_eval_scoring_mode", NotNeeded(SANDBOX)),
    ("parallel_code_exec_per_proc", NotNeeded(SANDBOX)),
    ("e2b_router_url", NotNeeded(SANDBOX)),
    ("morph_router_url", NotNeeded(SANDBOX)),
    ("code_provider", NotNeeded(SANDBOX)),
    ("ioi_provider", NotNeeded(SANDBOX)),
    (
        "dataset_mixture.**",
        Off("write its datasets as a list of {path, weight} under task.train (docs/guides/data.md)"),
    ),
    ("benchmarks", NotNeeded("they run after training: evaluate the exported model with the same tool")),
    ("callbacks", NotNeeded("they push checkpoints and run benchmarks, which change no step")),
    ("hub_model_revision", NotNeeded(HUB)),
    ("overwrite_hub_revision", NotNeeded(HUB)),
    ("push_to_hub_revision", NotNeeded(HUB)),
    ("wandb_entity", NotNeeded("trackers are local")),
    ("wandb_project", By(|a| tracked(a, "trainer.project_name"))),
    ("wandb_run_group", NotNeeded("trackers are local")),
];

/// The column is the message of the user, as text.
fn messages(column: &str) -> (String, serde_json::Value) {
    ("task.messages".to_owned(), json!([{"role": "user", "content": format!("{{{column}}}")}]))
}

fn prompt_column(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(column) => MappedKey::Set(vec![messages(column)], "the column has the message of the user".into()),
        None if asked.is_off() => not_needed("has no value in the files"),
        None => asked.wrong("the name of a column"),
    }
}

fn system_prompt(asked: &SourceKey) -> MappedKey {
    let Some(text) = asked.text().filter(|own| !own.is_empty()) else {
        return if asked.is_off() { not_needed("has no value in the files") } else { asked.wrong("a text") };
    };
    let mut settings = vec![("task.system_prompt".to_owned(), json!(text))];
    if !asked.facts.is_written("dataset_prompt_column") {
        settings.push(messages("prompt"));
    }
    MappedKey::Set(settings, String::new())
}
