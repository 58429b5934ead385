//! Tokens and sequences that sampler and trainer disagree about by too much are left out (verl's `rollout_rs`).

use super::advantage::mean;
use super::config::ObjectiveConfig;
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::RangeInclusive;

/// Exponents are held within ± this.
const BOUND: f64 = 20.0;

/// What sampler and trainer may disagree by before tokens or sequences are left out, with d = old − sampler: k1 = −d,
/// k2 = d²/2, k3 = e^d − 1 − d (verl's `rollout_rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "what they are is in their names")]
pub enum RolloutRs {
    TokenK1,
    TokenK2,
    TokenK3,
    SeqSumK1,
    SeqSumK2,
    SeqSumK3,
    SeqMeanK1,
    SeqMeanK2,
    SeqMeanK3,
    SeqMaxK2,
    SeqMaxK3,
}

impl RolloutRs {
    /// Whether it bounds the log of a ratio from both sides.
    #[must_use]
    pub fn is_k1(self) -> bool {
        matches!(self, Self::TokenK1 | Self::SeqSumK1 | Self::SeqMeanK1)
    }

    fn of_token(self, d: f64) -> f64 {
        let d = d.clamp(-BOUND, BOUND);
        match self {
            Self::TokenK1 | Self::SeqSumK1 | Self::SeqMeanK1 => -d,
            Self::TokenK2 | Self::SeqSumK2 | Self::SeqMeanK2 | Self::SeqMaxK2 => d * d / 2.0,
            Self::TokenK3 | Self::SeqSumK3 | Self::SeqMeanK3 | Self::SeqMaxK3 => d.exp() - 1.0 - d,
        }
    }

    /// What is compared, for every token of a sequence.
    fn statistics(self, differences: &[f64]) -> Vec<f64> {
        let own: Vec<f64> = differences.iter().map(|&d| self.of_token(d)).collect();
        let all = |value: f64| vec![value; own.len()];
        match self {
            Self::TokenK1 | Self::TokenK2 | Self::TokenK3 => own,
            Self::SeqSumK1 | Self::SeqSumK2 | Self::SeqSumK3 => all(own.iter().sum()),
            Self::SeqMeanK1 | Self::SeqMeanK2 | Self::SeqMeanK3 => all(mean(&own)),
            Self::SeqMaxK2 | Self::SeqMaxK3 => all(own.iter().copied().fold(0.0, f64::max)),
        }
    }
}

/// Criteria that all have to hold, joined by commas where there are several (verl's spelling).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Criteria(pub Vec<RolloutRs>);

impl TryFrom<String> for Criteria {
    type Error = serde::de::value::Error;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let kinds = text.split(',').map(|name| {
            let name: serde::de::value::StrDeserializer<'_, _> = name.trim().into_deserializer();
            RolloutRs::deserialize(name)
        });
        kinds.collect::<Result<_, _>>().map(Self)
    }
}

impl From<Criteria> for String {
    fn from(criteria: Criteria) -> Self {
        let name = |kind: &RolloutRs| {
            let name = serde_json::to_value(kind).unwrap_or_default();
            name.as_str().unwrap_or_default().to_owned()
        };
        let names: Vec<String> = criteria.0.iter().map(name).collect();
        names.join(",")
    }
}

impl Criteria {
    /// Whether one of them bounds a ratio from both sides.
    #[must_use]
    pub fn has_k1(&self) -> bool {
        self.0.iter().any(|kind| kind.is_k1())
    }
}

/// What each criterion allows: a number for all of them, or one each joined by commas, `lower_upper` for the k1 kinds (verl's
/// spelling).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Thresholds(pub Vec<Threshold>);

/// What a criterion allows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// Least ratio, for the k1 kinds.
    pub lower: Option<f64>,
    /// Most divergence; of the k1 kinds, the largest ratio.
    pub upper: f64,
}

impl From<f64> for Thresholds {
    fn from(upper: f64) -> Self {
        Self(vec![Threshold { lower: None, upper }])
    }
}

/// Thresholds as a configuration spells them.
#[derive(Deserialize, Serialize)]
#[serde(untagged)]
enum Written {
    Number(f64),
    Text(String),
}

impl TryFrom<Written> for Thresholds {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let text = match written {
            Written::Number(upper) => return Ok(upper.into()),
            Written::Text(text) => text,
        };
        let number = |part: &str| {
            let parsed = part.trim().parse::<f64>().ok().filter(|n| n.is_finite());
            parsed.ok_or_else(|| {
                format!(
                    "{text:?} should be numbers joined by commas, one a criterion of rollout_rs, such as \"2\" or, with a lower \
                     bound for the k1 kinds, \"0.5_2\""
                )
            })
        };
        let each = text.split(',').map(|part| match part.split_once('_') {
            Some((lower, upper)) => Ok(Threshold {
                lower: Some(number(lower)?),
                upper: number(upper)?,
            }),
            None => Ok(Threshold {
                lower: None,
                upper: number(part)?,
            }),
        });
        each.collect::<Result<_, String>>().map(Self)
    }
}

impl From<Thresholds> for Written {
    fn from(thresholds: Thresholds) -> Self {
        match thresholds.0.as_slice() {
            [Threshold { lower: None, upper }] => Self::Number(*upper),
            all => {
                let texts: Vec<String> = all.iter().map(Threshold::to_string).collect();
                Self::Text(texts.join(","))
            }
        }
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lower {
            Some(lower) => write!(f, "{lower}_{}", self.upper),
            None => write!(f, "{}", self.upper),
        }
    }
}

