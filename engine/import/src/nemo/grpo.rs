//! `NeMo RL`'s other sections: `grpo`, `loss_fn`, `data`, `checkpointing`, `logger`, `cluster`.

use crate::common::{epochs, path, ranks, rows, size, tracked as called, trackers};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set};
use serde_json::json;

const ONE_TURN: &str = "its environments are not read; write one as a class and set task.environment";
const ONE_PROCESS: &str = "rows are read once, in the one process";
const ONE_RUN: &str = "one process on one device: nothing is started or placed";
const SHOWN: &str = "metrics.jsonl has all metrics, and `firebrick report RUN` draws them";

pub(super) const TABLE: &[KeyRule] = &[
    ("grpo.num_prompts_per_step", Same("trainer.train_batch_size")),
    ("grpo.num_generations_per_prompt", Same("rollout.n")),
    ("grpo.max_num_steps", By(steps)),
    ("grpo.max_num_epochs", By(passes)),
    ("grpo.max_rollout_turns", By(|a| if a.whole() == Some(1) { not_needed(ONE_TURN) } else { cannot(ONE_TURN) })),
    ("grpo.normalize_rewards", By(|a| set("objective.scale_rewards", if a.is_on() { "group" } else { "none" }))),
    ("grpo.use_leave_one_out_baseline", By(leave_one_out)),
    ("grpo.val_period", By(|a| size(a, "trainer.test_freq"))),
    ("grpo.val_at_start", NotNeeded("validation always runs before the first step")),
    ("grpo.val_at_end", NotNeeded("validation always runs after the last step")),
    ("grpo.val_start_at", NotNeeded("validation runs at its interval from the start")),
    ("grpo.max_val_samples", By(|a| size(a, "trainer.val_max_samples"))),
    (
        "grpo.val_batch_size",
        NotNeeded("validation samples rollout.max_num_seqs sequences at a time, regardless of its size"),
    ),
    (
        "grpo.val_num_generations_per_prompt",
        By(|a| {
            if a.whole() == Some(1) {
                not_needed("validation completes every prompt greedily, once")
            } else {
                cannot("validation completes every prompt greedily, once")
            }
        }),
    ),
    ("grpo.stop_at_validation_metric", Off("a run ends after trainer.steps")),
    ("grpo.stop_at_validation_threshold", NotNeeded("stop_at_validation_metric controls whether a run ends early")),
    ("grpo.overlong_filtering", By(|a| set("objective.mask_truncated_completions", a.is_on()))),
    ("grpo.seed", Same("trainer.seed")),
    ("grpo.use_dynamic_sampling", By(|a| set("rollout.dynamic_sampling.enable", a.is_on()))),
    ("grpo.dynamic_sampling_max_gen_batches", By(|a| size(a, "rollout.dynamic_sampling.max_num_gen_batches"))),
    ("grpo.batch_multiplier", By(|a| set("rollout.dynamic_sampling.oversampling", plain(a.value)))),
    ("grpo.reward_shaping.enabled", By(shaping)),
    (
        "grpo.reward_shaping.**",
        NotNeeded("reward_shaping.enabled controls whether there is a penalty; its reward has length and penalty"),
    ),
    ("grpo.reward_scaling.enabled", Off("scale a reward by its `weight`, bound it by its `clip` (task.rewards)")),
    ("grpo.reward_scaling.**", NotNeeded("reward_scaling.enabled controls whether rewards are scaled")),
    ("grpo.adv_estimator.name", By(estimator)),
    ("grpo.adv_estimator.**", NotNeeded("normalize_rewards and use_leave_one_out_baseline of `grpo` apply")),
    ("grpo.advantage_clip_low", Off("advantages are not clipped; a reward's `clip` bounds it")),
    ("grpo.advantage_clip_high", Off("advantages are not clipped; a reward's `clip` bounds it")),
    (
        "grpo.seq_logprob_error_threshold",
        Off("objective.rollout_rs rejects tokens or sequences on which sampler and trainer disagree"),
    ),
    ("grpo.invalid_tool_call_advantage", Off(ONE_TURN)),
    ("grpo.malformed_thinking_advantage", Off("a reward {kind: regex} pays for a form")),
    ("grpo.async_grpo.enabled", Off("every step is sampled from the weights that it updates")),
    ("grpo.async_grpo.**", NotNeeded("async_grpo.enabled controls whether sampling runs ahead")),
    ("reward_penalties.**", Off("a penalty is a reward with a negative weight (task.rewards)")),
    ("loss_fn.reference_policy_kl_penalty", By(kl)),
    ("loss_fn.reference_policy_kl_type", Same("objective.kl_loss_type")),
    ("loss_fn.kl_input_clamp_value", NotNeeded("k3's input is clamped to 20 and its output to 10")),
    ("loss_fn.kl_output_clamp_value", NotNeeded("k3's input is clamped to 20 and its output to 10")),
    ("loss_fn.ratio_clip_min", Same("objective.clip_ratio_low")),
    ("loss_fn.ratio_clip_max", Same("objective.clip_ratio_high")),
    ("loss_fn.ratio_clip_c", By(|a| set("objective.clip_ratio_c", plain(a.value)))),
    (
        "loss_fn.token_level_loss",
        By(|a| set("objective.loss_agg_mode", if a.is_on() { "token-mean" } else { "seq-mean-token-mean" })),
    ),
    (
        "loss_fn.sequence_level_importance_ratios",
        By(|a| set("objective.importance_sampling_level", if a.is_on() { "sequence" } else { "token" })),
    ),
    (
        "loss_fn.use_importance_sampling_correction",
        By(|a| if a.is_on() { set("objective.rollout_is", "token") } else { not_needed("off, as here by default") }),
    ),
    (
        "loss_fn.truncated_importance_sampling_ratio",
        By(|a| {
            if a.is_off() {
                not_needed("no separate bound")
            } else {
                set("objective.rollout_is_threshold", plain(a.value))
            }
        }),
    ),
    (
        "loss_fn.truncated_importance_sampling_ratio_min",
        By(|a| {
            if a.is_off() {
                not_needed("no separate bound")
            } else {
                set("objective.rollout_is_threshold_lower", plain(a.value))
            }
        }),
    ),
    (
        "loss_fn.truncated_importance_sampling_type",
        Off("objective.rollout_is takes the kinds that docs/guides/algorithms.md lists"),
    ),
    ("loss_fn.use_on_policy_kl_approximation", Off("objective.use_bias_correction_kl multiplies the KL by the ratio")),
    ("loss_fn.force_on_policy_ratio", NotNeeded("one optimizer step a round has a ratio of 1")),
    ("loss_fn.use_kl_in_reward", By(|a| set("objective.use_kl_in_reward", a.is_on()))),
    ("loss_fn.use_cispo", By(|a| set("objective.policy_loss", if a.is_on() { "cispo" } else { "clip" }))),
    (
        "loss_fn.disable_ppo_ratio",
        By(
            |a| {
                if a.is_on() {
                    set("objective.policy_loss", "reinforce")
                } else {
                    not_needed("off, as here by default")
                }
            },
        ),
    ),
    ("loss_fn.positive_example_nll_weight", Off("no likelihood of right completions in the loss")),
    (
        "checkpointing.enabled",
        By(|a| if a.is_on() { not_needed("save_period sets the interval") } else { set("trainer.save_freq", -1) }),
    ),
    (
        "checkpointing.checkpoint_dir",
        By(|a| a.text().map_or_else(|| a.wrong("a folder"), |dir| set("output", path(a.facts, dir)))),
    ),
    ("checkpointing.keep_top_k", By(|a| size(a, "trainer.max_ckpt_to_keep"))),
    ("checkpointing.save_period", By(save)),
    ("checkpointing.**", NotNeeded("checkpoints are kept by their age; val-core metrics show which is best")),
    ("data.max_input_seq_length", By(|a| size(a, "rollout.prompt_length"))),
    ("data.shuffle", NotNeeded("rows are drawn in shuffled epochs")),
    ("data.num_workers", NotNeeded(ONE_PROCESS)),
    (
        "data.dataset_name",
        Off("write the dataset's name on the Hub, or its files, as task.train (docs/guides/data.md)"),
    ),
    ("data.train.**", Off("write the dataset's name on the Hub, or its files, as task.train (docs/guides/data.md)")),
    ("data.validation.**", Off("write its name on the Hub, or its files, as task.validation")),
    ("data.train.data_path", By(|a| rows(a, "task.train"))),
    ("data.train.input_key", By(question)),
    ("data.train.output_key", By(ground_truth)),
    ("data.train.split_validation_size", By(held_out)),
    ("data.train.seed", By(seed)),
    ("data.validation.data_path", By(|a| rows(a, "task.validation"))),
    ("data.prompt_file", Off("write the prompt as task.messages or task.prompt")),
    ("data.system_prompt_file", Off("write the text as task.system_prompt")),
    ("data.**", NotNeeded("task specifies the source of the rows and the content of a prompt")),
    ("env.**", Off("specify in task.rewards how completions are graded (docs/guides/rewards.md)")),
    ("logger.log_dir", NotNeeded("a run is its folder: `output`")),
    ("logger.wandb_enabled", By(|a| tracked(a, "wandb"))),
    ("logger.tensorboard_enabled", By(|a| tracked(a, "tensorboard"))),
    ("logger.wandb.project", By(|a| called(a, "trainer.project_name"))),
    ("logger.wandb.name", By(|a| called(a, "trainer.experiment_name"))),
    ("logger.**", NotNeeded(SHOWN)),
    ("cluster.gpus_per_node", By(|a| ranks(a, "trainer.n_gpus_per_node"))),
    ("cluster.num_nodes", By(|a| ranks(a, "trainer.nnodes"))),
    ("cluster.**", NotNeeded(ONE_RUN)),
    ("data_plane.**", NotNeeded(ONE_RUN)),
    ("on_policy_distillation", Off("no distillation from a teacher")),
    ("on_policy_distillation.**", Off("no distillation from a teacher")),
    ("defaults", Off("import the file it names first, and this one after it")),
];

