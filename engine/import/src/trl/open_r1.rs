//! What open-r1's configurations have beside TRL's.

use crate::common::tracked;
use crate::key_mapping::prelude::*;
use serde_json::{Value, json};

const LOCAL: &str = "trackers are local";
const OF_REWARDS: &str = "an argument of a reward of reward_funcs, and in its `arguments`";
const SANDBOX: &str = "an argument of rewards that run programs, which reward_funcs names";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        ("system_prompt", By(system_prompt)),
        ("dataset_prompt_column", By(prompt_column)),
        (
            "cosine_{min,max}_value_{wrong,correct} cosine_max_len repetition_n_grams repetition_max_penalty code_language max_completion_len \
             soft_punish_cache",
            NotNeeded(OF_REWARDS),
        ),
        (
            "code_eval_test_batch_size code_eval_scoring_mode parallel_code_exec_per_proc e2b_router_url \
             morph_router_url code_provider ioi_provider",
            NotNeeded(SANDBOX),
        ),
        ("dataset_mixture.**", Off("write its datasets as {path, weight} under task.train (docs/guides/data.md)")),
        ("benchmarks", NotNeeded("they run after training: evaluate the exported model with the same tool")),
        ("callbacks", NotNeeded("they push checkpoints and run benchmarks, which change no step")),
        ("hub_model_revision overwrite_hub_revision push_to_hub_revision", NotNeeded(super::training::HUB)),
        ("wandb_entity wandb_run_group", NotNeeded(LOCAL)),
        ("wandb_project", To(tracked, "trainer.project_name")),
    ],
);

/// The column is the message of the user, as text.
fn messages(column: &str) -> (&'static str, Value) {
    ("task.messages", json!([{"role": "user", "content": format!("{{{column}}}")}]))
}

fn prompt_column(asked: &SourceKey) -> MappedKey {
    asked.text().map_or_else(
        || asked.off_or_wrong("the name of a column"),
        |column| set_all([messages(column)]).noted("the column has the message of the user"),
    )
}

fn system_prompt(asked: &SourceKey) -> MappedKey {
    let Some(text) = asked.text().filter(|own| !own.is_empty()) else {
        return asked.off_or_wrong("a text");
    };
    let column = (!asked.facts.is_written("dataset_prompt_column")).then(|| messages("prompt"));
    set_all([("task.system_prompt", json!(text))].into_iter().chain(column))
}
