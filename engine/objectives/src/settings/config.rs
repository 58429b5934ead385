//! Settings of the policy-gradient family, under verl's and TRL's names.

use super::algorithm::Algorithm;
use super::kl_control::KlControlConfig;
use super::rollout_rs::{RejectionCriteria, RejectionThresholds};
use crate::advantage::AdvantageEstimator;
use crate::aggregate::LossAggMode;
use crate::correction::RolloutIs;
use crate::kl::KlType;
use crate::policy::PolicyLoss;
use firebrick_settings::{add_choice, flat_choice, schema_of, violations};
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use smart_default::SmartDefault;
use std::sync::LazyLock;

/// The schema of the section.
pub(super) static SCHEMA: LazyLock<Value> = LazyLock::new(schema_of::<ObjectiveConfig>);

/// How several rewards are combined (TRL's `multi_objective_aggregation`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MultiObjectiveAggregation {
    /// Their weighted sum is normalized.
    #[default]
    SumThenNormalize,
    /// Each is normalized in its group, their weighted sum over the step (GDPO).
    NormalizeThenSum,
}

/// The settings of a policy-gradient objective, as a configuration file has them: a name, and every setting that it
/// sets. Keys that are not set have the values of the named algorithm; in code, [`Algorithm::settings`] returns them,
/// and the field `name` by itself sets nothing. [`build`](Self::build) makes a
/// [`PolicyGradient`](crate::PolicyGradient) of them and rejects invalid combinations.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = with_choices)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part of the objective that there is or is not")]
pub struct ObjectiveConfig {
    /// Algorithm that sets all keys that are not given.
    pub name: Algorithm,

    /// The advantage estimator with its settings; in a file, all keys stand beside each other.
    #[serde(flatten, deserialize_with = "flat_choice")]
    #[schemars(skip)]
    pub adv_estimator: AdvantageEstimator,
    /// Added to the standard deviation.
    #[default(1e-6)]
    #[schemars(range(min = 0))]
    pub adv_eps: f64,
    /// How several rewards are combined.
    pub multi_objective_aggregation: MultiObjectiveAggregation,
    /// Subtract `kl_ctrl.kl_coef` · KL to the reference policy from each token's reward.
    pub use_kl_in_reward: bool,
    /// KL estimator of `use_kl_in_reward`; d = logp − reference.
    #[default(KlType::K1)]
    #[schemars(extend("x-with" = "use_kl_in_reward"))]
    pub kl_penalty: KlType,
    /// Coefficient of `use_kl_in_reward`.
    #[schemars(extend("x-with" = "use_kl_in_reward"))]
    pub kl_ctrl: KlControlConfig,
    /// Exclude truncated completions from the loss (DAPO's overlong filtering).
    pub mask_truncated_completions: bool,

    /// The policy loss with its settings; in a file, all keys stand beside each other.
    #[serde(flatten, deserialize_with = "flat_choice")]
    #[schemars(skip)]
    pub policy_loss: PolicyLoss,
    /// Exclude tokens with negative advantages in sequences whose mean of sampler logp − logp is above this, both before
    /// top-k, top-p and min-p. `null`: none.
    pub off_policy_mask_threshold: Option<f64>,
    /// Fraction of tokens, by highest entropy, that policy loss and entropy bonus use.
    #[default(1.0)]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub top_entropy_quantile: f64,

    /// Reduction of the token losses L. Divisors are counted over the whole optimizer step.
    #[default(LossAggMode::TokenMean)]
    pub loss_agg_mode: LossAggMode,
    /// Divisor of `seq-mean-token-sum-norm`. `null`: sequences · `rollout.response_length`.
    #[schemars(extend("exclusiveMinimum" = 0, "x-with" = {"loss_agg_mode": ["seq-mean-token-sum-norm"]}))]
    pub loss_scale_factor: Option<f64>,

    /// Weight of the KL to the reference policy (the policy before the first RL step, or the base model with
    /// `model.lora`) in the loss. 0 loads no reference model, unless `use_kl_in_reward` needs it.
    #[schemars(range(min = 0))]
    pub kl_loss_coef: f64,
    /// KL estimator of the loss; d = logp − reference.
    #[default(KlType::K3)]
    pub kl_loss_type: KlType,
    /// Multiply the KL loss by the ratio, so that `k3` is unbiased off policy.
    #[schemars(extend("x-with" = "kl_loss_coef"))]
    pub use_bias_correction_kl: bool,

    /// Weight of the entropy bonus, or its initial value with `use_adaptive_entropy`.
    pub entropy_coeff: f64,
    /// Raise the entropy weight in each optimizer step while entropy is at or below `entropy_target`; above it, lower
    /// the weight and give no bonus.
    pub use_adaptive_entropy: bool,
    /// Target entropy in nats.
    #[default(0.2)]
    #[schemars(extend("x-with" = "use_adaptive_entropy"))]
    pub entropy_target: f64,
    /// Smallest adaptive entropy weight.
    #[schemars(extend("x-with" = "use_adaptive_entropy"))]
    pub entropy_coef_min: f64,
    /// Largest adaptive entropy weight.
    #[default(1.0)]
    #[schemars(extend("x-with" = "use_adaptive_entropy"))]
    pub entropy_coef_max: f64,
    /// Change of the adaptive entropy weight per optimizer step.
    #[default(0.005)]
    #[schemars(range(min = 0), extend("x-with" = "use_adaptive_entropy"))]
    pub entropy_coef_delta: f64,

