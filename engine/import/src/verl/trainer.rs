//! verl's `trainer`, its profiler, and what Hydra and Ray are told.

use super::actor::PROFILER;
use super::critic::{NO_CRITIC, has_critic};
use crate::common::{bound, epochs, folder, keep, ranks, switch, tracked, trackers};
use crate::entry::PROGRAM;
use crate::key_mapping::prelude::*;

const RAY: &str = "ranks are processes that `mpirun` starts: there is no Ray to configure";
const ACCOUNTS: &str = "memory.jsonl has every phase's bytes by account; memory.snapshot records a timeline";
const SAMPLED: &str = "completions are always sampled; none are read from a folder";
const SAMPLES: &str = "`firebrick report RUN` shows samples";
const OLDER: &str = "trainer.max_ckpt_to_keep removes older ones";

pub(super) const TABLE: KeyTable = (
    "trainer.",
    &[
        ("total_epochs", By(passes)),
        ("total_training_steps", By(steps)),
        ("n_gpus_per_node", To(ranks, "trainer.n_gpus_per_node")),
        ("nnodes", To(ranks, "trainer.nnodes")),
        ("project_name", To(tracked, "trainer.project_name")),
        ("experiment_name", To(tracked, "trainer.experiment_name")),
        ("default_local_dir", To(folder, "output")),
        ("default_hdfs_dir", NotNeeded("runs are written to folders, from which they can be copied")),
        ("logger", By(trackers)),
        ("save_freq", By(save)),
        ("test_freq", By(test)),
        ("val_before_train", To(switch, "trainer.val_before_train")),
        ("val_only", Off("`firebrick eval CONFIG` validates and trains nothing")),
        ("critic_warmup", If(has_critic, NO_CRITIC, &To(bound, "critic.warmup"))),
        ("resume_mode", NotNeeded("`firebrick train CONFIG --resume` continues from the newest checkpoint")),
        ("resume_from_path", Off("--resume takes the newest checkpoint; model.path may be a checkpoint's model/")),
        ("max_actor_ckpt_to_keep max_ckpt_to_keep", By(keep)),
        ("max_critic_ckpt_to_keep", NotNeeded("a checkpoint has both; trainer.max_ckpt_to_keep counts it once")),
        ("del_local_ckpt_after_load", NotNeeded("checkpoints stay in the run folder")),
        ("log_val_generations val_generations_to_log_to_wandb", NotNeeded(SAMPLES)),
        ("rollout_data_dir", NotNeeded("samples.jsonl in the run folder has every completion")),
        ("validation_data_dir", NotNeeded("metrics.jsonl has the validations")),
        ("balance_batch", NotNeeded("micro-batches are balanced by their work")),
        ("device", By(device)),
        ("remove_previous_ckpt_in_save remove_previous_ckpt", NotNeeded(OLDER)),
        ("esi_redundant_time ray_wait_register_center_timeout use_legacy_worker_impl", NotNeeded(RAY)),
        ("npu_profile.** profile_steps {controller,worker}_nsight_options.**", NotNeeded(PROFILER)),
        ("v1.trainer_mode", By(mode)),
        ("v1.**", NotNeeded("trainer_mode controls whether sampling runs ahead")),
        ("checkpoint_callback_class", Off("no Python is run when a checkpoint is written")),
        ("use_v1", NotNeeded("it chooses between two programs of verl that train alike")),
        // Search-R1, simpleRL, DeepScaleR
        ("remove_clip", Off("ratios are clipped: objective.clip_ratio_low and clip_ratio_high")),
        ("rejection_sample", Off("rollout.dynamic_sampling replaces groups without differences")),
        ("rejection_sample_multiplier", NotNeeded("rejection_sample controls whether groups are skipped")),
    ],
);

