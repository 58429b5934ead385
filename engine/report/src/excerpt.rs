//! Selection of a step's samples for the live view.

use serde::Deserialize;

/// Most shown samples of a step.
const MAX_SHOWN: usize = 16;

/// The finish reason of truncated completions in `samples.jsonl`.
pub(super) const TRUNCATED: &str = "length";

/// Reason why a sample is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// The last sample.
    Newest,
    /// The first with the largest reward.
    Best,
    /// The last with the smallest.
    Worst,
    /// The first of its group.
    Other,
}

/// A line of `samples.jsonl`: a sample with its complete texts.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Excerpt {
    /// Training step.
    pub step: u64,
    /// Index of its prompt among the run's draws.
    pub draw: u64,
    /// Index in its group.
    #[serde(default)]
    pub sample: u64,
    /// The prompt.
    pub prompt: String,
    /// The completion.
    pub completion: String,
    /// Ground truth.
    #[serde(default)]
    pub answer: String,
    /// Reward; `None` if it is not finite.
    pub reward: Option<f64>,
    /// Its parts.
    #[serde(default)]
    pub reward_parts: Vec<(String, Option<f64>)>,
    /// Answers that rules read in the completion, if the run wrote them.
    #[serde(default)]
    pub readings: Vec<ParsedAnswer>,
    /// Advantage of its tokens.
    pub advantage: Option<f64>,
    /// Finish reason, as in `samples.jsonl`.
    pub finish: String,
    /// Completion tokens.
    pub tokens: u64,
}

/// The answer that a rule read in a completion.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ParsedAnswer {
    /// The reward's name.
    pub reward: String,
    /// The answer; `None` if it found none.
    pub parsed: Option<String>,
}

impl Excerpt {
    /// Returns true if it ended at the length limit.
    pub fn is_truncated(&self) -> bool {
        self.finish == TRUNCATED
    }
}

/// Selects samples of a step, given the draw and reward of each in order: the newest, the best, the worst,
/// then the first of each group.
pub fn picks(samples: &[(u64, f64)]) -> Vec<(usize, Pick)> {
    let Some(newest) = samples.len().checked_sub(1) else {
        return Vec::new();
    };
    let mut best = 0;
    let mut worst = 0;
    for (at, (_, reward)) in samples.iter().enumerate() {
        // NaN is neither
        if *reward > samples[best].1 || samples[best].1.is_nan() {
            best = at;
        }
        if *reward <= samples[worst].1 || samples[worst].1.is_nan() {
            worst = at;
        }
    }
    let firsts = (0..samples.len()).filter(|&at| at == 0 || samples[at - 1].0 != samples[at].0);
    let mut picked = vec![(newest, Pick::Newest), (best, Pick::Best), (worst, Pick::Worst)];
    let others = firsts.filter(|&at| ![newest, best, worst].contains(&at));
    picked.extend(others.map(|at| (at, Pick::Other)));
    picked.truncate(MAX_SHOWN);
    picked
}

#[cfg(test)]
mod tests {
    use super::{Pick, picks};

    #[test]
    fn the_newest_the_best_the_worst_and_the_first_of_each_group_are_shown() {
        let samples = [(0, 0.0), (0, 1.0), (1, f64::NAN), (1, 1.0), (2, 0.0), (2, 0.5)];
        let picked = picks(&samples);
        let wanted = [(5, Pick::Newest), (1, Pick::Best), (4, Pick::Worst), (0, Pick::Other), (2, Pick::Other)];
        assert_eq!(picked, wanted);
    }

    #[test]
    fn a_step_of_many_groups_shows_sixteen_samples_and_one_without_samples_none() {
        let samples: Vec<(u64, f64)> = (0..1000).map(|at| (at / 4, 0.0)).collect();
        assert_eq!(picks(&samples).len(), 16);
        assert!(picks(&[]).is_empty());
    }
}
