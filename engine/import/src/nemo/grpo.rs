//! `NeMo RL`'s sections `grpo`, `loss_fn`, `checkpointing`, `logger`, `cluster`.

use crate::common::{epochs, path, ranks, size, tracked as called, trackers};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::{Value, json};

const ONE_TURN: &str = "its environments are not read; write one as a class and set task.environment";
const MPI: &str = "ranks are processes that `mpirun` starts: nothing else is placed";
const SHOWN: &str = "metrics.jsonl has all metrics, and `firebrick report RUN` draws them";

pub(super) const TABLE: &[KeyRule] = &[
    ("grpo.num_prompts_per_step", Same("trainer.train_batch_size")),
    ("grpo.num_generations_per_prompt", Same("rollout.n")),
    ("grpo.max_num_steps", By(steps)),
    ("grpo.max_num_epochs", By(passes)),
    ("grpo.max_rollout_turns", By(|a| if a.whole() == Some(1) { not_needed(ONE_TURN) } else { cannot(ONE_TURN) })),
    ("grpo.normalize_rewards", By(scale)),
    ("grpo.use_leave_one_out_baseline", By(estimator)),
    ("grpo.val_period", By(|a| size(a, "trainer.test_freq"))),
    ("grpo.val_at_start", By(|a| set("trainer.val_before_train", a.is_on()))),
    ("grpo.val_at_end", NotNeeded("validation always runs after the last step")),
    ("grpo.val_start_at", NotNeeded("validation runs at its interval from the start")),
    ("grpo.max_val_samples", By(|a| size(a, "trainer.val_max_samples"))),
    (
        "grpo.val_batch_size",
        NotNeeded("validation samples rollout.max_num_seqs sequences at a time, regardless of its size"),
    ),
    ("grpo.val_num_generations_per_prompt", By(|a| size(a, "rollout.val_kwargs.n"))),
    ("grpo.num_val_generations_per_prompt", By(|a| size(a, "rollout.val_kwargs.n"))),
    ("grpo.zero_variance_prompt_filtering", Off("rollout.dynamic_sampling replaces groups without differences")),
    ("async_rl.**", Off("every step is sampled from the weights that it updates")),
    ("grpo.skip_reference_policy_logprobs_calculation", NotNeeded("a reference is loaded only if a KL needs it")),
    ("grpo.calculate_advantages_on_gpu", NotNeeded("advantages are computed in f64 on the host")),
    ("grpo.deduplicate_multimodal_data", NotNeeded("rows are text")),
    ("grpo.debug_payload_metrics", NotNeeded(SHOWN)),
    ("grpo.stop_at_validation_metric", Off("a run ends after trainer.steps")),
    ("grpo.stop_at_validation_threshold", NotNeeded("stop_at_validation_metric controls whether a run ends early")),
    ("grpo.overlong_filtering", By(|a| set("objective.mask_truncated_completions", a.is_on()))),
    ("grpo.seed", Same("trainer.seed")),
    ("grpo.dynamic_sampling_max_gen_batches", By(|a| size(a, "rollout.dynamic_sampling.max_num_gen_batches"))),
    ("grpo.batch_multiplier", By(|a| set("rollout.dynamic_sampling.oversampling", plain(a.value)))),
    ("grpo.use_dynamic_sampling", By(|a| set("rollout.dynamic_sampling.enable", a.is_on()))),
    ("grpo.reward_shaping.enabled", By(shaping)),
    ("grpo.reward_shaping.stop_properly_penalty_coef", By(stop_properly)),
    (
        "grpo.reward_shaping.**",
        NotNeeded("reward_shaping.enabled controls whether there is a penalty; its reward has lengths and penalty"),
    ),
    ("grpo.reward_scaling.enabled", By(scaled)),
    ("grpo.reward_scaling.**", NotNeeded("reward_scaling.enabled controls whether rewards are scaled")),
    ("grpo.adv_estimator.name", By(estimator)),
    ("grpo.adv_estimator.normalize_rewards", By(scale)),
    ("grpo.adv_estimator.use_leave_one_out_baseline", By(estimator)),
    ("grpo.adv_estimator.minus_baseline", By(estimator)),
    ("grpo.adv_estimator.**", Off("docs/guides/algorithms.md lists the estimators and their settings")),
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
    ("loss_fn.kl_input_clamp_value", By(|a| clamped(a, 20.0))),
    ("loss_fn.kl_output_clamp_value", By(|a| clamped(a, 10.0))),
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
    ("loss_fn.use_importance_sampling_correction", By(correction)),
    ("loss_fn.truncated_importance_sampling_type", NotNeeded(IN_CORRECTION)),
    ("loss_fn.truncated_importance_sampling_ratio", NotNeeded(IN_CORRECTION)),
    ("loss_fn.truncated_importance_sampling_ratio_min", NotNeeded(IN_CORRECTION)),
    ("loss_fn.use_on_policy_kl_approximation", By(bias_corrected)),
    ("loss_fn.force_on_policy_ratio", NotNeeded("one optimizer step a round has a ratio of 1")),
    ("loss_fn.use_kl_in_reward", By(kl_in_reward)),
    ("loss_fn.use_cispo", By(policy_loss)),
    ("loss_fn.disable_ppo_ratio", By(policy_loss)),
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
    ("logger.log_dir", NotNeeded("a run is its folder: `output`")),
    ("logger.wandb_enabled", By(tracked)),
    ("logger.tensorboard_enabled", By(tracked)),
    ("logger.mlflow_enabled", By(tracked)),
    ("logger.swanlab_enabled", By(tracked)),
    ("logger.wandb.project", By(|a| called(a, "trainer.project_name"))),
    ("logger.wandb.name", By(|a| called(a, "trainer.experiment_name"))),
    ("logger.**", NotNeeded(SHOWN)),
    ("cluster.gpus_per_node", By(|a| ranks(a, "trainer.n_gpus_per_node"))),
    ("cluster.num_nodes", By(|a| ranks(a, "trainer.nnodes"))),
    ("cluster.**", NotNeeded(MPI)),
    ("data_plane.**", NotNeeded(MPI)),
    ("on_policy_distillation", Off("no distillation from a teacher")),
    ("on_policy_distillation.**", Off("no distillation from a teacher")),
    ("defaults", By(base)),
];

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

