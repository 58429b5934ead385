//! `ReMax`: the reward of the greedy completion as baseline (arXiv:2310.10505).

use super::Outcomes;

/// At every token the rewards from there on less the greedy completion's reward.
#[must_use]
pub fn remax(outcomes: Outcomes<'_>) -> Vec<Vec<f64>> {
    let of = |(rewards, baseline): (&Vec<f64>, &f64)| {
        let own = super::returns(rewards, 1.0);
        own.iter().map(|r| r - baseline).collect()
    };
    outcomes
        .rewards
        .iter()
        .zip(outcomes.baselines)
        .map(of)
        .collect()
}
