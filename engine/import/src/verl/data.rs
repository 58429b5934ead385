//! verl's `data` section.

use crate::common::{arguments, path, rows, size};
use crate::facts::Facts;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};

const ROWS: &str = "rows are text; images, video and sound are not trained on";
const ONE_PROCESS: &str = "rows are read once, before the first step";

pub(super) const TABLE: &[KeyRule] = &[
    ("data.train_files", By(|a| rows(a, "task.train"))),
    ("data.val_files", By(|a| rows(a, "task.validation"))),
    ("data.train_max_samples", By(|a| limit(a, "task.limit"))),
    ("data.val_max_samples", By(|a| limit(a, "trainer.val_max_samples"))),
    ("data.train_batch_size", By(trained)),
    ("data.gen_batch_size", By(generated)),
    (
        "data.val_batch_size",
        NotNeeded("validation samples rollout.max_num_seqs sequences at a time, regardless of its size"),
    ),
    ("data.max_prompt_length", Same("rollout.prompt_length")),
    ("data.max_response_length", Same("rollout.response_length")),
    ("data.filter_overlong_prompts", By(overlong)),
    ("data.filter_overlong_prompts_workers", NotNeeded(ONE_PROCESS)),
    ("data.truncation", By(truncation)),
    ("data.prompt_key", By(prompt_key)),
    ("data.reward_fn_key", By(reward_key)),
    ("data.shuffle", By(shuffle)),
    ("data.validation_shuffle", NotNeeded("validation draws its rows in their order, which changes no mean")),
    ("data.seed", Same("task.seed")),
    ("data.tokenizer", By(tokenizer)),
    ("data.image_key", NotNeeded(ROWS)),
    ("data.video_key", NotNeeded(ROWS)),
    ("data.audio_key", NotNeeded(ROWS)),
    ("data.image_patch_size", NotNeeded(ROWS)),
    ("data.return_multi_modal_inputs", NotNeeded(ROWS)),
    ("data.return_raw_chat", NotNeeded("a prompt that is a conversation goes through the model's chat template")),
    ("data.return_raw_input_ids", NotNeeded("prompts are encoded once, by the policy's tokenizer")),
    ("data.return_full_prompt", NotNeeded("samples.jsonl has the prompts")),
    ("data.dataloader_num_workers", NotNeeded(ONE_PROCESS)),
    ("data.use_shm", NotNeeded(ONE_PROCESS)),
    ("data.cache_dir", NotNeeded(ONE_PROCESS)),
    ("data.trust_remote_code", NotNeeded("no Python is run: model families are built in")),
    (
        "data.custom_cls.path",
        Off(
            "rows come from files, or from a Task in Rust (docs/guides/rewards.md); write what the class makes of a row into the file",
        ),
    ),
    ("data.custom_cls.name", NotNeeded("it names the class at data.custom_cls.path")),
    (
        "data.sampler.class_path",
        Off("rows are drawn in shuffled epochs; for another order write a Task in Rust (docs/guides/rewards.md)"),
    ),
    ("data.sampler.class_name", NotNeeded("it names the class at data.sampler.class_path")),
    ("data.datagen.path", Off("rows come from files, or from a Task in Rust (docs/guides/rewards.md)")),
    ("data.datagen.name", NotNeeded("it names the class at data.datagen.path")),
    ("data.tool_config_path", NotNeeded("rollout.multi_turn.tool_config_path names it")),
    ("data.function_tool_path", NotNeeded("rollout.multi_turn.function_tool_path names it")),
    (
        "data.need_tools_kwargs",
        Off("verl's classes of tools and interactions are not read; write them as one class and set task.environment"),
    ),
    ("data.mm_processor_kwargs.**", NotNeeded(ROWS)),
    // Search-R1
    ("data.shuffle_train_dataloader", By(shuffle)),
    ("data.train_data_num", By(|a| limit(a, "task.limit"))),
    ("data.val_data_num", By(|a| limit(a, "trainer.val_max_samples"))),
    ("data.max_start_length", NotNeeded("max_prompt_length is the limit of a prompt")),
    ("data.max_obs_length", Off("rollout.multi_turn.max_tool_response_length counts characters of a tool's answer")),
    ("data.apply_chat_template_kwargs.**", By(|a| arguments(a, "data.apply_chat_template_kwargs."))),
];

fn limit(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set(key, n),
        _ if asked.is_off() => not_needed("all rows, as here"),
        _ => asked.wrong("a number of rows, or -1 for all"),
    }
}

/// Prompts that a step trains on: all that verl's loader draws, but with DAPO's filter.
pub(super) fn prompts(facts: &Facts) -> i64 {
    let drawn = facts.whole("data.gen_batch_size").filter(|_| !facts.is_on("algorithm.filter_groups.enable"));
    drawn.or_else(|| facts.whole("data.train_batch_size")).unwrap_or(1024)
}

fn trained(asked: &SourceKey) -> MappedKey {
    match asked.facts.whole("data.gen_batch_size") {
        Some(_) if !asked.facts.is_on("algorithm.filter_groups.enable") => {
            not_needed("gen_batch_size prompts are drawn, and without algorithm.filter_groups all are trained on")
        }
        _ => set("trainer.train_batch_size", plain(asked.value)),
    }
}

/// DAPO's larger batches of prompts, of which those without spread are left out.
fn generated(asked: &SourceKey) -> MappedKey {
    let prompts = asked.facts.number("data.train_batch_size");
    match (asked.number(), prompts) {
        (Some(_), _) if !asked.facts.is_on("algorithm.filter_groups.enable") => size(asked, "trainer.train_batch_size"),
        (Some(drawn), Some(prompts)) if drawn >= prompts && prompts > 0.0 => {
            set_noted("rollout.dynamic_sampling.oversampling", drawn / prompts, "gen_batch_size / train_batch_size")
        }
        (Some(_), _) => not_needed("a round draws the prompts that are missing in data.train_batch_size, at least"),
        _ if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("a number of prompts"),
    }
}

fn overlong(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("longer prompts are always skipped and counted");
    }
    not_needed("longer prompts are skipped and counted, while verl would truncate them or stop")
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

fn prompt_key(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(key) => set("task.prompt_field", key),
        None => asked.wrong("the name of a column"),
    }
}

fn reward_key(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("data_source") | None => not_needed("the task's rewards grade every row"),
        Some(_) => cannot("one list of rewards grades every row: choose it in task.rewards"),
    }
}

fn shuffle(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("rows are drawn in shuffled epochs");
    }
    cannot("rows are always drawn in shuffled epochs; the rows of a step depend only on trainer.seed")
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