const ESTIMATOR: &str = "grpo.adv_estimator";

/// A switch of the estimator, which has those of `grpo` where it has none of its own.
fn of_estimator(asked: &SourceKey, name: &str) -> bool {
    let own = format!("{ESTIMATOR}.{name}");
    let key = if asked.facts.value(&own).is_some() { own } else { format!("grpo.{name}") };
    asked.facts.value(&key).is_none() || asked.facts.is_on(&key)
}

fn estimator_name<'a>(asked: &SourceKey<'a>) -> &'a str {
    asked.facts.text("grpo.adv_estimator.name").unwrap_or("grpo")
}

fn scale(asked: &SourceKey) -> MappedKey {
    if estimator_name(asked) != "grpo" {
        return not_needed("only the estimator grpo reads it");
    }
    set("objective.scale_rewards", if of_estimator(asked, "normalize_rewards") { "group" } else { "none" })
}

fn estimator(asked: &SourceKey) -> MappedKey {
    let name = match estimator_name(asked) {
        "grpo" if of_estimator(asked, "use_leave_one_out_baseline") => "grpo_leave_one_out",
        "grpo" => "grpo",
        "reinforce_plus_plus" if of_estimator(asked, "minus_baseline") => "reinforce_plus_plus_baseline",
        "reinforce_plus_plus" => "reinforce_plus_plus",
        _ => return cannot("docs/guides/algorithms.md lists the estimators"),
    };
    set("objective.adv_estimator", name)
}

/// What is added to all rewards of a group leaves their differences as they are.
fn scaled(asked: &SourceKey) -> MappedKey {
    match estimator_name(asked) {
        _ if !asked.is_on() => not_needed("off, as here by default"),
        "grpo" | "reinforce_plus_plus" if of_estimator(asked, "minus_baseline") => {
            not_needed("the reward that is to be replaced has its range as `clip` and its factor as `weight`")
        }
        _ => cannot("scale a reward by its `weight`, bound it by its `clip` (task.rewards); nothing is added to it"),
    }
}

const SHAPING: &str = "grpo.reward_shaping";

fn shaping(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off, as here by default");
    }
    let of = |key: &str| asked.facts.number(&format!("{SHAPING}.{key}"));
    if of("stop_properly_penalty_coef").is_some() {
        return not_needed("stop_properly_penalty_coef takes the place of the penalty for length");
    }
    let Some(buffer) = of("overlong_buffer_length") else {
        return cannot("overlong_buffer_length is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let weight = of("overlong_buffer_penalty").unwrap_or(1.0);
    let mut reward = json!({"kind": "length", "buffer": buffer as u64, "weight": weight});
    if let Some(limit) = of("max_response_length") {
        reward["limit"] = json!(limit as u64);
    }
    set("task.rewards[]", reward)
}

fn stop_properly(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        _ if asked.is_absent() => not_needed("none, as here"),
        _ if !asked.facts.is_on(&format!("{SHAPING}.enabled")) => not_needed("reward_shaping is off"),
        Some(1.0) => not_needed("1 changes nothing"),
        _ => cannot(
            "the reward of a truncated completion is not scaled; objective.mask_truncated_completions leaves such \
             completions out of the loss, and a reward {kind: length, max: TOKENS} is paid for them",
        ),
    }
}

