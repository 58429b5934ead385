//! `NeMo RL`'s sections `grpo`, `loss_fn`, `checkpointing`, `logger`, `cluster`.

use crate::common::{
    ONE_RATIO, VALIDATED, epochs, folder, given, keep, ranks, size, switch, tracked as called, trackers,
};
use crate::facts::{Facts, truth, whole};
use crate::key_mapping::KeyMapping;
use crate::key_mapping::prelude::*;
use serde_json::{Value, json};

const ONE_TURN: &str = "its environments are not read; write one as a class and set task.environment";
const MPI: &str = "ranks are processes that `mpirun` starts: nothing else is placed";
const SHOWN: &str = "metrics.jsonl has all metrics, and `firebrick report RUN` draws them";
const SYNCHRONOUS: &str = "every step is sampled from the weights that it updates";
pub(super) const ONE_EPOCHS: &str = "update.ppo_epochs is the critic's too";
const NO_CLIP: &str = "advantages are not clipped; a reward's `clip` bounds it";
const NO_TEACHER: &str = "no distillation from a teacher";

pub(super) const TABLE: KeyTable = ("grpo.", ROUNDS);
pub(super) const OF_PPO: KeyTable = ("ppo.", ROUNDS);

const ROUNDS: &[(&str, KeyMapping)] = &[
    ("num_prompts_per_step", Same("trainer.train_batch_size")),
    ("num_generations_per_prompt", Same("rollout.n")),
    ("max_num_steps", By(steps)),
    ("max_num_epochs", By(passes)),
    ("max_rollout_turns", By(|a| if a.whole() == Some(1) { not_needed(ONE_TURN) } else { cannot(ONE_TURN) })),
    ("normalize_rewards adv_estimator.normalize_rewards", By(scale)),
    ("use_leave_one_out_baseline adv_estimator.{name,use_leave_one_out_baseline,minus_baseline}", By(estimator)),
    ("adv_estimator.**", Off("docs/guides/algorithms.md lists the estimators and their settings")),
    ("val_period", To(size, "trainer.test_freq")),
    ("val_at_start", To(switch, "trainer.val_before_train")),
    ("val_at_end", NotNeeded("validation always runs after the last step")),
    ("val_start_at", NotNeeded("validation runs at its interval from the start")),
    ("max_val_samples", To(size, "trainer.val_max_samples")),
    ("val_batch_size", NotNeeded(VALIDATED)),
    ("val_num_generations_per_prompt num_val_generations_per_prompt", To(size, "rollout.val_kwargs.n")),
    ("zero_variance_prompt_filtering", Off("rollout.dynamic_sampling replaces groups without differences")),
    ("skip_reference_policy_logprobs_calculation", NotNeeded("a reference is loaded only if a KL needs it")),
    ("calculate_advantages_on_gpu", NotNeeded("advantages are computed in f64 on the host")),
    ("deduplicate_multimodal_data", NotNeeded("rows are text")),
    ("debug_payload_metrics", NotNeeded(SHOWN)),
    ("stop_at_validation_metric", Off("a run ends after trainer.steps")),
    ("stop_at_validation_threshold", NotNeeded("stop_at_validation_metric controls whether a run ends early")),
    ("overlong_filtering", To(switch, "objective.mask_truncated_completions")),
    ("seed", Same("trainer.seed")),
    ("dynamic_sampling_max_gen_batches", To(size, "rollout.dynamic_sampling.max_num_gen_batches")),
    ("batch_multiplier", To(given, "rollout.dynamic_sampling.oversampling")),
    ("use_dynamic_sampling", To(switch, "rollout.dynamic_sampling.enable")),
    ("reward_shaping.enabled", By(shaping)),
    ("reward_shaping.stop_properly_penalty_coef", By(stop_properly)),
    ("reward_shaping.**", NotNeeded("reward_shaping.enabled controls whether there is a penalty; its reward has them")),
    ("reward_scaling.enabled", By(scaled)),
    ("reward_scaling.**", NotNeeded("reward_scaling.enabled controls whether rewards are scaled")),
    ("advantage_clip_low advantage_clip_high", Off(NO_CLIP)),
    (
        "seq_logprob_error_threshold",
        Off("objective.rollout_rs rejects tokens or sequences on which sampler and trainer disagree"),
    ),
    ("invalid_tool_call_advantage", Off(ONE_TURN)),
    ("malformed_thinking_advantage", Off("a reward {kind: regex} pays for a form")),
    ("async_grpo.enabled", Off(SYNCHRONOUS)),
    ("async_grpo.**", NotNeeded("async_grpo.enabled controls whether sampling runs ahead")),
];

