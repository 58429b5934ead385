//! verl's `algorithm` section.

use super::reward_model::grader;
use super::version::{OLD, is_before_0_4};
use crate::common::{size, switch};
use crate::key_mapping::prelude::*;
use serde_json::json;

pub(super) const CORRECTION: &str = "algorithm.rollout_correction";
const NO_KL: &str = "use_kl_in_reward is off, so the key is ignored";
const NO_WEIGHTS: &str = "rollout_is is off, so the key is ignored";
const NO_REJECTION: &str = "rollout_rs is off, so the key is ignored";

pub(super) const TABLE: KeyTable = (
    "algorithm.",
    &[
        ("adv_estimator", By(estimator)),
        ("gamma lam rollout_is_threshold", Under("objective")),
        ("norm_adv_by_std_in_grpo", By(|a| set("objective.scale_rewards", if a.is_on() { "group" } else { "none" }))),
        ("use_kl_in_reward", By(kl_in_reward)),
        ("kl_penalty", If(has_kl, NO_KL, &Same("objective.kl_penalty"))),
        ("kl_ctrl.{type,kl_coef,target_kl,horizon}", If(has_kl, NO_KL, &Under("objective.kl_ctrl"))),
        ("filter_groups.enable", To(switch, "rollout.dynamic_sampling.enable")),
        ("filter_groups.metric", By(metric)),
        ("filter_groups.max_num_gen_batches", To(rounds, "rollout.dynamic_sampling.max_num_gen_batches")),
        ("filter_groups.max_inflight_gen_batches", NotNeeded("one round of prompts is sampled at a time")),
        ("rollout_correction.rollout_is", By(weights)),
        ("rollout_correction.rollout_is_{threshold,batch_normalize}", If(has_weights, NO_WEIGHTS, &Under("objective"))),
        ("rollout_correction.rollout_rs", By(rejection)),
        ("rollout_correction.rollout_rs_threshold{,_lower}", If(rejects, NO_REJECTION, &Under("objective"))),
        ("rollout_correction.bypass_mode", By(bypass)),
        ("rollout_correction.loss_type", By(bypass_loss)),
        (
            "rollout_correction.rollout_token_veto_threshold",
            Off("objective.rollout_rs: seq_max_k2 excludes sequences by their worst token"),
        ),
        (
            "rollout_correction.use_policy_gradient",
            Off("write objective.policy_loss: reinforce with objective.rollout_is (docs/guides/algorithms.md)"),
        ),
        ("rollout_is", By(correction_switch)),
        ("use_pf_ppo", Off("no filter of rollouts by reward; rollout.dynamic_sampling drops groups without spread")),
        ("pf_ppo.**", NotNeeded("use_pf_ppo controls whether there is a filter")),
        ("group_by_agent_id", Off("completions of one prompt are a group")),
        // Search-R1 and DeepScaleR
        ("no_think_rl", NotNeeded("Search-R1 reads it nowhere in training")),
        ("state_masking.**", NotNeeded("what a tool answers is never trained on")),
        ("mask_truncated_samples", To(switch, "objective.mask_truncated_completions")),
    ],
);

fn estimator(asked: &SourceKey) -> MappedKey {
    let name = match asked.text() {
        Some("grpo_vectorized") => "grpo",
        Some("grpo_passk") => "pass_at_k",
        Some(
            name @ ("gae"
            | "grpo"
            | "rloo"
            | "rloo_vectorized"
            | "reinforce_plus_plus"
            | "remax"
            | "opo"
            | "gpg"
            | "reinforce_plus_plus_baseline"),
        ) => name,
        Some(name) => {
            return cannot(format!(
                "no estimator {name} here; the run uses grpo. docs/guides/algorithms.md lists the estimators"
            ));
        }
        None => return asked.wrong("the name of an estimator"),
    };
    set("objective.adv_estimator", name)
}

