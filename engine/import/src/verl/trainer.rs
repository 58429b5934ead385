//! verl's `trainer`: the length of a run, and the program that runs.

use crate::common::epochs;
use crate::rules::prelude::*;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: passes;
    Holds: reads_config;
};

fn passes(source: &SourceKey) -> MappedKey {
    // prompts that verl's loader draws at a time
    let drawn = ["data.gen_batch_size", "data.train_batch_size"].iter().find_map(|key| source.facts.whole(key));
    let prompts = drawn.and_then(|n| u64::try_from(n).ok()).unwrap_or(1024);
    match source.number() {
        _ if source.facts.whole("trainer.total_training_steps").is_some() => {
            not_needed("total_training_steps is given")
        }
        Some(n) if n > 0.0 => epochs(source.facts, n, prompts),
        _ => source.wrong("a number of passes over the rows"),
    }
}

/// Returns true if the script's base configuration is among the files.
fn reads_config(source: &SourceKey) -> bool {
    let name = source.text().map(|name| name.trim_end_matches(".yaml"));
    name.is_some_and(|name| source.facts.reads(&format!("{name}.yaml")))
}