pub(super) const LOSS: KeyTable = (
    "loss_fn.",
    &[
        ("reference_policy_kl_penalty", By(kl)),
        ("reference_policy_kl_type", To(kl_type, "objective.kl_loss_type")),
        ("kl_input_clamp_value", By(|a| clamped(a, 20.0))),
        ("kl_output_clamp_value", By(|a| clamped(a, 10.0))),
        ("ratio_clip_min", Same("objective.clip_ratio_low")),
        ("ratio_clip_max", Same("objective.clip_ratio_high")),
        ("ratio_clip_c", By(|a| set("objective.clip_ratio_c", plain(a.value)))),
        (
            "token_level_loss",
            By(|a| set("objective.loss_agg_mode", if a.is_on() { "token-mean" } else { "seq-mean-token-mean" })),
        ),
        (
            "sequence_level_importance_ratios",
            By(|a| set("objective.importance_sampling_level", if a.is_on() { "sequence" } else { "token" })),
        ),
        ("use_importance_sampling_correction", By(correction)),
        ("truncated_importance_sampling_{type,ratio,ratio_min}", NotNeeded(IN_CORRECTION)),
        ("use_on_policy_kl_approximation", By(bias_corrected)),
        ("force_on_policy_ratio", NotNeeded("one optimizer step a round has a ratio of 1")),
        ("use_kl_in_reward", By(kl_in_reward)),
        ("use_cispo disable_ppo_ratio", By(policy_loss)),
        ("positive_example_nll_weight", Off("no likelihood of right completions in the loss")),
    ],
);

pub(super) const AROUND: KeyTable = (
    "",
    &[
        ("async_rl.**", Off(SYNCHRONOUS)),
        ("reward_penalties.**", Off("a penalty is a reward with a negative weight (task.rewards)")),
        ("checkpointing.enabled", By(checkpoints)),
        ("checkpointing.checkpoint_dir", To(folder, "output")),
        ("checkpointing.keep_top_k", By(keep)),
        ("checkpointing.save_period", By(save)),
        ("checkpointing.**", NotNeeded("checkpoints are kept by their age; val-core metrics show which is best")),
        ("logger.log_dir", NotNeeded("a run is its folder: `output`")),
        ("logger.{wandb,tensorboard,mlflow,swanlab}_enabled", By(tracked)),
        ("logger.wandb.project", To(called, "trainer.project_name")),
        ("logger.wandb.name", To(called, "trainer.experiment_name")),
        ("logger.**", NotNeeded(SHOWN)),
        ("cluster.gpus_per_node", To(ranks, "trainer.n_gpus_per_node")),
        ("cluster.num_nodes", To(ranks, "trainer.nnodes")),
        ("cluster.** data_plane.**", NotNeeded(MPI)),
        ("on_policy_distillation on_policy_distillation.**", Off(NO_TEACHER)),
        ("defaults", NotNeeded("its keys are listed in this table")),
    ],
);

/// Whether it is PPO that runs.
pub(super) fn is_ppo(facts: &Facts) -> bool {
    facts.has_below("ppo.") || facts.has_below("value.")
}

/// A key of the algorithm's section.
pub(super) fn of_run<'a>(facts: &'a Facts, name: &str) -> Option<&'a Value> {
    ["grpo", "ppo"].iter().find_map(|section| facts.value(&format!("{section}.{name}")))
}

/// Its configurations write a number of steps or epochs that is never reached: 100,000, 1,000,000.
const NEVER: i64 = 100_000;

fn number(asked: &SourceKey, name: &str) -> Option<i64> {
    of_run(asked.facts, name).and_then(whole)
}

fn steps(asked: &SourceKey) -> MappedKey {
    match asked.count() {
        Some(n) if n >= NEVER && number(asked, "max_num_epochs").is_some_and(|epochs| epochs < NEVER) => {
            not_needed("set by max_num_epochs")
        }
        Some(n) => set("trainer.steps", n),
        None => asked.wrong("a number of steps"),
    }
}

fn passes(asked: &SourceKey) -> MappedKey {
    let prompts = number(asked, "num_prompts_per_step").and_then(|n| u64::try_from(n).ok());
    match asked.number() {
        Some(n) if number(asked, "max_num_steps").is_some_and(|steps| steps < NEVER || n >= NEVER as f64) => {
            not_needed("max_num_steps is given")
        }
        Some(n) if n > 0.0 => epochs(asked.facts, n, prompts.unwrap_or(32)),
        _ => asked.wrong("a number of passes over the rows"),
    }
}

/// A switch of the estimator, which has those of `grpo` where it has none of its own.
fn of_estimator(asked: &SourceKey, name: &str) -> bool {
    let own = of_run(asked.facts, &format!("adv_estimator.{name}")).or_else(|| of_run(asked.facts, name));
    own.is_none_or(|own| truth(own) == Some(true))
}

