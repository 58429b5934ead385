//! Settings that make no sense, alone or together, and what to do about them.

use super::advantage::{AdvEstimator, MultiObjectiveAggregation};
use super::aggregate::LossAggMode;
use super::config::ObjectiveConfig;
use super::correction::RolloutIs;
use super::policy::{ImportanceSamplingLevel, PolicyLoss};
use super::rejection::Criteria;

/// Keys, whether something reads them, and what that would be.
type Reader = (&'static [&'static str], bool, &'static str);

impl ObjectiveConfig {
    /// Refuses settings that make no sense, by key.
    pub fn check(&self) -> Result<(), String> {
        self.check_numbers()?;
        self.check_idle()?;
        self.kl_ctrl.check("objective.kl_ctrl")?;
        self.check_together()
    }

    fn check_numbers(&self) -> Result<(), String> {
        let low = (0.0..=1.0).contains(&self.clip_ratio_low);
        if !low || self.clip_ratio_high.is_nan() || self.clip_ratio_high < 0.0 {
            return Err(format!(
                "objective: clip_ratio_low should be in 0..1 and clip_ratio_high at least 0, found {} and {}",
                self.clip_ratio_low, self.clip_ratio_high
            ));
        }
        if self.clip_ratio_c.is_some_and(|c| c.is_nan() || c <= 1.0) {
            return Err(
                "objective.clip_ratio_c should be above 1; null turns the dual clip off".into(),
            );
        }
        if self
            .loss_scale_factor
            .is_some_and(|s| !(s.is_finite() && s > 0.0))
        {
            return Err("objective.loss_scale_factor should be above 0; null takes sequences · longest possible completion".into());
        }
        let positive = [
            ("tau_pos", self.tau_pos),
            ("tau_neg", self.tau_neg),
            ("rollout_is_threshold", self.rollout_is_threshold),
        ];
        let not_negative = [
            ("kl_loss_coef", self.kl_loss_coef),
            ("adv_eps", self.adv_eps),
            ("ppo_kl_coef", self.ppo_kl_coef),
            ("vespo_k_pos", self.vespo_k_pos),
            ("vespo_lambda_pos", self.vespo_lambda_pos),
            ("vespo_k_neg", self.vespo_k_neg),
            ("vespo_lambda_neg", self.vespo_lambda_neg),
            ("entropy_coef_delta", self.entropy_coef_delta),
            (
                "rollout_is_threshold_lower",
                self.rollout_is_threshold_lower.unwrap_or(0.0),
            ),
        ];
        let shares = [
            ("kl_cov_ratio", self.kl_cov_ratio),
            ("clip_cov_ratio", self.clip_cov_ratio),
            ("top_entropy_quantile", self.top_entropy_quantile),
        ];
        if let Some((key, _)) = positive.iter().find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            return Err(format!("objective.{key} should be above 0"));
        }
        if let Some((key, _)) = not_negative
            .iter()
            .find(|(_, v)| !(v.is_finite() && *v >= 0.0))
        {
            return Err(format!("objective.{key} should be 0 or more"));
        }
        if let Some((key, _)) = shares.iter().find(|(_, v)| !(*v > 0.0 && *v <= 1.0)) {
            return Err(format!("objective.{key} should be above 0 and at most 1"));
        }
        for (key, value) in [("gamma", self.gamma), ("lam", self.lam)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!(
                    "objective.{key} is {value}; a number between 0 and 1 was expected"
                ));
            }
        }
        if !self.entropy_coeff.is_finite() {
            return Err("objective.entropy_coeff should be a number".into());
        }
        Ok(())
    }

    /// Refuses a setting that was changed and that nothing reads.
    fn check_idle(&self) -> Result<(), String> {
        let keys = |config: &Self| serde_json::to_value(config).unwrap_or_default();
        let (own, base) = (keys(self), keys(&Self::default()));
        // null turns a thing off, which is never idle
        let changed = |key: &&&str| own[**key] != base[**key] && !own[**key].is_null();
        for (keys, read, with) in self
            .readers_of_rewards()
            .into_iter()
            .chain(self.readers_of_the_loss())
        {
            if let Some(key) = keys.iter().find(changed).filter(|_| !read) {
                return Err(format!("objective.{key} goes with {with}"));
            }
        }
        Ok(())
    }

    /// Settings of advantages, rewards and corrections that not every objective reads.
    fn readers_of_rewards(&self) -> [Reader; 8] {
        let adv = |estimators: &[AdvEstimator]| estimators.contains(&self.adv_estimator);
        [
            (
                &["scale_rewards"],
                adv(&[AdvEstimator::Grpo, AdvEstimator::PassAtK]),
                "objective.adv_estimator: grpo or pass_at_k",
            ),
            (
                &["gamma"],
                adv(&[AdvEstimator::ReinforcePlusPlus, AdvEstimator::Gae]),
                "objective.adv_estimator: reinforce_plus_plus or gae",
            ),
            (
                &["lam"],
                adv(&[AdvEstimator::Gae]),
                "objective.adv_estimator: gae",
            ),
            (
                &["normalize_advantages"],
                !self.adv_estimator.whitens() && !adv(&[AdvEstimator::Remax]),
                "an objective.adv_estimator that gives one advantage a completion and does not normalise them itself",
            ),
            (
                &["kl_ctrl", "kl_penalty"],
                self.use_kl_in_reward,
                "objective.use_kl_in_reward",
            ),
            (
                &[
                    "rollout_is_threshold",
                    "rollout_is_threshold_lower",
                    "rollout_is_batch_normalize",
                ],
                self.rollout_is.is_some(),
                "objective.rollout_is",
            ),
            (
                &["rollout_rs_threshold"],
                self.rollout_rs.is_some(),
                "objective.rollout_rs",
            ),
            (
                &["rollout_rs_threshold_lower"],
                self.rollout_rs.as_ref().is_some_and(Criteria::has_k1),
                "one of the k1 kinds of objective.rollout_rs",
            ),
        ]
    }

    /// Settings of the loss that not every objective reads.
    fn readers_of_the_loss(&self) -> [Reader; 9] {
        let loss = |losses: &[PolicyLoss]| losses.contains(&self.policy_loss);
        [
            (
                &["clip_ratio_low", "clip_ratio_high"],
                loss(&[
                    PolicyLoss::Clip,
                    PolicyLoss::Cispo,
                    PolicyLoss::GeoMean,
                    PolicyLoss::ClipCov,
                ]),
                "an objective.policy_loss that clips: clip, cispo, geo_mean or clip_cov",
            ),
            (
                &["clip_ratio_c"],
                loss(&[PolicyLoss::Clip]),
                "objective.policy_loss: clip",
            ),
            (
                &["tau_pos", "tau_neg"],
                loss(&[PolicyLoss::Sapo]),
                "objective.policy_loss: sapo",
            ),
            (
                &["kl_cov_ratio", "ppo_kl_coef"],
                loss(&[PolicyLoss::KlCov]),
                "objective.policy_loss: kl_cov",
            ),
            (
                &["clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"],
                loss(&[PolicyLoss::ClipCov]),
                "objective.policy_loss: clip_cov",
            ),
            (
                &[
                    "vespo_k_pos",
                    "vespo_lambda_pos",
                    "vespo_k_neg",
                    "vespo_lambda_neg",
                ],
                loss(&[PolicyLoss::Vespo]),
                "objective.policy_loss: vespo",
            ),
            (
                &["loss_scale_factor"],
                self.loss_agg_mode == LossAggMode::SeqMeanTokenSumNorm,
                "objective.loss_agg_mode: seq-mean-token-sum-norm",
            ),
            (
                &["use_bias_correction_kl"],
                self.kl_loss_coef != 0.0,
                "objective.kl_loss_coef above 0",
            ),
            (
                &[
                    "entropy_target",
                    "entropy_coef_min",
                    "entropy_coef_max",
                    "entropy_coef_delta",
                ],
                self.use_adaptive_entropy,
                "objective.use_adaptive_entropy",
            ),
        ]
    }

    fn check_together(&self) -> Result<(), String> {
        let refuse = |reason: &str| Err(format!("objective: {reason}"));
        let by_level = matches!(
            self.policy_loss,
            PolicyLoss::Clip | PolicyLoss::Cispo | PolicyLoss::Sapo
        );
        if self.importance_sampling_level != ImportanceSamplingLevel::Token && !by_level {
            return refuse(
                "importance_sampling_level goes with policy_loss: clip, cispo or sapo; the others have no ratio or one of their own",
            );
        }
        if self.multi_objective_aggregation == MultiObjectiveAggregation::NormalizeThenSum
            && (self.adv_estimator != AdvEstimator::Grpo || self.use_kl_in_reward)
        {
            return refuse(
                "multi_objective_aggregation: normalize_then_sum goes with adv_estimator: grpo and no use_kl_in_reward: it \
                 normalises each reward by itself",
            );
        }
        if self.policy_loss == PolicyLoss::GeoMean && self.top_entropy_quantile < 1.0 {
            return refuse(
                "top_entropy_quantile picks tokens, and policy_loss: geo_mean has one term a sequence; take another of the two",
            );
        }
        if self.policy_loss == PolicyLoss::GeoMean
            && matches!(
                self.adv_estimator,
                AdvEstimator::ReinforcePlusPlus | AdvEstimator::Gae
            )
        {
            return refuse(
                "policy_loss: geo_mean takes one advantage a sequence, and adv_estimator: reinforce_plus_plus and gae give one a \
                 token",
            );
        }
        if self.policy_loss == PolicyLoss::Vespo
            && self.rollout_is.is_some_and(RolloutIs::by_sequence)
        {
            return refuse(
                "policy_loss: vespo multiplies the corrections of a sequence's tokens itself; take rollout_is: token_truncate or \
                 token_mask",
            );
        }
        if self
            .rollout_is_threshold_lower
            .is_some_and(|low| low > self.rollout_is_threshold)
        {
            return refuse("rollout_is_threshold_lower should not exceed rollout_is_threshold");
        }
        if let Err(reason) = self.rejections() {
            return refuse(&reason);
        }
        if self.clip_cov_lb.is_nan()
            || self.clip_cov_ub.is_nan()
            || self.clip_cov_lb > self.clip_cov_ub
        {
            return refuse("clip_cov_lb should not exceed clip_cov_ub");
        }
        let bounds = self.entropy_coef_min..=self.entropy_coef_max;
        if self.use_adaptive_entropy && !bounds.contains(&self.entropy_coeff) {
            return refuse(
                "entropy_coeff is where the adaptive weight starts, and should lie between entropy_coef_min and entropy_coef_max",
            );
        }
        Ok(())
    }
}
