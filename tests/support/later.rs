//! The one list of fixture cases that a later issue builds.
//!
//! A case that is neither computed nor here is an error: a new `fn`, or a new value of a parameter, never passes unseen.

use serde_json::Value;

/// Which cases of a `fn` wait.
enum When {
    /// All.
    Always,
    /// Those whose parameter is this JSON value.
    Is(&'static str, &'static str),
    /// Those whose parameter is another than this JSON value.
    IsNot(&'static str, &'static str),
}

use When::{Always, Is, IsNot};

const FAMILY: &str = "PPO and the family of objectives";
const REWARDS: &str = "several rewards, each normalised by itself";
const TRL_LOSS: &str = "trl.GRPOTrainer._compute_loss";

/// `fn`, which of its cases, and the issue that builds them.
const LATER: &[(&str, When, &str)] = &[
    (TRL_LOSS, Is("level", r#""sequence""#), FAMILY),
    (TRL_LOSS, Is("loss_type", r#""luspo""#), FAMILY),
    (TRL_LOSS, Is("loss_type", r#""cispo""#), FAMILY),
    (TRL_LOSS, Is("loss_type", r#""sapo""#), FAMILY),
    (TRL_LOSS, Is("loss_type", r#""vespo""#), FAMILY),
    (TRL_LOSS, Is("kl_bias", "true"), FAMILY),
    (TRL_LOSS, Is("is_ratio", "true"), FAMILY),
    (TRL_LOSS, IsNot("top_entropy_quantile", "1.0"), FAMILY),
    (TRL_LOSS, IsNot("off_policy_mask_threshold", "null"), FAMILY),
    ("trl.RLOOTrainer._compute_loss", Always, FAMILY),
    ("trl RLOO advantages", Always, FAMILY),
    (
        "trl GRPO advantages",
        Is("multi_objective_aggregation", r#""normalize_then_sum""#),
        REWARDS,
    ),
    (
        "compute_policy_loss_vanilla",
        Is("rollout_is_weights", "true"),
        FAMILY,
    ),
    ("compute_policy_loss_gspo", Always, FAMILY),
    ("compute_policy_loss_sapo", Always, FAMILY),
    ("compute_policy_loss_cispo", Always, FAMILY),
    ("compute_policy_loss_gpg", Always, FAMILY),
    ("compute_policy_loss_geo_mean", Always, FAMILY),
    ("compute_policy_loss_kl_cov", Always, FAMILY),
    ("compute_policy_loss_reinforce", Always, FAMILY),
    ("compute_rloo_outcome_advantage", Always, FAMILY),
    ("compute_rloo_vectorized_outcome_advantage", Always, FAMILY),
    ("compute_opo_outcome_advantage", Always, FAMILY),
    (
        "compute_reinforce_plus_plus_outcome_advantage",
        Always,
        FAMILY,
    ),
    (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        Always,
        FAMILY,
    ),
    ("compute_remax_outcome_advantage", Always, FAMILY),
    ("compute_grpo_passk_outcome_advantage", Always, FAMILY),
    // runs of train/grpo.json
    ("train/grpo", Is("level", r#""sequence""#), FAMILY),
];

/// The issue that builds this case, if it is a later one.
pub fn topic(func: &str, params: &Value) -> Option<&'static str> {
    let value = |key: &str| params.get(key).unwrap_or(&Value::Null).to_string();
    LATER
        .iter()
        .find(|(name, when, _)| {
            *name == func
                && match when {
                    Always => true,
                    Is(key, json) => value(key) == *json,
                    IsNot(key, json) => value(key) != *json,
                }
        })
        .map(|(.., topic)| *topic)
}
