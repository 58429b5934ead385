//! Statistics over several completions of every validation prompt, as in verl, and pass@k.

use firebrick_models::random::Stream;
use std::collections::{BTreeMap, BTreeSet};

/// A scored completion of a validation prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JudgedSample {
    /// Set of its prompt.
    pub set: String,
    /// Index of its prompt.
    pub prompt: usize,
    /// Reward.
    pub reward: f64,
    /// True if it is right, according to a rule.
    pub correct: Option<bool>,
    /// Answer that it votes for, if a rule extracts one.
    pub vote: Option<String>,
}

/// A statistic of one set and one variable.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Statistic {
    pub set: String,
    /// `acc` or `reward`.
    pub variable: &'static str,
    /// Name with the number of samples: `best@4/mean`.
    pub name: String,
    /// True if it is one of the set's main metrics.
    pub core: bool,
    pub value: f64,
}

/// Draws of votes for the mean of a majority (verl: `n_bootstrap`).
const DRAWS: usize = 1_000;

/// Seed of those draws (verl's).
const SEED: u64 = 42;

/// Mean rewards of the sets.
pub(super) fn rewards(samples: &[JudgedSample]) -> BTreeMap<&str, f64> {
    let mut sums: BTreeMap<&str, (f64, usize)> = BTreeMap::new();
    for sample in samples {
        let (sum, count) = sums.entry(&sample.set).or_default();
        (*sum, *count) = (*sum + sample.reward, *count + 1);
    }
    sums.into_iter().map(|(set, (sum, count))| (set, sum / count as f64)).collect()
}

/// Statistics of all sets: means over their prompts.
pub(super) fn statistics(samples: &[JudgedSample]) -> Vec<Statistic> {
    let sets: BTreeSet<&str> = samples.iter().map(|sample| sample.set.as_str()).collect();
    let mut statistics = Vec::new();
    for set in sets {
        let samples: Vec<&JudgedSample> = samples.iter().filter(|s| s.set == set).collect();
        let has_acc = samples.iter().all(|sample| sample.correct.is_some());
        if has_acc {
            let value = |s: &JudgedSample| f64::from(u8::from(s.correct == Some(true)));
            statistics.extend(variable_statistics(set, "acc", true, &samples, value));
        }
        statistics.extend(variable_statistics(set, "reward", !has_acc, &samples, |s| s.reward));
    }
    statistics
}

/// Statistics of one variable; `main` if it is the main one of the set.
fn variable_statistics(
    set: &str,
    variable: &'static str,
    main: bool,
    samples: &[&JudgedSample],
    value: impl Fn(&JudgedSample) -> f64,
) -> Vec<Statistic> {
    let mut prompts: BTreeMap<usize, Vec<(f64, Option<&str>)>> = BTreeMap::new();
    for sample in samples {
        prompts.entry(sample.prompt).or_default().push((value(sample), sample.vote.as_deref()));
    }
    let max_samples = prompts.values().map(Vec::len).max().unwrap_or(0);
    let mut sums: BTreeMap<(String, usize), (f64, usize)> = BTreeMap::new();
    for group in prompts.values() {
        for (name, n, value) in prompt_statistics(group, variable == "acc") {
            let (sum, count) = sums.entry((name, n)).or_default();
            (*sum, *count) = (*sum + value, *count + 1);
        }
    }
    let statistics = sums.into_iter().map(|((name, n), (sum, count))| {
        let known = ["mean@", "best@", "maj@", "pass@"];
        let core = main && n == max_samples && known.iter().any(|start| name.starts_with(start));
        Statistic { set: set.to_owned(), variable, name, core, value: sum / count as f64 }
    });
    statistics.collect()
}

/// Name, number of samples and value of the statistics of one prompt's completions.
fn prompt_statistics(group: &[(f64, Option<&str>)], pass: bool) -> Vec<(String, usize, f64)> {
    let n = group.len();
    let values: Vec<f64> = group.iter().map(|(value, _)| *value).collect();
    let mean = values.iter().sum::<f64>() / n as f64;
    let mut statistics = vec![(format!("mean@{n}"), n, mean)];
    let right = values.iter().filter(|value| **value >= 1.0).count();
    if pass {
        statistics.push(("pass@1".to_owned(), 1, pass_at(n, right, 1)));
    }
    if n == 1 {
        return statistics;
    }
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    statistics.push((format!("std@{n}"), n, (squares / n as f64).sqrt()));
    let votes = votes(group);
    for k in sizes(n) {
        statistics.push((format!("best@{k}/mean"), k, best_of(&values, k)));
        let negative: Vec<f64> = values.iter().map(|value| -value).collect();
        statistics.push((format!("worst@{k}/mean"), k, -best_of(&negative, k)));
        if let Some(votes) = &votes {
            statistics.push((format!("maj@{k}/mean"), k, majority(&values, votes, k)));
        }
        if pass {
            statistics.push((format!("pass@{k}"), k, pass_at(n, right, k)));
        }
    }
    statistics
}

/// Numbers of samples that statistics are given for: the powers of two below `n`, and `n` (verl's).
fn sizes(n: usize) -> Vec<usize> {
    let powers = (1..).map(|exponent| 1_usize << exponent);
    let mut sizes: Vec<usize> = powers.take_while(|size| *size < n).collect();
    sizes.push(n);
    sizes
}

