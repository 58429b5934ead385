//! What TRL's configurations inherit from transformers' `TrainingArguments`.

use super::batch::BatchSizes;
use super::class::{Class, class};
use super::ppo::learning_rate;
use crate::common::{VALIDATED, bound, epochs, folder, keep, tracked, trackers};
use crate::key_mapping::prelude::*;
use serde_json::{Value, json};

const RHYTHM: &str = "every step's metrics are written to metrics.jsonl";
const ONE_PROCESS: &str = "rows are read once, in the one process";
pub(super) const HUB: &str = "checkpoints stay in the run folder; `hf upload` puts one on the hub";
const RANKS: &str = "`mpirun` starts ranks, and memory.zero_stage sets what they shard (docs/guides/multi_gpu.md)";
const COMPILED: &str = "kernels are compiled by the backend";
const BEST: &str = "checkpoints stay in the run folder: choose one by its val-core metric";
const BALANCED: &str = "micro-batches are balanced by their work";
const KERNELS: &str =
    "head, loss and gradient are one pass over chunks (memory.head_rows), norms and rotary embedding are kernels";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        ("output_dir", To(folder, "output")),
        ("overwrite_output_dir", NotNeeded("a run never overwrites another: choose another `output`, or --resume")),
        ("run_name", To(tracked, "trainer.experiment_name")),
        ("project", To(tracked, "trainer.project_name")),
        ("trackio_space_id", NotNeeded("trackers are local")),
        ("do_train", NotNeeded("`firebrick train` trains")),
        ("do_eval", NotNeeded("validation runs if there are rows for it")),
        ("do_predict", NotNeeded("`firebrick generate` samples")),
        ("per_device_train_batch_size", By(per_device)),
        ("per_device_eval_batch_size", NotNeeded(VALIDATED)),
        ("gradient_accumulation_steps", By(accumulation)),
        ("eval_accumulation_steps", NotNeeded("validation keeps only completions and rewards")),
        ("auto_find_batch_size", NotNeeded("memory.budget: auto plans a step within what the device has")),
        ("learning_rate", By(learning_rate)),
        ("weight_decay", To(both, "weight_decay")),
        ("adam_beta1 adam_beta2", By(betas)),
        ("adam_epsilon", To(both, "eps")),
        ("max_grad_norm", By(clip)),
        ("optim", By(optimizer)),
        ("optim_args", Off("AdamW's parameters are keys of `optim`")),
        ("optim_target_modules", Off("all weights are trained, or adapters: model.lora")),
        ("lr_scheduler_type", To(both, "lr_scheduler.lr_scheduler_type")),
        ("lr_scheduler_kwargs.**", By(schedule)),
        ("warmup_ratio", By(warmup_ratio)),
        ("warmup_steps", By(warmup_steps)),
        ("num_train_epochs", By(passes)),
        ("max_steps", By(steps)),
        ("seed", Same("trainer.seed")),
        ("data_seed", NotNeeded("trainer.seed seeds everything")),
        ("full_determinism", NotNeeded("a run repeats to the bit unless deterministic: false")),
        ("bf16", To(half, "bf16")),
        ("fp16", To(half, "f16")),
        ("bf16_full_eval fp16_full_eval", NotNeeded("validation is sampled in the run's precision")),
        ("tf32", Same("allow_tf32")),
        ("use_cpu no_cuda", On("device", "cpu")),
        ("gradient_checkpointing", On("memory.gradient_checkpointing", "true")),
        ("gradient_checkpointing_kwargs.**", NotNeeded("segments are recomputed by the executor")),
        ("use_liger_kernel liger_kernel_config.**", NotNeeded(KERNELS)),
        ("torch_empty_cache_steps", To(bound, "memory.cleanup_every")),
        ("torch_compile torch_compile_backend torch_compile_mode jit_mode_eval", NotNeeded(COMPILED)),
        ("save_strategy", By(save_strategy)),
        ("save_steps", By(save)),
        ("save_total_limit", By(keep)),
        ("save_only_model", NotNeeded("a checkpoint has all that --resume needs")),
        ("save_safetensors", NotNeeded("weights are written as safetensors")),
        ("save_on_each_node", NotNeeded("one process writes one run folder")),
        ("eval_strategy evaluation_strategy", By(eval_strategy)),
        ("eval_steps", By(eval)),
        ("eval_on_start", Same("trainer.val_before_train")),
        ("eval_delay", NotNeeded("validation runs at its interval from the start")),
        ("load_best_model_at_end metric_for_best_model greater_is_better", NotNeeded(BEST)),
        ("resume_from_checkpoint", NotNeeded("`firebrick train CONFIG --resume` continues from the newest checkpoint")),
        ("report_to", By(trackers)),
        ("logging_steps logging_first_step logging_strategy logging_dir", NotNeeded(RHYTHM)),
        ("logging_nan_inf_filter", NotNeeded("an update whose norm is not finite is skipped and counted")),
        ("log_level log_level_replica", NotNeeded("FIREBRICK_LOG=info logs more")),
        ("disable_tqdm", NotNeeded("progress is drawn only on terminals")),
        ("include_num_input_tokens_seen", NotNeeded("perf/total_num_tokens counts them")),
        ("remove_unused_columns", NotNeeded("a row keeps all its fields")),
        (
            "dataloader_{num_workers,pin_memory,prefetch_factor,persistent_workers} dataset_num_proc",
            NotNeeded(ONE_PROCESS),
        ),
        ("dataloader_drop_last", NotNeeded("a step draws whole batches, on into the next epoch")),
        ("group_by_length length_column_name", NotNeeded(BALANCED)),
        ("neftune_noise_alpha", Off("no noise is added to embeddings")),
        ("label_smoothing_factor", Off("nothing is smoothed")),
        ("average_tokens_across_devices", NotNeeded("divisors cover the whole step")),
        ("push_to_hub hub_model_id hub_strategy hub_token hub_private_repo", NotNeeded(HUB)),
        (
            "deepspeed fsdp ddp_{timeout,find_unused_parameters,bucket_cap_mb} accelerator_config.** local_rank",
            NotNeeded(RANKS),
        ),
        ("ddp_backend", By(ddp_backend)),
    ],
);

