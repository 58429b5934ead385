//! What TRL's configurations inherit from transformers' `TrainingArguments`.

use super::batch::BatchSizes;
use super::class::{Class, class};
use super::grpo::{accumulation, per_device};
use super::ppo::learning_rate;
use crate::common::{epochs, path, tracked, trackers};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::json;

const RHYTHM: &str = "every step's metrics are written to metrics.jsonl";
const ONE_PROCESS: &str = "rows are read once, in the one process";
const HUB: &str = "checkpoints stay in the run folder; `hf upload` puts one on the hub";
const RANKS: &str = "`mpirun` starts ranks, and memory.zero_stage sets what they shard (docs/guides/multi_gpu.md)";
const COMPILED: &str = "kernels are compiled by the backend";

pub(super) const TABLE: &[KeyRule] = &[
    ("output_dir", By(folder)),
    ("overwrite_output_dir", NotNeeded("a run never overwrites another: choose another `output`, or --resume")),
    ("run_name", By(|a| tracked(a, "trainer.experiment_name"))),
    ("project", By(|a| tracked(a, "trainer.project_name"))),
    ("trackio_space_id", NotNeeded("trackers are local")),
    ("do_train", NotNeeded("`firebrick train` trains")),
    ("do_eval", NotNeeded("validation runs if there are rows for it")),
    ("do_predict", NotNeeded("`firebrick generate` samples")),
    ("per_device_train_batch_size", By(per_device)),
    (
        "per_device_eval_batch_size",
        NotNeeded("validation samples rollout.max_num_seqs sequences at a time, regardless of its size"),
    ),
    ("gradient_accumulation_steps", By(accumulation)),
    ("eval_accumulation_steps", NotNeeded("validation keeps only completions and rewards")),
    ("auto_find_batch_size", NotNeeded("memory.budget: auto plans a step within what the device has")),
    ("learning_rate", By(learning_rate)),
    ("weight_decay", By(|a| both(a, "weight_decay"))),
    ("adam_beta1", By(betas)),
    ("adam_beta2", By(betas)),
    ("adam_epsilon", By(|a| both(a, "eps"))),
    ("max_grad_norm", By(clip)),
    ("optim", By(optimizer)),
    ("optim_args", Off("AdamW's parameters are keys of `optim`")),
    ("optim_target_modules", Off("all weights are trained, or adapters: model.lora")),
    ("lr_scheduler_type", By(|a| both(a, "lr_scheduler.lr_scheduler_type"))),
    ("lr_scheduler_kwargs.**", By(schedule)),
    ("warmup_ratio", By(warmup_ratio)),
    ("warmup_steps", By(warmup_steps)),
    ("num_train_epochs", By(passes)),
    ("max_steps", By(steps)),
    ("seed", Same("trainer.seed")),
    ("data_seed", NotNeeded("trainer.seed seeds everything")),
    ("full_determinism", NotNeeded("a run repeats to the bit unless deterministic: false")),
    ("bf16", By(|a| half(a, "bf16"))),
    ("fp16", By(|a| half(a, "f16"))),
    ("bf16_full_eval", NotNeeded("validation is sampled in the run's precision")),
    ("fp16_full_eval", NotNeeded("validation is sampled in the run's precision")),
    ("tf32", Same("allow_tf32")),
    ("use_cpu", By(cpu)),
    ("no_cuda", By(cpu)),
    ("gradient_checkpointing", By(checkpointing)),
    ("gradient_checkpointing_kwargs.**", NotNeeded("segments are recomputed by the executor")),
    (
        "use_liger_kernel",
        NotNeeded(
            "head, loss and gradient are one pass over chunks (memory.head_rows), norms and rotary embedding are kernels",
        ),
    ),
    ("liger_kernel_config.**", NotNeeded("head, loss and gradient are one pass over chunks (memory.head_rows)")),
    ("torch_empty_cache_steps", By(cleanup)),
    ("torch_compile", NotNeeded(COMPILED)),
    ("torch_compile_backend", NotNeeded(COMPILED)),
    ("torch_compile_mode", NotNeeded(COMPILED)),
    ("jit_mode_eval", NotNeeded(COMPILED)),
    ("save_strategy", By(save_strategy)),
    ("save_steps", By(save)),
    ("save_total_limit", By(keep)),
    ("save_only_model", NotNeeded("a checkpoint has all that --resume needs")),
    ("save_safetensors", NotNeeded("weights are written as safetensors")),
    ("save_on_each_node", NotNeeded("one process writes one run folder")),
    ("eval_strategy", By(eval_strategy)),
    ("evaluation_strategy", By(eval_strategy)),
    ("eval_steps", By(eval)),
    ("eval_on_start", Same("trainer.val_before_train")),
    ("eval_delay", NotNeeded("validation runs at its interval from the start")),
    ("load_best_model_at_end", NotNeeded("checkpoints stay in the run folder: choose one by its val-core metric")),
    ("metric_for_best_model", NotNeeded("checkpoints stay in the run folder: choose one by its val-core metric")),
    ("greater_is_better", NotNeeded("checkpoints stay in the run folder: choose one by its val-core metric")),
    ("resume_from_checkpoint", NotNeeded("`firebrick train CONFIG --resume` continues from the newest checkpoint")),
    ("report_to", By(trackers)),
    ("logging_steps", NotNeeded(RHYTHM)),
    ("logging_first_step", NotNeeded(RHYTHM)),
    ("logging_strategy", NotNeeded(RHYTHM)),
    ("logging_dir", NotNeeded(RHYTHM)),
    ("logging_nan_inf_filter", NotNeeded("an update whose norm is not finite is skipped and counted")),
    ("log_level", NotNeeded("FIREBRICK_LOG=info logs more")),
    ("log_level_replica", NotNeeded("FIREBRICK_LOG=info logs more")),
    ("disable_tqdm", NotNeeded("progress is drawn only on terminals")),
    ("include_num_input_tokens_seen", NotNeeded("perf/total_num_tokens counts them")),
    ("remove_unused_columns", NotNeeded("a row keeps all its fields")),
    ("dataloader_num_workers", NotNeeded(ONE_PROCESS)),
    ("dataloader_pin_memory", NotNeeded(ONE_PROCESS)),
    ("dataloader_drop_last", NotNeeded("a step draws whole batches, on into the next epoch")),
    ("dataloader_prefetch_factor", NotNeeded(ONE_PROCESS)),
    ("dataloader_persistent_workers", NotNeeded(ONE_PROCESS)),
    ("dataset_num_proc", NotNeeded(ONE_PROCESS)),
    ("group_by_length", NotNeeded("micro-batches are balanced by their work")),
    ("length_column_name", NotNeeded("micro-batches are balanced by their work")),
    ("neftune_noise_alpha", Off("no noise is added to embeddings")),
    ("label_smoothing_factor", Off("nothing is smoothed")),
    ("average_tokens_across_devices", NotNeeded("divisors cover the whole step")),
    ("push_to_hub", NotNeeded(HUB)),
    ("hub_model_id", NotNeeded(HUB)),
    ("hub_strategy", NotNeeded(HUB)),
    ("hub_token", NotNeeded(HUB)),
    ("hub_private_repo", NotNeeded(HUB)),
    ("deepspeed", NotNeeded(RANKS)),
    ("fsdp", NotNeeded(RANKS)),
    ("ddp_timeout", NotNeeded(RANKS)),
    ("ddp_find_unused_parameters", NotNeeded(RANKS)),
    ("ddp_backend", By(ddp_backend)),
    ("ddp_bucket_cap_mb", NotNeeded(RANKS)),
    ("accelerator_config.**", NotNeeded(RANKS)),
    ("local_rank", NotNeeded(RANKS)),
];

