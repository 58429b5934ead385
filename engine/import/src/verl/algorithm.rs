//! verl's `algorithm` section.

use super::grading::grader;
use super::version::{OLD, is_before_0_4};
use crate::common::size;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::json;

pub(super) const CORRECTION: &str = "algorithm.rollout_correction";

pub(super) const TABLE: &[KeyRule] = &[
    ("algorithm.adv_estimator", By(estimator)),
    ("algorithm.gamma", Same("objective.gamma")),
    ("algorithm.lam", Same("objective.lam")),
    (
        "algorithm.norm_adv_by_std_in_grpo",
        By(|a| set("objective.scale_rewards", if a.is_on() { "group" } else { "none" })),
    ),
    ("algorithm.use_kl_in_reward", By(kl_in_reward)),
    ("algorithm.kl_penalty", By(|a| in_reward(a, "objective.kl_penalty"))),
    ("algorithm.kl_ctrl.type", By(|a| in_reward(a, "objective.kl_ctrl.type"))),
    ("algorithm.kl_ctrl.kl_coef", By(|a| in_reward(a, "objective.kl_ctrl.kl_coef"))),
    ("algorithm.kl_ctrl.target_kl", By(|a| in_reward(a, "objective.kl_ctrl.target_kl"))),
    ("algorithm.kl_ctrl.horizon", By(|a| in_reward(a, "objective.kl_ctrl.horizon"))),
    ("algorithm.filter_groups.enable", By(|a| set("rollout.dynamic_sampling.enable", a.is_on()))),
    ("algorithm.filter_groups.metric", By(metric)),
    ("algorithm.filter_groups.max_num_gen_batches", By(rounds)),
    ("algorithm.rollout_correction.rollout_is", By(weights)),
    (
        "algorithm.rollout_correction.rollout_is_threshold",
        By(|a| correction(a, "rollout_is", "objective.rollout_is_threshold")),
    ),
    (
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        By(|a| correction(a, "rollout_is", "objective.rollout_is_batch_normalize")),
    ),
    ("algorithm.rollout_correction.rollout_rs", By(rejection)),
    (
        "algorithm.rollout_correction.rollout_rs_threshold",
        By(|a| correction(a, "rollout_rs", "objective.rollout_rs_threshold")),
    ),
    (
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        By(|a| correction(a, "rollout_rs", "objective.rollout_rs_threshold_lower")),
    ),
    ("algorithm.rollout_correction.bypass_mode", By(bypass)),
    ("algorithm.rollout_correction.loss_type", By(bypass_loss)),
    (
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        Off("objective.rollout_rs: seq_max_k2 excludes sequences by their worst token"),
    ),
    (
        "algorithm.rollout_correction.use_policy_gradient",
        Off("write objective.policy_loss: reinforce with objective.rollout_is (docs/guides/algorithms.md)"),
    ),
    ("algorithm.filter_groups.max_inflight_gen_batches", NotNeeded("one round of prompts is sampled at a time")),
    ("algorithm.rollout_is", By(correction_switch)),
    ("algorithm.rollout_is_threshold", Same("objective.rollout_is_threshold")),
    (
        "algorithm.use_pf_ppo",
        Off("no filter of rollouts by reward; rollout.dynamic_sampling drops groups without spread"),
    ),
    ("algorithm.pf_ppo.**", NotNeeded("use_pf_ppo controls whether there is a filter")),
    ("algorithm.group_by_agent_id", Off("completions of one prompt are a group")),
    // Search-R1 and DeepScaleR
    ("algorithm.no_think_rl", NotNeeded("Search-R1 reads it nowhere in training")),
    ("algorithm.state_masking.**", NotNeeded("what a tool answers is never trained on")),
    ("algorithm.mask_truncated_samples", By(|a| set("objective.mask_truncated_completions", a.is_on()))),
];

fn estimator(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("grpo_vectorized") => set("objective.adv_estimator", "grpo"),
        Some("grpo_passk") => set("objective.adv_estimator", "pass_at_k"),
        Some(
            name @ ("gae"
            | "grpo"
            | "rloo"
            | "rloo_vectorized"
            | "reinforce_plus_plus"
            | "reinforce_plus_plus_baseline"
            | "remax"
            | "opo"
            | "gpg"),
        ) => set("objective.adv_estimator", name),
        Some(name) => cannot(format!(
            "no estimator {name} here; the run uses grpo. docs/guides/algorithms.md lists the estimators"
        )),
        None => asked.wrong("the name of an estimator"),
    }
}

