//! `rollout_rs` and its thresholds together: criteria with ranges.

use super::config::ObjectiveConfig;
use super::rollout_rs::{RejectionCriteria, RejectionThreshold, RejectionThresholds};
use crate::rejection::{Rejection, RolloutRs};
use firebrick_core::error::{Error, Result};
use std::ops::RangeInclusive;

/// The criteria with the ranges of their statistics; none where nothing is left out.
pub(super) fn rejections(config: &ObjectiveConfig) -> Result<Vec<Rejection>> {
    let Some(RejectionCriteria(kinds)) = &config.rollout_rs else {
        return Ok(Vec::new());
    };
    let Some(RejectionThresholds(given)) = &config.rollout_rs_threshold else {
        return reject("objective: rollout_rs needs rollout_rs_threshold: how far the sampler may be from the trainer");
    };
    if given.len() != 1 && given.len() != kinds.len() {
        return reject(format!(
            "objective: rollout_rs has {} criteria and rollout_rs_threshold {} thresholds; give one for all of them, or one each",
            kinds.len(),
            given.len()
        ));
    }
    let pairs = kinds.iter().zip(given.iter().cycle());
    let lower = config.rollout_rs_threshold_lower;
    if lower.is_some() && !pairs.clone().any(|(criterion, threshold)| criterion.is_k1() && threshold.lower.is_none()) {
        return reject("objective.rollout_rs_threshold_lower requires one of the k1 kinds of objective.rollout_rs");
    }
    let rejection = |(&criterion, threshold): (&RolloutRs, &RejectionThreshold)| {
        let range = range(lower, criterion, *threshold)?;
        Ok(Rejection { criterion, range })
    };
    pairs.map(rejection).collect()
}

/// The range of a criterion's statistic; for the k1 kinds, of the log of a ratio.
fn range(lower: Option<f64>, criterion: RolloutRs, threshold: RejectionThreshold) -> Result<RangeInclusive<f64>> {
    let upper = threshold.upper;
    if !(upper.is_finite() && upper > 0.0) {
        return reject(format!("objective: rollout_rs_threshold is {upper}; it should be above 0"));
    }
    if !criterion.is_k1() {
        return match threshold.lower {
            None => Ok(f64::NEG_INFINITY..=upper),
            Some(_) => reject(format!(
                "objective: rollout_rs_threshold has {threshold} for a divergence, which has no lower bound; only the k1 kinds are \
                 ratios with two"
            )),
        };
    }
    let lower = threshold.lower.or(lower).unwrap_or(upper.recip());
    if !(lower > 0.0 && lower <= upper) {
        return reject(format!(
            "objective: the least ratio of rollout_rs, {lower}, should be above 0 and not exceed the largest, {upper} \
             (rollout_rs_threshold, rollout_rs_threshold_lower)"
        ));
    }
    Ok(lower.ln()..=upper.ln())
}

/// The error of settings that make no sense.
pub(super) fn reject<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Config(reason.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn settings(criteria: &str, thresholds: &str) -> ObjectiveConfig {
        let written = json!({
            "name": "grpo",
            "rollout_rs": criteria,
            "rollout_rs_threshold": thresholds,
        });
        serde_json::from_value(written).expect("settings")
    }

    #[test]
    fn one_threshold_serves_all_criteria_or_each_has_its_own() {
        let of = |criteria, thresholds| rejections(&settings(criteria, thresholds)).expect("rejections");
        let infinite = f64::NEG_INFINITY;
        let ranges = |own: Vec<Rejection>| own.into_iter().map(|r| r.range).collect::<Vec<_>>();
        assert_eq!(ranges(of("token_k2, seq_mean_k2", "0.1")), [infinite..=0.1, infinite..=0.1]);
        let ranges = ranges(of("token_k1,seq_max_k2", "0.8_1.2, 0.4"));
        assert_eq!(ranges, [0.8_f64.ln()..=1.2_f64.ln(), infinite..=0.4]);
    }

    #[test]
    fn thresholds_that_do_not_fit_the_criteria_are_refused() {
        for (criteria, thresholds, part) in [
            ("token_k1,seq_max_k2", "1,2,3", "2 criteria and rollout_rs_threshold 3"),
            ("token_k2", "0.5_2", "no lower bound"),
            ("token_k1", "3_2", "should be above 0 and not exceed"),
            ("token_k2", "-1", "above 0"),
        ] {
            let settings = settings(criteria, thresholds);
            let refused = rejections(&settings).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }
}
