//! Checked reading of flat settings: their ranges, and which settings the objective does not use.

use super::config::ObjectiveConfig;
use firebrick_core::error::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Settings that only some objectives read, and what they go with.
const GOES_WITH: [(&[&str], &str); 18] = [
    (
        &["scale_rewards"],
        "objective.adv_estimator: grpo, grpo_leave_one_out or pass_at_k, and multi_objective_aggregation: sum_then_normalize",
    ),
    (&["gamma"], "objective.adv_estimator: reinforce_plus_plus or gae"),
    (&["lam"], "objective.adv_estimator: gae"),
    (
        &["normalize_advantages"],
        "an objective.adv_estimator that gives one advantage per completion and does not normalize it",
    ),
    (&["kl_ctrl", "kl_penalty"], "objective.use_kl_in_reward"),
    (
        &["importance_sampling_level"],
        "objective.policy_loss: clip, cispo or sapo; the others have no ratio or a different one",
    ),
    (&["clip_ratio_low", "clip_ratio_high"], "an objective.policy_loss that clips: clip, cispo, geo_mean or clip_cov"),
    (&["clip_ratio_c"], "objective.policy_loss: clip"),
    (&["tau_pos", "tau_neg"], "objective.policy_loss: sapo"),
    (&["kl_cov_ratio", "ppo_kl_coef"], "objective.policy_loss: kl_cov"),
    (&["clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"], "objective.policy_loss: clip_cov"),
    (&["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"], "objective.policy_loss: vespo"),
    (&["loss_scale_factor"], "objective.loss_agg_mode: seq-mean-token-sum-norm"),
    (&["use_bias_correction_kl"], "objective.kl_loss_coef above 0"),
    (
        &["entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"],
        "objective.use_adaptive_entropy",
    ),
    (&["rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_batch_normalize"], "objective.rollout_is"),
    (&["rollout_rs_threshold"], "objective.rollout_rs"),
    (&["rollout_rs_threshold_lower"], "one of the k1 kinds of objective.rollout_rs"),
];

/// Settings during the conversion, with a record of which were read.
pub(super) struct SettingsReader<'a> {
    pub config: &'a ObjectiveConfig,
    read: RefCell<BTreeSet<&'static str>>,
}

/// Reads a setting and records it as read. With a third argument: checks its range.
macro_rules! read {
    ($reader:expr, $key:ident) => {{
        $reader.note(stringify!($key));
        &$reader.config.$key
    }};
    ($reader:expr, $key:ident, $check:path) => {{
        $reader.note(stringify!($key));
        $check(stringify!($key), $reader.config.$key)?
    }};
}
pub(super) use read;

impl<'a> SettingsReader<'a> {
    pub fn new(config: &'a ObjectiveConfig) -> Self {
        Self { config, read: RefCell::default() }
    }

    /// Records that a setting was read.
    pub fn note(&self, key: &'static str) {
        self.read.borrow_mut().insert(key);
    }

    /// Refuses a setting that differs from its default and was not read. `null` turns something off, and is never
    /// refused.
    ///
    /// # Errors
    /// `Error::Config` with the first such key, and what it goes with.
    pub fn refuse_unread(&self) -> Result<()> {
        let written = |config: &ObjectiveConfig| serde_json::to_value(config).unwrap_or_default();
        let (own, base) = (written(self.config), written(&ObjectiveConfig::default()));
        let read = self.read.borrow();
        let idle = |key: &&&str| !read.contains(**key) && own[**key] != base[**key] && !own[**key].is_null();
        for (keys, with) in GOES_WITH {
            if let Some(key) = keys.iter().find(idle) {
                return refuse(format!("objective.{key} requires {with}"));
            }
        }
        Ok(())
    }
}

/// The error of settings that make no sense.
pub(super) fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Config(reason.into()))
}

/// A number above 0.
pub(super) fn positive(key: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    refuse(format!("objective.{key} should be above 0"))
}

/// 0 or a number above.
pub(super) fn non_negative(key: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    refuse(format!("objective.{key} should be 0 or more"))
}

/// A share: above 0 and at most 1.
pub(super) fn share(key: &str, value: f64) -> Result<f64> {
    if value > 0.0 && value <= 1.0 {
        return Ok(value);
    }
    refuse(format!("objective.{key} should be above 0 and at most 1"))
}

/// A discount: from 0 to 1.
pub(super) fn discount(key: &str, value: f64) -> Result<f64> {
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    refuse(format!("objective.{key} is {value}; a number between 0 and 1 was expected"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_that_goes_with_others_is_one() {
        let known = serde_json::to_value(ObjectiveConfig::default()).expect("settings");
        for key in GOES_WITH.iter().flat_map(|(keys, _)| *keys) {
            assert!(known.get(key).is_some(), "{key} is no setting");
        }
    }
}