fn kl_in_reward(asked: &SourceKey) -> MappedKey {
    let of_old = !asked.facts.is_written(asked.key) && is_before_0_4(asked.facts);
    switch(asked, "objective.use_kl_in_reward").noted(if of_old { OLD } else { "" })
}

fn has_kl(asked: &SourceKey) -> bool {
    asked.facts.is_on("algorithm.use_kl_in_reward")
}

/// As good as no limit of a step's rounds of sampling.
const ROUNDS: i64 = 1_000_000;

/// What has to differ in a group.
fn metric(asked: &SourceKey) -> MappedKey {
    let key = "rollout.dynamic_sampling.metric";
    match asked.text() {
        Some("acc" | "score") => set(key, grader(asked.facts)).noted("the comparison with the ground truth"),
        Some("reward" | "seq_reward") => set(key, "score").noted("a completion's whole reward"),
        Some("seq_final_reward") if !has_kl(asked) => set(key, "score").noted("a completion's whole reward"),
        _ if !asked.facts.is_on("algorithm.filter_groups.enable") => not_needed("filter_groups is off"),
        Some(name) => cannot(format!(
            "`{name}` is no reward of the task: groups are compared by the whole reward, or by a part that task.rewards names"
        )),
        None => absent(),
    }
}

fn rounds(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.whole() {
        Some(n) if n <= 0 => set(key, ROUNDS).noted("no limit in verl"),
        _ => size(asked, key),
    }
}

/// Whether the sampler's log-probs are taken for the old ones.
fn bypasses(asked: &SourceKey) -> bool {
    asked.facts.is_on(&format!("{CORRECTION}.bypass_mode"))
        && asked.facts.text(&format!("{CORRECTION}.loss_type")) != Some("reinforce")
}

fn corrects(asked: &SourceKey, by: &str) -> bool {
    let value = asked.facts.value(&format!("{CORRECTION}.{by}"));
    !bypasses(asked) && value.is_some_and(|value| value != "null" && value != "none")
}

fn has_weights(asked: &SourceKey) -> bool {
    corrects(asked, "rollout_is")
}

fn rejects(asked: &SourceKey) -> bool {
    corrects(asked, "rollout_rs")
}

fn correction_switch(asked: &SourceKey) -> MappedKey {
    match asked.is_off() {
        true => off(),
        false if asked.is_on() => set("objective.rollout_is", "token"),
        false => set("objective.rollout_is", asked.value.clone()),
    }
}

fn weights(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        _ if bypasses(asked) => not_needed("bypass_mode: the ratio of policy and sampler is in the loss already"),
        Some(level @ ("token" | "sequence")) => set("objective.rollout_is", level),
        _ if asked.is_off() => off(),
        _ => asked.wrong("token, sequence or null"),
    }
}

fn rejection(asked: &SourceKey) -> MappedKey {
    match asked.is_off() {
        true => off(),
        false if bypasses(asked) => cannot(
            "rejection compares sampler and trainer, and bypass_mode skips the forward pass that it needs: turn \
             bypass_mode off",
        ),
        false => set("objective.rollout_rs", asked.value.clone()),
    }
}

fn bypass(asked: &SourceKey) -> MappedKey {
    match asked.is_on() {
        true if bypasses(asked) => set("update.old_log_probs", "sampler"),
        true => not_needed(
            "with loss_type reinforce the weights are ratios of trainer to sampler, which need the forward pass that \
             bypass_mode skips: the pass stays on",
        ),
        false => off(),
    }
}

fn bypass_loss(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("reinforce") if asked.facts.is_on(&format!("{CORRECTION}.bypass_mode")) => {
            set("objective.policy_loss", json!("reinforce")).noted("with rollout_is as its weights")
        }
        Some("ppo_clip") | None => not_needed("the clipped loss, as here"),
        Some(_) => not_needed("bypass_mode is off, so the key is ignored"),
    }
}
