//! verl's `data` section.

use crate::common::{NO_PYTHON, VALIDATED, arguments, bound, path, rows, shuffled, size};
use crate::facts::Facts;
use crate::key_mapping::prelude::*;

const ROWS: &str = "rows are text; images, video and sound are not trained on";
const ONE_PROCESS: &str = "rows are read once, before the first step";
const FROM_FILES: &str = "rows come from files, or from a Task in Rust (docs/guides/rewards.md)";

pub(super) const TABLE: KeyTable = (
    "data.",
    &[
        ("train_files", To(rows, "task.train")),
        ("val_files", To(rows, "task.validation")),
        // also as Search-R1 calls them
        ("train_max_samples train_data_num", To(bound, "task.limit")),
        ("val_max_samples val_data_num", To(bound, "trainer.val_max_samples")),
        ("train_batch_size", By(trained)),
        ("gen_batch_size", By(generated)),
        ("val_batch_size", NotNeeded(VALIDATED)),
        ("max_prompt_length", Same("rollout.prompt_length")),
        ("max_response_length", Same("rollout.response_length")),
        ("filter_overlong_prompts", By(overlong)),
        ("truncation", By(truncation)),
        ("prompt_key", To(column, "task.prompt_field")),
        ("reward_fn_key", By(reward_key)),
        ("shuffle shuffle_train_dataloader", By(shuffled)),
        ("validation_shuffle", NotNeeded("validation draws its rows in their order, which changes no mean")),
        ("seed", Same("task.seed")),
        ("tokenizer", By(tokenizer)),
        ("{image,video,audio}_key image_patch_size return_multi_modal_inputs mm_processor_kwargs.**", NotNeeded(ROWS)),
        ("return_raw_chat", NotNeeded("a prompt that is a conversation goes through the model's chat template")),
        ("return_raw_input_ids", NotNeeded("prompts are encoded once, by the policy's tokenizer")),
        ("return_full_prompt", NotNeeded("samples.jsonl has the prompts")),
        ("filter_overlong_prompts_workers dataloader_num_workers use_shm cache_dir", NotNeeded(ONE_PROCESS)),
        ("trust_remote_code", NotNeeded(NO_PYTHON)),
        ("custom_cls.path datagen.path", Off(FROM_FILES)),
        ("custom_cls.name", NotNeeded("it names the class at data.custom_cls.path")),
        ("sampler.class_path", Off("for another order of rows write a Task in Rust (docs/guides/rewards.md)")),
        ("sampler.class_name", NotNeeded("it names the class at data.sampler.class_path")),
        ("datagen.name", NotNeeded("it names the class at data.datagen.path")),
        ("tool_config_path", NotNeeded("rollout.multi_turn.tool_config_path names it")),
        ("function_tool_path", NotNeeded("rollout.multi_turn.function_tool_path names it")),
        ("need_tools_kwargs", Off("write verl's tools and interactions as one class and set task.environment")),
        ("max_start_length", NotNeeded("max_prompt_length is the limit of a prompt")),
        ("max_obs_length", Off("rollout.multi_turn.max_tool_response_length counts characters of a tool's answer")),
        ("apply_chat_template_kwargs.**", By(arguments)),
    ],
);

/// Prompts that a step trains on: all that verl's loader draws, but with DAPO's filter.
pub(super) fn prompts(facts: &Facts) -> i64 {
    let drawn = facts.whole("data.gen_batch_size").filter(|_| !filters(facts));
    drawn.or_else(|| facts.whole("data.train_batch_size")).unwrap_or(1024)
}

fn filters(facts: &Facts) -> bool {
    facts.is_on("algorithm.filter_groups.enable")
}

fn trained(asked: &SourceKey) -> MappedKey {
    match asked.facts.whole("data.gen_batch_size") {
        Some(_) if !filters(asked.facts) => {
            not_needed("gen_batch_size prompts are drawn, and without algorithm.filter_groups all are trained on")
        }
        _ => set("trainer.train_batch_size", plain(asked.value)),
    }
}

/// DAPO's larger batches of prompts, of which those without spread are left out.
fn generated(asked: &SourceKey) -> MappedKey {
    let prompts = asked.facts.number("data.train_batch_size");
    match (asked.number(), prompts) {
        (Some(_), _) if !filters(asked.facts) => size(asked, "trainer.train_batch_size"),
        (Some(drawn), Some(prompts)) if drawn >= prompts && prompts > 0.0 => {
            let key = "rollout.dynamic_sampling.oversampling";
            set(key, drawn / prompts).noted("gen_batch_size / train_batch_size")
        }
        (Some(_), _) => not_needed("a round draws the prompts that are missing in data.train_batch_size, at least"),
        _ => asked.off_or_wrong("a number of prompts"),
    }
}

fn overlong(asked: &SourceKey) -> MappedKey {
    let end = if asked.is_on() { "" } else { ", while verl would truncate them or stop" };
    not_needed(format!("longer prompts are always skipped and counted{end}"))
}

fn truncation(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("error") => not_needed("longer prompts are skipped and counted: none is truncated"),
        Some(_) if asked.facts.is_on("data.filter_overlong_prompts") => {
            not_needed("longer prompts are filtered out before")
        }
        Some(side) => cannot(format!(
            "no prompt is truncated ({side}): longer ones are skipped and counted. To keep them, raise \
             rollout.prompt_length"
        )),
        None => asked.wrong("error, left, right or middle"),
    }
}

fn column(asked: &SourceKey, key: &str) -> MappedKey {
    asked.text().map_or_else(|| asked.wrong("the name of a column"), |name| set(key, name))
}

fn reward_key(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("data_source") | None => not_needed("the task's rewards grade every row"),
        Some(_) => cannot("one list of rewards grades every row: choose it in task.rewards"),
    }
}

fn tokenizer(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(own) => cannot(format!(
            "the model's tokenizer is used: put the files of {} into the model's folder",
            path(asked.facts, own)
        )),
        None => not_needed("the model's, as here"),
    }
}
