//! Rejection of tokens and sequences whose log-probs under sampler and trainer are too far apart (verl's `rollout_rs`).

use super::advantage::mean;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// Exponents are clamped to ± this.
const MAX_EXPONENT: f64 = 20.0;

/// The statistic that decides whether a token or sequence is left out, with d = old − sampler: k1 = −d, k2 = d²/2,
/// k3 = e^d − 1 − d (verl's `rollout_rs`).
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
    /// Returns true if it bounds the log of a ratio from both sides.
    pub fn is_k1(self) -> bool {
        matches!(self, Self::TokenK1 | Self::SeqSumK1 | Self::SeqMeanK1)
    }

    fn token_statistic(self, d: f64) -> f64 {
        let d = d.clamp(-MAX_EXPONENT, MAX_EXPONENT);
        match self {
            Self::TokenK1 | Self::SeqSumK1 | Self::SeqMeanK1 => -d,
            Self::TokenK2 | Self::SeqSumK2 | Self::SeqMeanK2 | Self::SeqMaxK2 => d * d / 2.0,
            Self::TokenK3 | Self::SeqSumK3 | Self::SeqMeanK3 | Self::SeqMaxK3 => d.exp() - 1.0 - d,
        }
    }

    /// The statistic of every token of a sequence.
    fn statistics(self, differences: &[f64]) -> Vec<f64> {
        let values: Vec<f64> = differences.iter().map(|&d| self.token_statistic(d)).collect();
        let repeated = |value: f64| vec![value; values.len()];
        match self {
            Self::TokenK1 | Self::TokenK2 | Self::TokenK3 => values,
            Self::SeqSumK1 | Self::SeqSumK2 | Self::SeqSumK3 => repeated(values.iter().sum()),
            Self::SeqMeanK1 | Self::SeqMeanK2 | Self::SeqMeanK3 => repeated(mean(&values)),
            Self::SeqMaxK2 | Self::SeqMaxK3 => repeated(values.iter().copied().fold(0.0, f64::max)),
        }
    }
}

/// A criterion and the range of its statistic.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    /// The criterion.
    pub criterion: RolloutRs,
    /// Range of the kept tokens' statistic. For the k1 kinds, it is the log of a ratio.
    pub range: RangeInclusive<f64>,
}

/// Mask of the tokens that every criterion keeps, by sequence; `differences` are old − sampler of each token.
pub fn kept_tokens(rejections: &[Rejection], differences: &[Vec<f64>]) -> Vec<Vec<bool>> {
    let kept_in = |row: &Vec<f64>| {
        let mut kept = vec![true; row.len()];
        for rejection in rejections {
            let statistics = rejection.criterion.statistics(row);
            for (kept, statistic) in kept.iter_mut().zip(statistics) {
                *kept &= rejection.range.contains(&statistic);
            }
        }
        kept
    };
    differences.iter().map(kept_in).collect()
}

#[cfg(test)]
mod tests {
    use super::RolloutRs::{SeqMaxK3, SeqMeanK2, SeqSumK1, TokenK1};
    use super::*;

    fn up_to(criterion: RolloutRs, upper: f64) -> Rejection {
        let range = if criterion.is_k1() { upper.recip().ln()..=upper.ln() } else { f64::NEG_INFINITY..=upper };
        Rejection { criterion, range }
    }

    #[test]
    fn tokens_or_sequences_beyond_the_threshold_are_left_out() {
        let differences = [vec![0.0, 1.0], vec![0.1, -0.1]];
        let kept = |criterion, upper| kept_tokens(&[up_to(criterion, upper)], &differences);
        assert_eq!(kept(TokenK1, 2.0), [[true, false], [true, true]]);
        assert_eq!(kept(SeqSumK1, 2.0), [[false, false], [true, true]]);
        assert_eq!(kept(SeqMeanK2, 0.2), [[false, false], [true, true]]);
        assert_eq!(kept(SeqMaxK3, 1.0), [[true, true], [true, true]]);
        let kept_mask = kept_tokens(&[], &differences);
        assert!(kept_mask.iter().flatten().all(|&kept| kept));
    }

    #[test]
    fn several_criteria_all_have_to_hold() {
        let differences = [vec![0.0, 1.0, 0.1], vec![0.1, -0.1, 0.3]];
        let ratio = Rejection { criterion: TokenK1, range: 0.8_f64.ln()..=1.2_f64.ln() };
        let criteria = [ratio, up_to(RolloutRs::SeqMaxK2, 0.4)];
        // the first sequence is out by its largest k2, the last token of the second by its ratio
        assert_eq!(kept_tokens(&criteria, &differences), [[false, false, false], [true, true, false]]);
    }
}