    /// Importance weight w = exp(old − sampler) of the policy loss, both before top-k, top-p and min-p; needs
    /// `update.old_log_probs: trainer`. `null`: none.
    pub rollout_is: Option<RolloutIs>,
    /// Upper bound of w (`rollout_is`).
    #[default(2.0)]
    #[schemars(extend("exclusiveMinimum" = 0, "x-with" = "rollout_is"))]
    pub rollout_is_threshold: f64,
    /// Lower bound of w (`rollout_is`). `null`: 0.
    #[schemars(range(min = 0), extend("x-with" = "rollout_is"))]
    pub rollout_is_threshold_lower: Option<f64>,
    /// Divide w (`rollout_is`) by its mean over the step.
    #[schemars(extend("x-with" = "rollout_is"))]
    pub rollout_is_batch_normalize: bool,
    /// Criteria, joined by commas, that exclude tokens or sequences on which sampler and trainer diverge: `token_k1` to
    /// `token_k3`, `seq_sum_k1` to `seq_sum_k3`, `seq_mean_k1` to `seq_mean_k3`, `seq_max_k2`, `seq_max_k3`. `null`:
    /// none.
    pub rollout_rs: Option<RejectionCriteria>,
    /// Largest divergence, one for all criteria or one each. For `k1` criteria the largest ratio, or both bounds:
    /// `"0.5_2,0.1"`.
    #[schemars(extend("x-with" = "rollout_rs"))]
    pub rollout_rs_threshold: Option<RejectionThresholds>,
    /// Smallest ratio of `k1` criteria. `null`: 1 / `rollout_rs_threshold`.
    #[schemars(extend("x-with" = "rollout_rs"))]
    pub rollout_rs_threshold_lower: Option<f64>,
}

/// The keys of the choices after the name, and no others than those of the schema.
fn with_choices(schema: &mut Schema) {
    add_choice::<AdvantageEstimator>(schema, "name");
    add_choice::<PolicyLoss>(schema, "mask_truncated_completions");
    schema.insert("additionalProperties".to_owned(), false.into());
}

impl ObjectiveConfig {
    /// Adds the algorithm's effective settings as defaults to those of a section. `grpo` is short for `{name: grpo}`, and
    /// a section without a name is GRPO's. An unknown name is left for the parser.
    pub fn expand(section: &mut Value) {
        Self::name_section(section);
        let Some(map) = section.as_object_mut() else { return };
        let Ok(algorithm) = Algorithm::deserialize(&map["name"]) else { return };
        let mut defaults = algorithm.changes();
        defaults.retain(|key, _| !map.contains_key(key));
        map.extend(defaults.clone());
        let unread = violations(&SCHEMA, section)
            .into_iter()
            .map(|violation| violation.pointer.trim_start_matches('/').to_owned());
        let unread: Vec<String> = unread.filter(|key| defaults.contains_key(key)).collect();
        section.as_object_mut().into_iter().for_each(|map| map.retain(|key, _| !unread.contains(key)));
    }

    /// Writes a name alone as a section, and the default name into a section without one.
    pub fn name_section(section: &mut Value) {
        match section {
            Value::String(_) => *section = json!({"name": section.take()}),
            Value::Object(map) => {
                map.entry("name").or_insert_with(|| "grpo".into());
            }
            _ => {}
        }
    }
}

impl Algorithm {
    /// The paper's settings of the algorithm, with GRPO's defaults for the rest.
    pub fn settings(self) -> ObjectiveConfig {
        let settings = ObjectiveConfig::deserialize(Value::Object(self.changes()));
        ObjectiveConfig { name: self, ..settings.expect("the keys of an algorithm are settings of an objective") }
    }
}

impl From<Algorithm> for ObjectiveConfig {
    /// [`Algorithm::settings`].
    fn from(algorithm: Algorithm) -> Self {
        algorithm.settings()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_an_algorithm_that_have_no_effect_beside_those_written_are_left_out() {
        let mut section = json!({"name": "rloo", "policy_loss": "reinforce"});
        ObjectiveConfig::expand(&mut section);
        // null turns something off, and is never refused
        let expected = json!({
            "name": "rloo", "policy_loss": "reinforce", "adv_estimator": "rloo", "clip_ratio_c": null,
            "loss_agg_mode": "seq-mean-token-mean"
        });
        assert_eq!(section, expected);
        let mut written = json!("grpo");
        ObjectiveConfig::expand(&mut written);
        assert_eq!(written, json!({"name": "grpo"}));
    }

    #[test]
    fn settings_are_read_as_they_are_written() {
        for algorithm in Algorithm::ALL {
            let mut written = serde_json::to_value(algorithm.settings()).expect("keys");
            ObjectiveConfig::expand(&mut written);
            let read: ObjectiveConfig = serde_json::from_value(written).expect("settings");
            assert_eq!(read, algorithm.settings());
        }
    }
}