/// The field with the question, which stands alone in the user's message.
fn question(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(field) => set("task.messages", json!([{"role": "user", "content": format!("{{{field}}}")}])),
        None => asked.wrong("the name of a field"),
    }
}

fn ground_truth(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(field) => set("task.answer_field", field),
        None => asked.wrong("the name of a field"),
    }
}

/// A share of the rows for validation; it does not count where there are rows of their own.
fn held_out(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("data.validation.data_path").is_some() {
        return not_needed("data.validation has separate rows");
    }
    match asked.number() {
        Some(0.0) => not_needed("nothing is held out, as here by default"),
        Some(share) if 0.0 < share && share < 1.0 => set("task.validation_fraction", share),
        _ => asked.wrong("a share of the rows, from 0 to 1"),
    }
}

/// Which rows are held out.
fn seed(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(seed) if seed >= 0 => set("task.seed", seed),
        _ if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("a whole number, 0 or more"),
    }
}

fn steps(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        // its configurations write a number that is never reached
        Some(n) if n >= 1_000_000 && asked.facts.number("grpo.max_num_epochs").is_some() => {
            not_needed("set by max_num_epochs")
        }
        Some(n) if n > 0 => set("trainer.steps", n),
        _ => asked.wrong("a number of steps"),
    }
}

