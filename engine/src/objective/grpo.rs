//! GRPO (arXiv:2402.03300) with the knobs that its relatives turn: advantages with or without standard deviation,
//! clip-higher, dual clip, KL in the loss, four aggregation modes, entropy bonus.

use super::advantage::{ScaleRewards, grpo};
use super::aggregate::{Denominators, LossAggMode, token_weights};
use super::kl::{KlType, kl_penalty};
use super::policy::{Clip, ppo_clip};
use super::{Loss, Objective, Scores, TokenInputs, TokenLoss, token_mean, weighted};
use crate::rollout::Rollout;
use serde::{Deserialize, Serialize};

/// Settings of GRPO, under verl's names.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// Division of the advantage by the standard deviation: `group`, `batch` or `none`
    /// (TRL's name; verl's `norm_adv_by_std_in_grpo` is `group` or `none`).
    pub scale_rewards: ScaleRewards,
    /// Added to the standard deviation (verl 1e-6, TRL 1e-4).
    pub adv_eps: f64,
    /// ε below 1.
    pub clip_ratio_low: f64,
    /// ε above 1.
    pub clip_ratio_high: f64,
    /// Dual clip; `null` turns it off.
    pub clip_ratio_c: Option<f64>,
    /// How token losses become one number.
    pub loss_agg_mode: LossAggMode,
    /// What `seq-mean-token-sum-norm` divides by. `null`: sequences · longest possible completion (Dr. GRPO, TRL); verl's
    /// own default is the longest possible completion alone.
    pub loss_scale_factor: Option<f64>,
    /// Weight of the KL to the reference policy in the loss (verl's `kl_loss_coef`, TRL's `beta`). 0: no reference model.
    pub kl_loss_coef: f64,
    /// Its estimator.
    pub kl_loss_type: KlType,
    /// Weight of the entropy bonus (verl's `entropy_coeff`).
    pub entropy_coeff: f64,
}

impl Default for GrpoConfig {
    fn default() -> Self {
        Self {
            scale_rewards: ScaleRewards::Group,
            adv_eps: 1e-6,
            clip_ratio_low: 0.2,
            clip_ratio_high: 0.2,
            clip_ratio_c: Some(3.0),
            loss_agg_mode: LossAggMode::TokenMean,
            loss_scale_factor: None,
            kl_loss_coef: 0.0,
            kl_loss_type: KlType::K3,
            entropy_coeff: 0.0,
        }
    }
}

impl GrpoConfig {
    /// Refuses settings that make no sense, by key.
    pub fn check(&self) -> Result<(), String> {
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
        let coefficients = [self.kl_loss_coef, self.adv_eps];
        if coefficients.iter().any(|c| !c.is_finite() || *c < 0.0)
            || !self.entropy_coeff.is_finite()
        {
            return Err(
                "objective: kl_loss_coef and adv_eps should be 0 or more, entropy_coeff a number"
                    .into(),
            );
        }
        Ok(())
    }
}

impl TokenLoss for GrpoConfig {
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let logp = scores.logp.clone();
        let old = inputs
            .old_logp
            .clone()
            .unwrap_or_else(|| logp.clone().inner());
        let clip = Clip {
            low: self.clip_ratio_low,
            high: self.clip_ratio_high,
            dual: self.clip_ratio_c,
        };
        let terms = ppo_clip(clip, logp.clone(), old, inputs.advantage.clone());
        let policy = terms.loss * inputs.weight.clone();
        let mut metrics = vec![
            weighted("actor/pg_loss", policy.clone()),
            token_mean("actor/pg_clipfrac", terms.clipped),
            token_mean("actor/pg_clipfrac_lower", terms.clipped_lower),
            token_mean("actor/ppo_kl", terms.kl),
            token_mean("actor/entropy", scores.entropy.clone()),
        ];
        let mut total = policy.sum();
        if let (true, Some(reference)) = (self.needs_reference(), &inputs.ref_logp) {
            let kl = kl_penalty(self.kl_loss_type, logp, reference.clone()) * inputs.weight.clone();
            metrics.push(weighted("actor/kl_loss", kl.clone()));
            total = total + kl.sum() * self.kl_loss_coef;
        }
        if self.entropy_coeff != 0.0 {
            total =
                total - (scores.entropy.clone() * inputs.weight.clone()).sum() * self.entropy_coeff;
        }
        Loss { total, metrics }
    }
}

impl Objective for GrpoConfig {
    fn credit(&self, rollouts: &mut [Rollout]) {
        let rewards: Vec<f64> = rollouts.iter().map(|r| r.reward).collect();
        let groups: Vec<u64> = rollouts.iter().map(|r| r.draw).collect();
        let advantages = grpo(&rewards, &groups, self.scale_rewards, self.adv_eps);
        for (rollout, advantage) in rollouts.iter_mut().zip(advantages) {
            rollout.advantages = vec![advantage; rollout.completion.len()];
        }
    }

    fn weights(&self, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>> {
        let mut by = Denominators::new(lengths, max_length);
        by.scale = self.loss_scale_factor.unwrap_or(by.sequences * by.scale);
        token_weights(self.loss_agg_mode, lengths, by)
    }

    fn needs_reference(&self) -> bool {
        self.kl_loss_coef != 0.0
    }
}
