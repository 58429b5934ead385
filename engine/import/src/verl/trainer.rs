//! verl's `trainer`: the length of a run, and the program that runs.

use crate::common::epochs;
use crate::rules::prelude::*;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: config_name passes program;
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

/// Programs of verl that train as its main one does.
const MAIN: [&str; 3] = ["main_ppo", "main_ppo_v0", "main_dapo"];

fn program(source: &SourceKey) -> MappedKey {
    let name = source.text().unwrap_or_default();
    let last = name.trim_end_matches(".py").rsplit(['.', '/']).next().unwrap_or_default();
    if MAIN.contains(&last) && !name.contains("experimental") {
        return not_needed("`firebrick train` trains");
    }
    cannot("it is not verl.trainer.main_ppo: what it does in another way is not read")
}

fn config_name(source: &SourceKey) -> MappedKey {
    match source.text().map(|name| name.trim_end_matches(".yaml")) {
        Some("ppo_trainer" | "ppo_megatron_trainer") => not_needed("verl's defaults are known"),
        Some(name) if source.facts.reads(&format!("{name}.yaml")) => not_needed("it is among the files"),
        _ => cannot(format!(
            "the script starts from the file {}: import it first, `firebrick import FILE SCRIPT`",
            source.value
        )),
    }
}
