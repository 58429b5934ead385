//! `ReMax`: the reward of the greedy completion as baseline (arXiv:2310.10505).

use super::estimator::AdvantageInputs;
use super::reinforce_plus_plus::returns;

/// At every token the rewards from there on less the greedy completion's reward.
pub fn remax(outcomes: AdvantageInputs<'_>) -> Vec<Vec<f64>> {
    let relative = |(rewards, baseline): (&Vec<f64>, &f64)| {
        let rewards_to_go = returns(rewards, 1.0);
        rewards_to_go.iter().map(|r| r - baseline).collect()
    };
    outcomes.rewards.iter().zip(outcomes.baselines).map(relative).collect()
}