/// Mean of the best of `k` draws with replacement, exact; verl estimates it with a bootstrap of 1,000 draws.
fn best_of(values: &[f64], k: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    // the best is among the i smallest with probability (i / n)^k
    let below = |i: usize| (i as f64 / n).powi(k as i32);
    let terms = sorted.iter().enumerate();
    terms.map(|(i, value)| value * (below(i + 1) - below(i))).sum()
}

/// Probability that `k` of `n` completions, drawn without replacement, have one of the `right` among them: the unbiased
/// estimator of pass@k (Chen et al., arXiv:2107.03374).
fn pass_at(n: usize, right: usize, k: usize) -> f64 {
    if n - right < k {
        return 1.0;
    }
    let none: f64 = (n - right + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product();
    1.0 - none
}

/// Votes of completions, as numbers; `None` without any.
fn votes(group: &[(f64, Option<&str>)]) -> Option<Vec<usize>> {
    group.iter().any(|(_, vote)| vote.is_some()).then(|| {
        let mut known: BTreeMap<Option<&str>, usize> = BTreeMap::new();
        let numbers = group.iter().map(|(_, vote)| {
            let next = known.len();
            *known.entry(*vote).or_insert(next)
        });
        numbers.collect()
    })
}

/// The mean value of the answer that most of `k` completions vote for, over draws with replacement (verl's bootstrap).
/// Of answers with equally many votes, the one that was drawn first counts, with the value of its first completion.
fn majority(values: &[f64], votes: &[usize], k: usize) -> f64 {
    let mut draws = Stream::new(SEED, k as u64);
    let mut sum = 0.0;
    let mut counts = vec![0_usize; votes.len()];
    for _ in 0..DRAWS {
        counts.fill(0);
        let drawn: Vec<usize> = (0..k).map(|_| draws.below(values.len() as u32) as usize).collect();
        for &sample in &drawn {
            counts[votes[sample]] += 1;
        }
        let max = counts.iter().copied().max().unwrap_or(0);
        let winner = drawn.iter().find(|sample| counts[votes[**sample]] == max);
        sum += winner.map_or(0.0, |sample| values[*sample]);
    }
    sum / DRAWS as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(prompt: usize, correct: bool, vote: &str) -> JudgedSample {
        JudgedSample {
            set: "s".into(),
            prompt,
            reward: f64::from(u8::from(correct)),
            correct: Some(correct),
            vote: Some(vote.to_owned()),
        }
    }

    fn value(statistics: &[Statistic], variable: &str, name: &str) -> f64 {
        let statistic = statistics.iter().find(|s| s.variable == variable && s.name == name);
        statistic.unwrap_or_else(|| panic!("{variable}/{name}")).value
    }

    #[test]
    fn pass_at_k_is_the_share_of_subsets_with_a_right_completion() {
        let values = [true, false, false, true, false];
        for k in 1..=5_usize {
            let subsets = (0_u32..32).filter(|bits| bits.count_ones() as usize == k);
            let hit = |bits: &u32| (0..5).any(|i| (bits >> i) & 1 == 1 && values[i]);
            let (total, hits) = (subsets.clone().count(), subsets.filter(hit).count());
            let expected = hits as f64 / total as f64;
            assert!((pass_at(5, 2, k) - expected).abs() < 1e-12, "{k}");
        }
        assert!((pass_at(4, 0, 4)).abs() < 1e-12 && (pass_at(4, 4, 1) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_best_of_draws_with_replacement_is_the_mean_over_all_of_them() {
        let values = [0.5, -1.0, 2.0];
        let mut sum = 0.0;
        for a in values {
            for b in values {
                sum += f64::max(a, b);
            }
        }
        assert!((best_of(&values, 2) - sum / 9.0).abs() < 1e-12);
        assert!((best_of(&values, 1) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn the_majority_decides_and_the_largest_number_of_samples_is_core() {
        let samples = [
            sample(0, true, "4"),
            sample(0, true, "4"),
            sample(0, false, "5"),
            sample(0, true, "4"),
            sample(1, false, "7"),
            sample(1, false, "7"),
            sample(1, false, "7"),
            sample(1, false, "7"),
        ];
        let statistics = statistics(&samples);
        assert!((value(&statistics, "acc", "mean@4") - 0.375).abs() < 1e-12);
        let majority = value(&statistics, "acc", "maj@4/mean");
        assert!((0.38..0.46).contains(&majority), "{majority}");
        assert!((value(&statistics, "acc", "pass@4") - 0.5).abs() < 1e-12);
        let core: Vec<&str> = statistics.iter().filter(|s| s.core).map(|s| s.name.as_str()).collect();
        assert_eq!(core, ["best@4/mean", "maj@4/mean", "mean@4", "pass@4"]);
        assert!(statistics.iter().all(|s| s.variable == "acc" || !s.core));
    }

    #[test]
    fn a_set_without_a_verdict_is_measured_by_its_reward() {
        let sample = JudgedSample { set: "s".into(), reward: 0.25, ..JudgedSample::default() };
        let statistics = statistics(&[sample]);
        let names: Vec<_> = statistics.iter().map(|s| (s.variable, s.name.as_str(), s.core)).collect();
        assert_eq!(names, [("reward", "mean@1", true)]);
    }

    proptest! {
        #[test]
        fn the_best_is_no_worse_than_the_mean_and_grows_with_draws(
            values in prop::collection::vec(-5.0..5.0f64, 1..20),
        ) {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let best: Vec<f64> = (1..6).map(|k| best_of(&values, k)).collect();
            prop_assert!((best[0] - mean).abs() < 1e-9);
            prop_assert!(best.windows(2).all(|pair| pair[1] >= pair[0] - 1e-12));
        }
    }
}
