//! `ReMax`: the reward of the greedy completion as baseline (arXiv:2310.10505).

use super::inputs::AdvantageInputs;
use super::reinforce_plus_plus::returns;

/// At every token the rewards from there on less the greedy completion's reward.
#[must_use]
pub fn remax(outcomes: AdvantageInputs<'_>) -> Vec<Vec<f64>> {
    let of = |(rewards, baseline): (&Vec<f64>, &f64)| {
        let own = returns(rewards, 1.0);
        own.iter().map(|r| r - baseline).collect()
    };
    outcomes.rewards.iter().zip(outcomes.baselines).map(of).collect()
}
