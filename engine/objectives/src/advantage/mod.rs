//! Advantage estimators, on plain slices: one file each.

mod estimator;
mod gae;
mod gpg;
mod groups;
mod grpo;
mod multi_reward;
mod opo;
mod pass_at_k;
mod reinforce_plus_plus;
mod remax;
mod rloo;
mod whitening;

pub use estimator::{AdvantageEstimator, AdvantageInputs, Plain, Scaled};
pub use gae::{Gae, gae};
pub use gpg::gpg;
pub use groups::{ScaleRewards, frac_reward_zero_std, normalized};
pub use grpo::{grpo, grpo_leave_one_out};
pub use multi_reward::normalize_then_sum;
pub use opo::opo;
pub use pass_at_k::pass_at_k;
pub use reinforce_plus_plus::{ReinforcePlusPlus, reinforce_plus_plus, reinforce_plus_plus_baseline, returns};
pub use remax::remax;
pub use rloo::{rloo, rloo_vectorized};
pub use whitening::Whitening;

pub(crate) use groups::mean;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_oneself_mean_and_deviation_are_those_of_nemo_rl() {
        // nemo_rl/algorithms/advantage_estimator.py, `GRPOAdvantageEstimator` on each group
        let rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.2, 0.4, 0.9, 1.0, 0.0, 0.7];
        let groups = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4];
        let spread = 3.0_f64.sqrt() / 3.0 + 1e-6;
        let third = 1.0 / 3.0;
        let expected = [
            1.0,
            -third / spread,
            -third / spread,
            -third / spread,
            2.0 * third / spread,
            2.0 * third / spread,
            -2.0 * third / spread,
            -2.0 * third / spread,
            -1.272_788_606_145_968,
            -0.303_045_151_122_002_25,
            4.242_610_687_331_417,
            1.0,
            -1.0,
            0.0,
        ];
        let actual = grpo_leave_one_out(&rewards, &groups, ScaleRewards::Group, 1e-6);
        for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
            assert!((actual - expected).abs() < 1e-9, "{i}: {actual} for {expected}");
        }
        let plain = grpo_leave_one_out(&rewards[..11], &groups[..11], ScaleRewards::None, 1e-6);
        let undivided = rloo(&rewards[..11], &groups[..11]);
        assert!(plain.iter().zip(undivided).all(|(a, b)| (a - b).abs() < 1e-12), "{plain:?}");
    }

    #[test]
    fn a_group_with_equal_rewards_has_no_advantage_and_is_counted() {
        let rewards = [1.0, 1.0, 0.0, 1.0];
        let groups = [0, 0, 1, 1];
        let advantages = grpo(&rewards, &groups, ScaleRewards::Group, 1e-6);
        assert!(advantages[0].abs() < 1e-12 && advantages[1].abs() < 1e-12);
        assert!(advantages[3] > 0.7 && advantages[2] < -0.7);
        assert!((frac_reward_zero_std(&rewards.map(Some), &groups) - 0.5).abs() < 1e-12);
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