fn kl_in_reward(asked: &SourceKey) -> MappedKey {
    let of_old = !asked.facts.is_written(asked.key) && is_before_0_4(asked.facts);
    set_noted("objective.use_kl_in_reward", asked.is_on(), if of_old { OLD } else { "" })
}

fn in_reward(asked: &SourceKey, key: &str) -> MappedKey {
    if !asked.facts.is_on("algorithm.use_kl_in_reward") {
        return not_needed("use_kl_in_reward is off, so the key is ignored");
    }
    set(key, plain(asked.value))
}

/// As good as no limit of a step's rounds of sampling.
const ROUNDS: i64 = 1_000_000;

/// What has to differ in a group.
fn metric(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("acc" | "score") => {
            set_noted("rollout.dynamic_sampling.metric", grader(asked.facts), "the comparison with the ground truth")
        }
        Some("reward" | "seq_reward") => {
            set_noted("rollout.dynamic_sampling.metric", "score", "a completion's whole reward")
        }
        Some("seq_final_reward") if !asked.facts.is_on("algorithm.use_kl_in_reward") => {
            set_noted("rollout.dynamic_sampling.metric", "score", "a completion's whole reward")
        }
        _ if !asked.facts.is_on("algorithm.filter_groups.enable") => not_needed("filter_groups is off"),
        Some(name) => cannot(format!(
            "`{name}` is no reward of the task: groups are compared by the whole reward, or by a part that task.rewards names"
        )),
        None => not_needed("has no value in the files"),
    }
}

fn rounds(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n <= 0 => set_noted("rollout.dynamic_sampling.max_num_gen_batches", ROUNDS, "no limit in verl"),
        _ => size(asked, "rollout.dynamic_sampling.max_num_gen_batches"),
    }
}

/// Whether the sampler's log-probs are taken for the old ones.
fn bypasses(asked: &SourceKey) -> bool {
    asked.facts.is_on(&format!("{CORRECTION}.bypass_mode"))
        && asked.facts.text(&format!("{CORRECTION}.loss_type")) != Some("reinforce")
}

fn correction_switch(asked: &SourceKey) -> MappedKey {
    if asked.is_off() {
        not_needed("off, as here by default")
    } else {
        set("objective.rollout_is", if asked.is_on() { json!("token") } else { asked.value.clone() })
    }
}

fn weights(asked: &SourceKey) -> MappedKey {
    if bypasses(asked) {
        return not_needed("bypass_mode: the ratio of policy and sampler is in the loss already");
    }
    match asked.text() {
        Some(level @ ("token" | "sequence")) => set("objective.rollout_is", level),
        _ if asked.is_off() => not_needed("off, as here by default"),
        _ => asked.wrong("token, sequence or null"),
    }
}

fn rejection(asked: &SourceKey) -> MappedKey {
    if bypasses(asked) && !asked.is_off() {
        return cannot(
            "rejection compares sampler and trainer, and bypass_mode skips the forward pass that it needs: turn \
             bypass_mode off",
        );
    }
    if asked.is_off() {
        not_needed("off, as here by default")
    } else {
        set("objective.rollout_rs", asked.value.clone())
    }
}

fn correction(asked: &SourceKey, of: &str, key: &str) -> MappedKey {
    let off = asked.facts.value(&format!("{CORRECTION}.{of}")).is_none_or(|value| value == "null" || value == "none");
    if off || bypasses(asked) {
        return not_needed(format!("{of} is off, so the key is ignored"));
    }
    if asked.is_absent() {
        return not_needed("has no value in the files");
    }
    set(key, plain(asked.value))
}

fn bypass(asked: &SourceKey) -> MappedKey {
    match (asked.is_on(), bypasses(asked)) {
        (true, true) => set("update.old_log_probs", "sampler"),
        (true, false) => not_needed(
            "with loss_type reinforce the weights are ratios of trainer to sampler, which need the forward pass that \
             bypass_mode skips: the pass stays on",
        ),
        (false, _) => not_needed("off, as here by default"),
    }
}

fn bypass_loss(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("reinforce") if asked.facts.is_on(&format!("{CORRECTION}.bypass_mode")) => MappedKey::Set(
            vec![("objective.policy_loss".into(), "reinforce".into())],
            "with rollout_is as its weights".into(),
        ),
        Some("ppo_clip") | None => not_needed("the clipped loss, as here"),
        Some(_) => not_needed("bypass_mode is off, so the key is ignored"),
    }
}