fn passes(asked: &SourceKey) -> MappedKey {
    let limit = asked.facts.whole("grpo.max_num_steps").filter(|n| *n < 1_000_000);
    let prompts = asked.facts.whole("grpo.num_prompts_per_step").and_then(|n| u64::try_from(n).ok());
    match asked.number() {
        _ if limit.is_some() => not_needed("max_num_steps is given"),
        Some(n) if n > 0.0 => epochs(asked.facts, n, prompts.unwrap_or(32), true),
        _ => asked.wrong("a number of passes over the rows"),
    }
}

fn leave_one_out(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return cannot(
            "the mean of a group is over all its completions; with objective.adv_estimator: rloo it is over the other \
             completions, and advantages are not divided by a deviation",
        );
    }
    not_needed("the mean of the whole group, as here")
}

fn shaping(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off, as here by default");
    }
    let of = |key: &str| asked.facts.number(&format!("grpo.reward_shaping.{key}"));
    let Some(buffer) = of("overlong_buffer_length") else {
        return cannot("overlong_buffer_length is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let weight = of("overlong_buffer_penalty").unwrap_or(1.0);
    set("task.rewards[]", json!({"kind": "length", "buffer": buffer as u64, "weight": weight}))
}

fn estimator(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("grpo") => set("objective.adv_estimator", "grpo"),
        Some("reinforce_plus_plus") => set("objective.adv_estimator", "reinforce_plus_plus_baseline"),
        _ => cannot("docs/guides/algorithms.md lists the estimators"),
    }
}

fn kl(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(weight) if asked.facts.is_on("loss_fn.use_kl_in_reward") => set("objective.kl_ctrl.kl_coef", weight),
        Some(weight) => set("objective.kl_loss_coef", weight),
        None => asked.wrong("a number"),
    }
}

fn save(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("checkpointing.enabled").is_some() && !asked.facts.is_on("checkpointing.enabled") {
        return not_needed("checkpointing is off");
    }
    size(asked, "trainer.save_freq")
}

fn tracked(asked: &SourceKey, name: &str) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off");
    }
    let value = json!([name]);
    trackers(&SourceKey { value: &value, ..*asked })
}
