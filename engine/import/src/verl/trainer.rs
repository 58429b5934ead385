//! verl's `trainer`, its profiler, and what Hydra and Ray are told.

use crate::common::{epochs, path, ranks, tracked, trackers};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, set, set_noted};

const RAY: &str = "one process: nothing is started or waited for";
const PROFILER: &str = "`firebrick train CONFIG --profile N` writes a trace of N steps for Perfetto; memory.snapshot and memory.trace \
     record memory";

pub(super) const TABLE: &[KeyRule] = &[
    ("trainer.total_epochs", By(passes)),
    ("trainer.total_training_steps", By(steps)),
    ("trainer.n_gpus_per_node", By(|a| ranks(a, "trainer.n_gpus_per_node"))),
    ("trainer.nnodes", By(|a| ranks(a, "trainer.nnodes"))),
    ("trainer.project_name", By(|a| tracked(a, "trainer.project_name"))),
    ("trainer.experiment_name", By(|a| tracked(a, "trainer.experiment_name"))),
    ("trainer.default_local_dir", By(folder)),
    ("trainer.default_hdfs_dir", Off("runs are written to folders")),
    ("trainer.logger", By(trackers)),
    ("trainer.save_freq", By(save)),
    ("trainer.test_freq", By(test)),
    ("trainer.val_before_train", By(before)),
    ("trainer.val_only", Off("`firebrick eval CONFIG` validates and trains nothing")),
    ("trainer.critic_warmup", By(warmup)),
    ("trainer.resume_mode", NotNeeded("`firebrick train CONFIG --resume` continues from the newest checkpoint")),
    (
        "trainer.resume_from_path",
        Off("--resume continues from the newest checkpoint of the run folder; model.path may be a checkpoint's model/"),
    ),
    ("trainer.max_actor_ckpt_to_keep", By(keep)),
    ("trainer.max_ckpt_to_keep", By(keep)),
    (
        "trainer.max_critic_ckpt_to_keep",
        NotNeeded("a checkpoint has policy and critic; trainer.max_ckpt_to_keep counts it once"),
    ),
    ("trainer.del_local_ckpt_after_load", Off("checkpoints stay in the run folder")),
    ("trainer.log_val_generations", NotNeeded("`firebrick report RUN` shows samples")),
    ("trainer.rollout_data_dir", NotNeeded("samples.jsonl in the run folder has every completion")),
    ("trainer.validation_data_dir", NotNeeded("metrics.jsonl has the validations")),
    ("trainer.balance_batch", NotNeeded("micro-batches are balanced by their work")),
    ("trainer.device", By(device)),
    ("trainer.remove_previous_ckpt_in_save", NotNeeded("trainer.max_ckpt_to_keep removes older ones")),
    ("trainer.esi_redundant_time", NotNeeded(RAY)),
    ("trainer.ray_wait_register_center_timeout", NotNeeded(RAY)),
    ("trainer.use_legacy_worker_impl", NotNeeded(RAY)),
    ("trainer.npu_profile.**", NotNeeded(PROFILER)),
    ("trainer.profile_steps", NotNeeded(PROFILER)),
    (
        "global_profiler.enabled",
        NotNeeded("memory.jsonl has every phase's bytes by account; memory.snapshot records a timeline"),
    ),
    (
        "global_profiler.enable",
        NotNeeded("memory.jsonl has every phase's bytes by account; memory.snapshot records a timeline"),
    ),
    ("global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries", By(trace)),
    (
        "global_profiler.global_tool_config.torch_memory.stack_depth",
        NotNeeded("a trace has the innermost 48 frames on the CPU; GPU pools report none"),
    ),
    ("global_profiler.**", NotNeeded(PROFILER)),
    ("transfer_queue.**", NotNeeded(RAY)),
    ("ray_kwargs.**", NotNeeded(RAY)),
    ("ray_init.**", NotNeeded(RAY)),
    ("hydra.**", NotNeeded("a setting of Hydra")),
    ("defaults", NotNeeded("verl's defaults are known, and are listed in the table if they set something here")),
    ("--config-name", By(config_name)),
    ("--config-path", By(config_file)),
    ("--config-dir", By(config_file)),
    ("model_engine", NotNeeded("one executor runs every plan: there is no engine to choose")),
];

fn prompts(asked: &SourceKey) -> u64 {
    asked.facts.whole("data.train_batch_size").and_then(|n| u64::try_from(n).ok()).unwrap_or(1024)
}

fn passes(asked: &SourceKey) -> MappedKey {
    if asked.facts.whole("trainer.total_training_steps").is_some() {
        return not_needed("total_training_steps is given");
    }
    match asked.number() {
        // an incomplete last batch is dropped there
        Some(n) if n > 0.0 => epochs(asked.facts, n, prompts(asked), true),
        _ => asked.wrong("a number of passes over the rows"),
    }
}

fn steps(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("trainer.steps", n),
        _ if asked.is_off() => not_needed("set by total_epochs"),
        _ => asked.wrong("a number of steps"),
    }
}

fn folder(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(folder) => set("output", path(asked.facts, folder)),
        None => not_needed("has no value in the files"),
    }
}

fn save(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("trainer.save_freq", n),
        Some(_) => set_noted("trainer.save_freq", -1, "no checkpoint at all; 0 would write the last one"),
        None => asked.wrong("a number of steps"),
    }
}

fn test(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("trainer.test_freq", n),
        Some(_) => not_needed("validation runs before the first step and after the last, if there are rows for it"),
        None => asked.wrong("a number of steps"),
    }
}

fn before(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("validation always runs before the first step");
    }
    cannot("validation always runs before the first step; trainer.val_max_samples makes it short")
}

fn warmup(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 && asked.facts.text("algorithm.adv_estimator") == Some("gae") => set("critic.warmup", n),
        Some(n) if n > 0 => not_needed("adv_estimator is not gae: there is no critic"),
        _ => not_needed("0, as here by default"),
    }
}

fn keep(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("trainer.max_ckpt_to_keep", n),
        _ => cannot("a number of checkpoints is kept: trainer.max_ckpt_to_keep, 3 by default"),
    }
}

fn device(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("cuda") => set("device", "cuda"),
        Some("cpu") => set("device", "cpu"),
        Some(name) => cannot(format!("no device {name}: `firebrick devices` lists the devices")),
        None => not_needed("auto, as here by default"),
    }
}

fn trace(asked: &SourceKey) -> MappedKey {
    let on = asked.facts.is_on("global_profiler.enabled")
        || asked.facts.text("global_profiler.tool") == Some("torch_memory");
    match asked.whole() {
        Some(n) if n > 0 && on => set("memory.trace", n.min(1_000_000)),
        _ => not_needed("the profiler is off, so the key is ignored"),
    }
}

fn config_name(asked: &SourceKey) -> MappedKey {
    let name = asked.text().map(|name| name.trim_end_matches(".yaml"));
    match name {
        Some("ppo_trainer" | "ppo_megatron_trainer") => not_needed("verl's defaults are known"),
        _ => cannot(format!(
            "the script starts from the file {}: import it first, `firebrick import FILE SCRIPT`",
            asked.value
        )),
    }
}

fn config_file(asked: &SourceKey) -> MappedKey {
    cannot(format!("the script starts from a file in {}: import it first, `firebrick import FILE SCRIPT`", asked.value))
}
