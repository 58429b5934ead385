//! `ReMax`: the reward of the greedy completion as baseline (arXiv:2310.10505).

use super::Outcomes;

/// At every token the rewards from there on less the greedy completion's reward.
#[must_use]
pub fn remax(outcomes: Outcomes<'_>) -> Vec<Vec<f64>> {
    let of = |(i, rewards): (usize, &Vec<f64>)| {
        let own = super::returns(rewards, &outcomes.masks[i], 1.0);
        own.iter().map(|r| r - outcomes.baselines[i]).collect()
    };
    outcomes.rewards.iter().enumerate().map(of).collect()
}