/// The prompts of a step, out of the completions of a device.
fn per_device(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    let Some(each) = asked.count() else {
        return asked.wrong("a number of completions");
    };
    let Some(prompts) = batch.prompts() else {
        return cannot(batch.broken());
    };
    let mut all = vec![("trainer.train_batch_size", json!(prompts)), ("memory.micro_batch_size", json!(each))];
    let mut note = batch.note();
    match batch.mini_prompts() {
        Some(mini) => all.push(("update.ppo_mini_batch_size", json!(mini))),
        None => note = format!("{note}; {}", batch.one_step()),
    }
    set_all(all).noted(note)
}

/// What accumulates is part of the batch sizes.
fn accumulation(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    match (batch.part_of_broken(), asked.count(), batch.mini_prompts()) {
        (Some(part), _, _) => part,
        (_, None, _) => asked.wrong("a number of micro-batches"),
        (_, _, Some(mini)) => {
            set("update.ppo_mini_batch_size", mini).noted(format!("{} completions an optimizer step", batch.mini))
        }
        (_, _, None) => cannot(batch.one_step()),
    }
}

/// What carries values between ranks, by the names that are known here too.
fn ddp_backend(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(name @ ("nccl" | "mpi")) => set("trainer.ddp_backend", name),
        _ => not_needed("trainer.ddp_backend: auto takes NCCL between GPUs, and MPI elsewhere"),
    }
}

/// A setting of the optimizer, which is the critic's too where there is one.
fn both(asked: &SourceKey, key: &str) -> MappedKey {
    both_have(asked, key, &plain(asked.value))
}

fn both_have(asked: &SourceKey, key: &str, value: &Value) -> MappedKey {
    let critic = (class(asked.facts) == Class::Ppo).then(|| format!("critic.optim.{key}"));
    set_all(critic.into_iter().chain([format!("optim.{key}")]).map(|key| (key, value.clone())))
}

fn betas(asked: &SourceKey) -> MappedKey {
    let of = |key, default| asked.facts.number(key).unwrap_or(default);
    both_have(asked, "betas", &json!([of("adam_beta1", 0.9), of("adam_beta2", 0.999)]))
}

fn clip(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(norm) if norm > 0.0 => both(asked, "clip_grad"),
        _ => set("optim.clip_grad", Value::Null),
    }
}

fn optimizer(asked: &SourceKey) -> MappedKey {
    let name = asked.text().unwrap_or_default();
    match name.trim_start_matches("paged_") {
        "adamw_torch" | "adamw_torch_fused" | "adamw_hf" | "adamw_apex_fused" | "adamw_32bit" => {
            not_needed("AdamW, as here")
        }
        "adamw_8bit" | "adamw_bnb_8bit" => set("memory.moments", "block8"),
        _ => cannot(format!("AdamW is the optimizer, not {name}")),
    }
}

