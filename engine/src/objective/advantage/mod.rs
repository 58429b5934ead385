//! Advantage estimators, on plain slices: one file each.

mod estimator;
mod gae;
mod gpg;
mod groups;
mod grpo;
mod inputs;
mod multi_reward;
mod opo;
mod pass_at_k;
mod reinforce_plus_plus;
mod remax;
mod rloo;
mod whitening;

pub use estimator::{AdvantageEstimator, GroupEstimator};
pub use gae::{Gae, gae};
pub use gpg::gpg;
pub use groups::{ScaleRewards, frac_reward_zero_std, normalized};
pub use grpo::grpo;
pub use inputs::AdvantageInputs;
pub use multi_reward::normalize_then_sum;
pub use opo::opo;
pub use pass_at_k::pass_at_k;
pub use reinforce_plus_plus::{reinforce_plus_plus, reinforce_plus_plus_baseline, returns};
pub use remax::remax;
pub use rloo::{rloo, rloo_vectorized};
pub use whitening::Whitening;

pub(in crate::objective) use groups::mean;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_with_equal_rewards_has_no_advantage_and_is_counted() {
        let rewards = [1.0, 1.0, 0.0, 1.0];
        let groups = [0, 0, 1, 1];
        let advantages = grpo(&rewards, &groups, ScaleRewards::Group, 1e-6);
        assert!(advantages[0].abs() < 1e-12 && advantages[1].abs() < 1e-12);
        assert!(advantages[3] > 0.7 && advantages[2] < -0.7);
        assert!((frac_reward_zero_std(&rewards, &groups) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn groups_need_not_stand_together() {
        let together = grpo(&[1.0, 0.0, 3.0, 5.0], &[7, 7, 9, 9], ScaleRewards::None, 0.0);
        let apart = grpo(&[1.0, 3.0, 0.0, 5.0], &[7, 9, 7, 9], ScaleRewards::None, 0.0);
        let in_order = [together[0], together[2], together[1], together[3]];
        for (a, b) in in_order.iter().zip(&apart) {
            assert!((a - b).abs() < 1e-15, "{in_order:?} {apart:?}");
        }
    }
}
