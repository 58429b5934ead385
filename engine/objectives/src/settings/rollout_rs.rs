//! Spelling of `rollout_rs` and its thresholds.

use crate::rejection::RolloutRs;
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Criteria that all must hold, joined by commas if there are several (verl's spelling of `rollout_rs`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct RejectionCriteria(pub Vec<RolloutRs>);

impl TryFrom<String> for RejectionCriteria {
    type Error = serde::de::value::Error;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let kinds = text.split(',').map(|name| {
            let name: serde::de::value::StrDeserializer<'_, _> = name.trim().into_deserializer();
            RolloutRs::deserialize(name)
        });
        kinds.collect::<Result<_, _>>().map(Self)
    }
}

impl From<RejectionCriteria> for String {
    fn from(criteria: RejectionCriteria) -> Self {
        let name = |kind: &RolloutRs| {
            let name = serde_json::to_value(kind).unwrap_or_default();
            name.as_str().unwrap_or_default().to_owned()
        };
        let names: Vec<String> = criteria.0.iter().map(name).collect();
        names.join(",")
    }
}

/// Bound of each criterion: one value for all of them, or one each joined by commas, `lower_upper` for the k1 kinds
/// (verl's spelling).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(try_from = "Written", into = "Written")]
pub struct RejectionThresholds(pub Vec<RejectionThreshold>);

/// Threshold of a criterion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RejectionThreshold {
    /// Least ratio, for the k1 kinds.
    pub lower: Option<f64>,
    /// Most divergence; of the k1 kinds, the largest ratio.
    pub upper: f64,
}

impl From<f64> for RejectionThresholds {
    fn from(upper: f64) -> Self {
        Self(vec![RejectionThreshold { lower: None, upper }])
    }
}

/// Thresholds as a configuration spells them.
#[derive(Deserialize, Serialize, schemars::JsonSchema)]
#[serde(untagged)]
enum Written {
    Number(f64),
    Text(String),
}

impl TryFrom<Written> for RejectionThresholds {
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
                    "{text:?} should be values joined by commas, one per criterion of rollout_rs, such as \"2\" or, \
                     with a lower bound for the k1 kinds, \"0.5_2\""
                )
            })
        };
        let each = text.split(',').map(|part| match part.split_once('_') {
            Some((lower, upper)) => Ok(RejectionThreshold { lower: Some(number(lower)?), upper: number(upper)? }),
            None => Ok(RejectionThreshold { lower: None, upper: number(part)? }),
        });
        each.collect::<Result<_, String>>().map(Self)
    }
}

impl From<RejectionThresholds> for Written {
    fn from(thresholds: RejectionThresholds) -> Self {
        match thresholds.0.as_slice() {
            [RejectionThreshold { lower: None, upper }] => Self::Number(*upper),
            several => {
                let texts: Vec<String> = several.iter().map(RejectionThreshold::to_string).collect();
                Self::Text(texts.join(","))
            }
        }
    }
}

impl fmt::Display for RejectionThreshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lower {
            Some(lower) => write!(f, "{lower}_{}", self.upper),
            None => write!(f, "{}", self.upper),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn criteria_and_thresholds_are_written_as_they_are_read() {
        for written in ["token_k1", "token_k1,seq_max_k3"] {
            let criteria = RejectionCriteria::try_from(written.to_owned()).expect("criteria");
            assert_eq!(String::from(criteria), written);
        }
        for written in ["2.0", "\"0.5_1.5,4\""] {
            let thresholds: RejectionThresholds = serde_json::from_str(written).expect("thresholds");
            assert_eq!(serde_json::to_string(&thresholds).expect("JSON"), written);
        }
        assert!(RejectionCriteria::try_from("token_k1,seq_k9".to_owned()).is_err());
        assert!(serde_json::from_str::<RejectionThresholds>("\"1,much\"").is_err());
    }
}