fn folder(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(folder) => set("output", path(asked.facts, folder)),
        None => not_needed("has no value in the files"),
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
    let value = plain(asked.value);
    let mut all = vec![(format!("optim.{key}"), value.clone())];
    if class(asked.facts) == Class::Ppo {
        all.push((format!("critic.optim.{key}"), value));
    }
    MappedKey::Set(all, String::new())
}

fn betas(asked: &SourceKey) -> MappedKey {
    let of = |key, default| asked.facts.number(key).unwrap_or(default);
    let betas = json!([of("adam_beta1", 0.9), of("adam_beta2", 0.999)]);
    let mut all = vec![("optim.betas".to_owned(), betas.clone())];
    if class(asked.facts) == Class::Ppo {
        all.push(("critic.optim.betas".into(), betas));
    }
    MappedKey::Set(all, String::new())
}

fn clip(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(norm) if norm > 0.0 => both(asked, "clip_grad"),
        _ => set("optim.clip_grad", serde_json::Value::Null),
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
        None => not_needed("has no value in the files"),
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
        Some(steps) if steps >= 1.0 => in_rounds(asked, steps as u64, "optim.lr_scheduler.warmup_steps"),
        _ => not_needed("no warm-up, as here by default"),
    }
}

/// A number of optimizer steps as steps of the run.
fn in_rounds(asked: &SourceKey, steps: u64, key: &str) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    let each = batch.optimizer_steps();
    let note = if each == 1 { String::new() } else { format!("{steps} optimizer steps, {each} a step of the run") };
    set_noted(key, batch.rounds(steps), note)
}

fn passes(asked: &SourceKey) -> MappedKey {
    let longer = |key| asked.facts.whole(key).is_some_and(|n| n > 0);
    if longer("max_steps") || longer("total_episodes") {
        return not_needed("max_steps or total_episodes is given");
    }
    let batch = BatchSizes::of(asked.facts);
    match (asked.number(), batch.prompts()) {
        (Some(n), Some(prompts)) if n > 0.0 => epochs(asked.facts, n, prompts, true),
        (Some(_), None) => cannot(batch.broken()),
        _ => asked.wrong("a number of passes over the rows"),
    }
}

fn steps(asked: &SourceKey) -> MappedKey {
    match asked.whole().and_then(|n| u64::try_from(n).ok()) {
        Some(n) if n > 0 => in_rounds(asked, n, "trainer.steps"),
        _ => not_needed("set by num_train_epochs"),
    }
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

fn cpu(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { set("device", "cpu") } else { not_needed("auto, as here by default") }
}

fn checkpointing(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return set("memory.gradient_checkpointing", true);
    }
    not_needed("off, as here by default")
}

fn cleanup(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("memory.cleanup_every", n),
        _ => not_needed("never, as here by default"),
    }
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

fn keep(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("trainer.max_ckpt_to_keep", n),
        _ => not_needed("a number of checkpoints is kept: trainer.max_ckpt_to_keep, 3 by default"),
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