fn schedule(asked: &SourceKey) -> MappedKey {
    match asked.key.split_once('.') {
        Some((_, key)) => both(asked, &format!("lr_scheduler.{key}")),
        None => absent(),
    }
}

fn warmup_ratio(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(_) if asked.facts.number("warmup_steps").is_some_and(|steps| steps >= 1.0) => {
            not_needed("warmup_steps is given")
        }
        Some(ratio) if ratio > 0.0 => both(asked, "lr_scheduler.warmup_ratio"),
        _ => not_needed("no warm-up, as here by default"),
    }
}

/// In optimizer steps; below 1 a share of the run.
fn warmup_steps(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(share) if share > 0.0 && share < 1.0 => both(asked, "lr_scheduler.warmup_ratio"),
        Some(steps) if steps >= 1.0 => {
            let (steps, note) = rounds(asked, steps as u64);
            both_have(asked, "lr_scheduler.warmup_steps", &steps.into()).noted(note)
        }
        _ => not_needed("no warm-up, as here by default"),
    }
}

/// A number of optimizer steps as steps of the run, and what there is to say of it.
fn rounds(asked: &SourceKey, steps: u64) -> (u64, String) {
    let batch = BatchSizes::of(asked.facts);
    let each = batch.optimizer_steps();
    let note = if each == 1 { String::new() } else { format!("{steps} optimizer steps, {each} a step of the run") };
    (batch.rounds(steps), note)
}

fn in_rounds(asked: &SourceKey, steps: u64, key: &str) -> MappedKey {
    let (steps, note) = rounds(asked, steps);
    set(key, steps).noted(note)
}

fn passes(asked: &SourceKey) -> MappedKey {
    let longer = |key| asked.facts.whole(key).is_some_and(|n| n > 0);
    if longer("max_steps") || longer("total_episodes") {
        return not_needed("max_steps or total_episodes is given");
    }
    let batch = BatchSizes::of(asked.facts);
    match (asked.number(), batch.prompts()) {
        (Some(n), Some(prompts)) if n > 0.0 => epochs(asked.facts, n, prompts),
        (Some(_), None) => cannot(batch.broken()),
        _ => asked.wrong("a number of passes over the rows"),
    }
}

fn steps(asked: &SourceKey) -> MappedKey {
    asked.count().map_or_else(|| not_needed("set by num_train_epochs"), |n| in_rounds(asked, n as u64, "trainer.steps"))
}

fn half(asked: &SourceKey, ours: &str) -> MappedKey {
    let other = if ours == "bf16" { "fp16" } else { "bf16" };
    if asked.is_on() {
        return set("precision", ours);
    }
    if asked.facts.is_on(other) && (ours == "bf16" || asked.facts.is_written(other)) {
        return not_needed(format!("{other} is on"));
    }
    not_needed("off: f32, unless another key sets the precision")
}

fn save_strategy(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("no") => set("trainer.save_freq", -1),
        Some("steps") => not_needed("save_steps sets the interval"),
        _ if asked.value.as_bool() == Some(false) => set("trainer.save_freq", -1),
        _ => not_needed(
            "checkpoints are written after the last step and every trainer.save_freq steps; an epoch is rows / trainer.train_batch_size",
        ),
    }
}

fn save(asked: &SourceKey) -> MappedKey {
    if asked.facts.text("save_strategy").is_some_and(|by| by != "steps") {
        return not_needed("save_strategy is not steps");
    }
    match asked.number() {
        Some(n) if n >= 1.0 => in_rounds(asked, n as u64, "trainer.save_freq"),
        _ => not_needed("checkpoints are written after the last step and every trainer.save_freq steps"),
    }
}

fn eval_strategy(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("steps") => not_needed("eval_steps sets the interval"),
        Some("epoch") => {
            not_needed("validation runs every trainer.test_freq steps; an epoch is rows / trainer.train_batch_size")
        }
        _ => not_needed("validation runs before the first step and after the last, if there are rows for it"),
    }
}

fn eval(asked: &SourceKey) -> MappedKey {
    let strategy = asked.facts.text("eval_strategy").or(asked.facts.text("evaluation_strategy"));
    match asked.number() {
        Some(n) if n >= 1.0 && strategy == Some("steps") => in_rounds(asked, n as u64, "trainer.test_freq"),
        _ => not_needed("eval_strategy is not steps"),
    }
}