pub(super) const AROUND: KeyTable = (
    "",
    &[
        ("global_profiler.enabled global_profiler.enable", NotNeeded(ACCOUNTS)),
        ("global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries", By(trace)),
        (
            "global_profiler.global_tool_config.torch_memory.stack_depth",
            NotNeeded("a trace has 48 frames on the CPU, none on GPUs"),
        ),
        ("global_profiler.** actor_rollout_ref.profiler.**", NotNeeded(PROFILER)),
        ("transfer_queue.** ray_kwargs.** ray_init.**", NotNeeded(RAY)),
        ("hydra.**", NotNeeded("a setting of Hydra")),
        ("defaults", NotNeeded("verl's defaults are known, and are listed in the table if they set something here")),
        ("--config-name", By(config_name)),
        ("--config-path --config-dir", By(config_file)),
        (PROGRAM, By(program)),
        ("skip.rollout.enable skip.async_rollout.enable skip.rollout_tq.enable", Off(SAMPLED)),
        ("skip.**", NotNeeded("its `enable` controls whether completions are read from a folder")),
        ("distillation.enabled", Off("no distillation from a teacher")),
        ("distillation.**", NotNeeded("distillation.enabled controls whether there is a teacher")),
        ("max_turns do_search", By(search)),
        ("retriever.**", NotNeeded("do_search controls whether there is a search engine")),
        ("model_engine", NotNeeded("one executor runs every plan: there is no engine to choose")),
    ],
);

fn passes(asked: &SourceKey) -> MappedKey {
    // prompts that verl's loader draws at a time
    let drawn = ["data.gen_batch_size", "data.train_batch_size"].iter().find_map(|key| asked.facts.whole(key));
    let prompts = drawn.and_then(|n| u64::try_from(n).ok()).unwrap_or(1024);
    match asked.number() {
        _ if asked.facts.whole("trainer.total_training_steps").is_some() => not_needed("total_training_steps is given"),
        Some(n) if n > 0.0 => epochs(asked.facts, n, prompts),
        _ => asked.wrong("a number of passes over the rows"),
    }
}

fn steps(asked: &SourceKey) -> MappedKey {
    match asked.count() {
        Some(n) => set("trainer.steps", n),
        None if asked.is_off() => not_needed("set by total_epochs"),
        None => asked.wrong("a number of steps"),
    }
}

fn save(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("trainer.save_freq", n),
        Some(_) => set("trainer.save_freq", -1).noted("no checkpoint at all; 0 would write the last one"),
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

fn device(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(name @ ("cuda" | "cpu")) => set("device", name),
        Some(name) => not_needed(format!("no device {name}: `firebrick devices` lists the devices")),
        None => not_needed("auto, as here by default"),
    }
}

fn trace(asked: &SourceKey) -> MappedKey {
    let on = asked.facts.is_on("global_profiler.enabled")
        || asked.facts.text("global_profiler.tool") == Some("torch_memory");
    match asked.count() {
        Some(n) if on => set("memory.trace", n.min(1_000_000)),
        _ => not_needed("the profiler is off, so the key is ignored"),
    }
}

fn mode(asked: &SourceKey) -> MappedKey {
    let why = "every step is sampled from the weights that it updates";
    if matches!(asked.text(), Some("sync") | None) { not_needed(why) } else { cannot(why) }
}

/// Programs of verl that train as its main one does.
const MAIN: [&str; 3] = ["main_ppo", "main_ppo_v0", "main_dapo"];

fn program(asked: &SourceKey) -> MappedKey {
    let name = asked.text().unwrap_or_default();
    let last = name.trim_end_matches(".py").rsplit(['.', '/']).next().unwrap_or_default();
    if MAIN.contains(&last) && !name.contains("experimental") {
        return not_needed("`firebrick train` trains");
    }
    cannot("it is not verl.trainer.main_ppo: what it does in another way is not read")
}

fn search(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("do_search").is_some() && !asked.facts.is_on("do_search") {
        return not_needed("do_search is off: completions have one turn");
    }
    cannot(
        "Search-R1's search engine is not read: write it as a class, and set task.environment \
         (docs/guides/environments.md)",
    )
}

fn config_name(asked: &SourceKey) -> MappedKey {
    match asked.text().map(|name| name.trim_end_matches(".yaml")) {
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