impl ObjectiveConfig {
    /// The criteria with what their statistics may be, or why they cannot be told. None of them where nothing is left out.
    pub(super) fn rejections(&self) -> Result<Vec<(RolloutRs, RangeInclusive<f64>)>, String> {
        let Some(Criteria(kinds)) = &self.rollout_rs else {
            return Ok(Vec::new());
        };
        let Some(Thresholds(given)) = &self.rollout_rs_threshold else {
            return Err(
                "rollout_rs needs rollout_rs_threshold: how far the sampler may be from the trainer"
                    .into(),
            );
        };
        if given.len() != 1 && given.len() != kinds.len() {
            return Err(format!(
                "rollout_rs has {} criteria and rollout_rs_threshold {} thresholds; give one for all of them, or one each",
                kinds.len(),
                given.len()
            ));
        }
        let pairs = kinds.iter().zip(given.iter().cycle());
        pairs
            .map(|(&kind, own)| Ok((kind, self.range(kind, *own)?)))
            .collect()
    }

    fn range(&self, kind: RolloutRs, own: Threshold) -> Result<RangeInclusive<f64>, String> {
        let upper = own.upper;
        if !(upper.is_finite() && upper > 0.0) {
            return Err(format!(
                "rollout_rs_threshold is {upper}; it should be above 0"
            ));
        }
        if !kind.is_k1() {
            return match own.lower {
                None => Ok(f64::NEG_INFINITY..=upper),
                Some(_) => Err(format!(
                    "rollout_rs_threshold has {own} for a divergence, which has no lower bound; only the k1 kinds are ratios \
                     with two"
                )),
            };
        }
        let lower = own.lower.or(self.rollout_rs_threshold_lower);
        let lower = lower.unwrap_or(upper.recip());
        if !(lower > 0.0 && lower <= upper) {
            return Err(format!(
                "the least ratio of rollout_rs, {lower}, should be above 0 and not exceed the largest, {upper} \
                 (rollout_rs_threshold, rollout_rs_threshold_lower)"
            ));
        }
        Ok(lower.ln()..=upper.ln())
    }

    /// Which tokens the sampler and the trainer agree about closely enough, by every criterion; `differences` are old − sampler
    /// by sequence.
    #[must_use]
    pub fn agreed(&self, differences: &[Vec<f64>]) -> Vec<Vec<bool>> {
        let rejections = self
            .rejections()
            .expect("the objective's settings were checked");
        let of = |own: &Vec<f64>| {
            let mut kept = vec![true; own.len()];
            for (kind, range) in &rejections {
                for (kept, statistic) in kept.iter_mut().zip(kind.statistics(own)) {
                    *kept &= range.contains(&statistic);
                }
            }
            kept
        };
        differences.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objective(criteria: &str, thresholds: &str) -> ObjectiveConfig {
        let written = Written::Text(thresholds.into());
        ObjectiveConfig {
            rollout_rs: Some(Criteria::try_from(criteria.to_owned()).expect("criteria")),
            rollout_rs_threshold: Some(Thresholds::try_from(written).expect("thresholds")),
            ..ObjectiveConfig::default()
        }
    }

    #[test]
    fn what_sampler_and_trainer_disagree_about_is_left_out() {
        let differences = [vec![0.0, 1.0], vec![0.1, -0.1]];
        let agreed = |kind, threshold| objective(kind, threshold).agreed(&differences);
        assert_eq!(agreed("token_k1", "2"), [[true, false], [true, true]]);
        assert_eq!(agreed("seq_sum_k1", "2"), [[false, false], [true, true]]);
        assert_eq!(agreed("seq_mean_k2", "0.2"), [[false, false], [true, true]]);
        assert_eq!(agreed("seq_max_k3", "1"), [[true, true], [true, true]]);
        let all = ObjectiveConfig::default().agreed(&differences);
        assert!(all.iter().flatten().all(|&kept| kept));
    }

    #[test]
    fn several_criteria_all_have_to_hold() {
        let differences = [vec![0.0, 1.0, 0.1], vec![0.1, -0.1, 0.3]];
        let both = objective("token_k1,seq_max_k2", "0.8_1.2, 0.4");
        // the first sequence is out by its largest k2, the last token of the second by its ratio
        assert_eq!(
            both.agreed(&differences),
            [[false, false, false], [true, true, false]]
        );
        let one_for_all = objective("token_k2, seq_mean_k2", "0.1");
        assert_eq!(
            one_for_all.agreed(&differences),
            [[false, false, false], [true, true, true]]
        );
    }

    #[test]
    fn criteria_and_thresholds_are_written_as_they_are_read() {
        for (criteria, thresholds) in [("token_k1", "2"), ("token_k1,seq_max_k3", "0.5_1.5,4")] {
            let own = objective(criteria, thresholds);
            let written = serde_json::to_value(&own).expect("settings");
            assert_eq!(written["rollout_rs"], criteria);
            let back: ObjectiveConfig = serde_json::from_value(written).expect("settings");
            assert_eq!(back, own);
        }
    }

    #[test]
    fn thresholds_that_cannot_be_told_are_refused() {
        for (criteria, thresholds, part) in [
            (
                "token_k1,seq_max_k2",
                "1,2,3",
                "2 criteria and rollout_rs_threshold 3",
            ),
            ("token_k2", "0.5_2", "no lower bound"),
            ("token_k1", "3_2", "should be above 0 and not exceed"),
            ("token_k2", "-1", "above 0"),
        ] {
            let refused = objective(criteria, thresholds).rejections().unwrap_err();
            assert!(refused.contains(part), "{refused}");
        }
        assert!(Criteria::try_from("token_k1,seq_k9".to_owned()).is_err());
        assert!(Thresholds::try_from(Written::Text("1,much".into())).is_err());
    }
}