fn estimator_name<'a>(asked: &SourceKey<'a>) -> &'a str {
    let default = if is_ppo(asked.facts) { "gae" } else { "grpo" };
    of_run(asked.facts, "adv_estimator.name").and_then(Value::as_str).unwrap_or(default)
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
        "reinforce_plus_plus" if of_estimator(asked, "minus_baseline") => "reinforce_plus_plus_baseline",
        "gae" if is_ppo(asked.facts) => "gae",
        name @ ("grpo" | "reinforce_plus_plus") => name,
        _ => return cannot("docs/guides/algorithms.md lists the estimators"),
    };
    set("objective.adv_estimator", name)
}

/// What is added to all rewards of a group leaves their differences as they are.
fn scaled(asked: &SourceKey) -> MappedKey {
    match estimator_name(asked) {
        _ if !asked.is_on() => off(),
        "grpo" | "reinforce_plus_plus" if of_estimator(asked, "minus_baseline") => {
            not_needed("the reward that is to be replaced has its range as `clip` and its factor as `weight`")
        }
        _ => cannot("scale a reward by its `weight`, bound it by its `clip` (task.rewards); nothing is added to it"),
    }
}

fn shaping(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return off();
    }
    let of = |key: &str| asked.beside(key).and_then(crate::facts::number);
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
        _ if asked.beside("enabled").and_then(truth) != Some(true) => not_needed("reward_shaping is off"),
        Some(1.0) => not_needed(ONE_RATIO),
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
        return off();
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
            return set_all([
                ("objective.rollout_is", "token_truncate".into()),
                ("objective.rollout_is_threshold", UNBOUNDED.into()),
                ("objective.rollout_rs", "seq_mean_k1".into()),
                ("objective.rollout_rs_threshold", format!("{lower}_{upper}").into()),
            ])
            .noted("whole sequences by their geometric mean");
        }
        (None, None, _) => ("truncate", UNBOUNDED, None),
        _ => return cannot("tis, icepop and seq-mask-tis with their bounds are read: objective.rollout_is"),
    };
    let lower = lower.map(|lower| ("objective.rollout_is_threshold_lower", lower.into()));
    let form = ("objective.rollout_is", format!("{level}_{form}").into());
    set_all([form, ("objective.rollout_is_threshold", upper.into())].into_iter().chain(lower))
}

fn bias_corrected(asked: &SourceKey) -> MappedKey {
    match asked.facts.number("loss_fn.reference_policy_kl_penalty") {
        Some(coefficient) if asked.is_on() && coefficient > 0.0 => set("objective.use_bias_correction_kl", true)
            .noted("by the ratio to the old policy; NeMo RL's is to the sampler (update.old_log_probs: sampler)"),
        _ => off(),
    }
}

fn policy_loss(asked: &SourceKey) -> MappedKey {
    let on = |key: &str| asked.facts.is_on(&format!("loss_fn.{key}"));
    let loss = if on("use_cispo") { "cispo" } else { "clip" };
    set("objective.policy_loss", if on("disable_ppo_ratio") { "reinforce" } else { loss })
}

/// Whether PPO takes the KL off the reward of each token.
fn takes_kl_off(asked: &SourceKey) -> bool {
    estimator_name(asked) == "gae" && asked.facts.is_on("loss_fn.use_kl_in_reward")
}

fn kl_in_reward(asked: &SourceKey) -> MappedKey {
    match estimator_name(asked) {
        _ if !asked.is_on() => off(),
        "gae" => set("objective.use_kl_in_reward", true),
        "reinforce_plus_plus" => cannot(
            "the KL is subtracted from each token's advantage there; objective.use_kl_in_reward subtracts it from the \
             reward of the token, and of all before it",
        ),
        _ => not_needed("this estimator reads no KL, and there is none in the loss"),
    }
}

fn kl(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(weight) if takes_kl_off(asked) => {
            set_all([("objective.kl_loss_coef", 0.0.into()), ("objective.kl_ctrl.kl_coef", weight.into())])
        }
        Some(_) if asked.facts.is_on("loss_fn.use_kl_in_reward") => set("objective.kl_loss_coef", 0.0),
        Some(weight) => set("objective.kl_loss_coef", weight),
        None => asked.wrong("a number"),
    }
}

fn kl_type(asked: &SourceKey, in_loss: &str) -> MappedKey {
    given(asked, if takes_kl_off(asked) { "objective.kl_penalty" } else { in_loss })
}

fn checkpoints(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { not_needed("save_period sets the interval") } else { set("trainer.save_freq", -1) }
}

fn save(asked: &SourceKey) -> MappedKey {
    match asked.beside("enabled").and_then(truth) {
        Some(false) => not_needed("checkpointing is off"),
        _ => size(asked, "trainer.save_freq"),
    }
}

fn tracked(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off");
    }
    let on = |name: &&str| asked.facts.is_on(&format!("logger.{name}_enabled"));
    let names: Vec<&str> = ["tensorboard", "wandb", "mlflow", "swanlab"].into_iter().filter(on).collect();
    trackers(&asked.with(&json!(names)))
}
