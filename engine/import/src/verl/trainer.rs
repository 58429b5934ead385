//! verl's `trainer`, its profiler, and what Hydra and Ray are told.

use crate::common::{epochs, path, ranks, tracked, trackers};
use crate::entry::PROGRAM;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, set, set_noted};

const RAY: &str = "ranks are processes that `mpirun` starts: there is no Ray to configure";
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
    ("trainer.default_hdfs_dir", NotNeeded("runs are written to folders, from which they can be copied")),
    ("trainer.logger", By(trackers)),
    ("trainer.save_freq", By(save)),
    ("trainer.test_freq", By(test)),
    ("trainer.val_before_train", By(|a| set("trainer.val_before_train", a.is_on()))),
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
    ("trainer.del_local_ckpt_after_load", NotNeeded("checkpoints stay in the run folder")),
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
    ("actor_rollout_ref.profiler.**", NotNeeded(PROFILER)),
    ("transfer_queue.**", NotNeeded(RAY)),
    ("ray_kwargs.**", NotNeeded(RAY)),
    ("ray_init.**", NotNeeded(RAY)),
    ("hydra.**", NotNeeded("a setting of Hydra")),
    ("defaults", NotNeeded("verl's defaults are known, and are listed in the table if they set something here")),
    ("--config-name", By(config_name)),
    ("--config-path", By(config_file)),
    ("--config-dir", By(config_file)),
    (PROGRAM, By(program)),
    ("trainer.val_generations_to_log_to_wandb", NotNeeded("`firebrick report RUN` shows samples")),
    ("trainer.v1.trainer_mode", By(mode)),
    ("trainer.v1.**", NotNeeded("trainer_mode controls whether sampling runs ahead")),
    ("trainer.controller_nsight_options.**", NotNeeded(PROFILER)),
    ("trainer.worker_nsight_options.**", NotNeeded(PROFILER)),
    ("trainer.checkpoint_callback_class", Off("no Python is run when a checkpoint is written")),
    ("skip.rollout.enable", Off(SAMPLED)),
    ("skip.async_rollout.enable", Off(SAMPLED)),
    ("skip.rollout_tq.enable", Off(SAMPLED)),
    ("skip.**", NotNeeded("its `enable` controls whether completions are read from a folder")),
    ("distillation.enabled", Off("no distillation from a teacher")),
    ("distillation.**", NotNeeded("distillation.enabled controls whether there is a teacher")),
    ("trainer.use_v1", NotNeeded("it chooses between two programs of verl that train alike")),
    // Search-R1, simpleRL, DeepScaleR
    ("max_turns", By(search)),
    ("do_search", By(search)),
    ("retriever.**", NotNeeded("do_search controls whether there is a search engine")),
    ("trainer.remove_previous_ckpt", NotNeeded("trainer.max_ckpt_to_keep removes older ones")),
    ("trainer.remove_clip", Off("ratios are clipped: objective.clip_ratio_low and clip_ratio_high")),
    ("trainer.rejection_sample", Off("rollout.dynamic_sampling replaces groups without differences")),
    ("trainer.rejection_sample_multiplier", NotNeeded("rejection_sample controls whether groups are skipped")),
    ("model_engine", NotNeeded("one executor runs every plan: there is no engine to choose")),
];

/// Prompts that verl's loader draws at a time.
fn prompts(asked: &SourceKey) -> u64 {
    let keys = ["data.gen_batch_size", "data.train_batch_size"];
    let drawn = keys.iter().find_map(|key| asked.facts.whole(key));
    drawn.and_then(|n| u64::try_from(n).ok()).unwrap_or(1024)
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
        _ => not_needed("a number of checkpoints is kept: trainer.max_ckpt_to_keep, 3 by default"),
    }
}

fn device(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("cuda") => set("device", "cuda"),
        Some("cpu") => set("device", "cpu"),
        Some(name) => not_needed(format!("no device {name}: `firebrick devices` lists the devices")),
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

/// Programs of verl that train as its main one does.
const MAIN: [&str; 3] = ["main_ppo", "main_ppo_v0", "main_dapo"];

const SAMPLED: &str = "completions are always sampled; none are read from a folder";

fn mode(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("sync") | None => not_needed("every step is sampled from the weights that it updates"),
        Some(_) => cannot("every step is sampled from the weights that it updates"),
    }
}

fn program(asked: &SourceKey) -> MappedKey {
    let name = asked.text().unwrap_or_default();
    let last = name.trim_end_matches(".py").rsplit(['.', '/']).next().unwrap_or_default();
    if MAIN.contains(&last) && !name.contains("experimental") {
        return not_needed("`firebrick train` trains");
    }
    cannot("it is not verl.trainer.main_ppo: what it does in another way is not read")
}

fn search(asked: &SourceKey) -> MappedKey {
    let off = asked.facts.value("do_search").is_some() && !asked.facts.is_on("do_search");
    if off {
        return not_needed("do_search is off: completions have one turn");
    }
    cannot(
        "Search-R1's search engine is not read: write it as a class, and set task.environment \
         (docs/guides/environments.md)",
    )
}

fn config_name(asked: &SourceKey) -> MappedKey {
    let name = asked.text().map(|name| name.trim_end_matches(".yaml"));
    match name {
        Some("ppo_trainer" | "ppo_megatron_trainer") => not_needed("verl's defaults are known"),
        Some(name) if asked.facts.reads(&format!("{name}.yaml")) => not_needed("it is among the files"),
        _ => cannot(format!(
            "the script starts from the file {}: import it first, `firebrick import FILE SCRIPT`",
            asked.value
        )),
    }
}

fn config_file(asked: &SourceKey) -> MappedKey {
    cannot(format!("the script starts from a file in {}: import it first, `firebrick import FILE SCRIPT`", asked.value))
}