fn clamped(asked: &SourceKey, here: f64) -> MappedKey {
    if asked.number().is_some_and(|own| (own - here).abs() < f64::EPSILON) {
        return not_needed("k3's input is clamped to 20 and its output to 10");
    }
    match asked.facts.number("loss_fn.reference_policy_kl_penalty") {
        Some(0.0) => not_needed("there is no KL"),
        _ => cannot("k3's input is clamped to 20 and its output to 10"),
    }
}

const IN_CORRECTION: &str =
    "use_importance_sampling_correction controls whether there are weights; theirs are in its row";

/// As good as no bound of a weight.
const UNBOUNDED: f64 = 1e9;

fn correction(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off, as here by default");
    }
    let of = |key: &str| asked.facts.number(&format!("loss_fn.truncated_importance_sampling_{key}"));
    let kind = asked.facts.text("loss_fn.truncated_importance_sampling_type");
    let sequence = asked.facts.is_on("loss_fn.sequence_level_importance_ratios");
    let level = if sequence { "sequence" } else { "token" };
    // before there were kinds, a ratio was the bound of a truncation
    let (form, upper, lower) = match (kind, of("ratio"), of("ratio_min")) {
        (Some("tis") | None, Some(upper), lower) => ("truncate", upper, lower),
        (Some("icepop"), Some(upper), lower) => ("mask", upper, lower),
        (Some("seq-mask-tis"), Some(upper), Some(lower)) if !sequence => {
            return MappedKey::Set(
                vec![
                    ("objective.rollout_is".into(), "token_truncate".into()),
                    ("objective.rollout_is_threshold".into(), UNBOUNDED.into()),
                    ("objective.rollout_rs".into(), "seq_mean_k1".into()),
                    ("objective.rollout_rs_threshold".into(), format!("{lower}_{upper}").into()),
                ],
                "whole sequences by their geometric mean".into(),
            );
        }
        (None, None, _) => ("truncate", UNBOUNDED, None),
        _ => return cannot("tis, icepop and seq-mask-tis with their bounds are read: objective.rollout_is"),
    };
    let mut all = vec![
        ("objective.rollout_is".to_owned(), Value::from(format!("{level}_{form}"))),
        ("objective.rollout_is_threshold".to_owned(), upper.into()),
    ];
    all.extend(lower.map(|lower| ("objective.rollout_is_threshold_lower".to_owned(), lower.into())));
    MappedKey::Set(all, String::new())
}

fn bias_corrected(asked: &SourceKey) -> MappedKey {
    match asked.facts.number("loss_fn.reference_policy_kl_penalty") {
        Some(coefficient) if asked.is_on() && coefficient > 0.0 => set_noted(
            "objective.use_bias_correction_kl",
            true,
            "by the ratio to the old policy; NeMo RL's is to the sampler (update.old_log_probs: sampler)",
        ),
        _ => not_needed("off, as here by default"),
    }
}

fn policy_loss(asked: &SourceKey) -> MappedKey {
    let on = |key: &str| asked.facts.is_on(&format!("loss_fn.{key}"));
    let loss = if on("disable_ppo_ratio") {
        "reinforce"
    } else if on("use_cispo") {
        "cispo"
    } else {
        "clip"
    };
    set("objective.policy_loss", loss)
}

fn kl_in_reward(asked: &SourceKey) -> MappedKey {
    match (asked.is_on(), estimator_name(asked)) {
        (false, _) => not_needed("off, as here by default"),
        (true, "reinforce_plus_plus") => cannot(
            "the KL is subtracted from each token's advantage there; objective.use_kl_in_reward subtracts it from the \
             reward of the token, and of all before it",
        ),
        (true, _) => not_needed("this estimator reads no KL, and there is none in the loss"),
    }
}

fn kl(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(_) if asked.facts.is_on("loss_fn.use_kl_in_reward") => set("objective.kl_loss_coef", 0.0),
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

fn tracked(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off");
    }
    let on = |name: &&str| asked.facts.is_on(&format!("logger.{name}_enabled"));
    let names: Vec<&str> = ["tensorboard", "wandb", "mlflow", "swanlab"].into_iter().filter(on).collect();
    trackers(&SourceKey { value: &json!(names), ..*asked })
}

/// The files that this one is laid over.
fn base(asked: &SourceKey) -> MappedKey {
    let names: Vec<&str> = match asked.value {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    match names.iter().find(|name| !asked.facts.reads(name)) {
        Some(name) => cannot(format!("import {name} first, and this file after it: `firebrick import {name} FILE`")),
        None => not_needed("it is among the files"),
    }
}
