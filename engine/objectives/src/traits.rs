//! The interface between the trainer and an algorithm.

use super::aggregate::LossAggMode;
use super::coefficients::AdaptiveCoefficients;
use super::loss_sums::{LossSums, MicroScores};
use super::token_loss::TokenLoss;
use firebrick_core::rollout::Rollout;
use firebrick_core::sequence::Sequence;

/// Inputs that an objective needs beyond rewards; each costs a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a pass that there is or is not")]
pub struct Needs {
    /// Log-probs under a reference policy.
    pub reference: bool,
    /// The reward of a greedy completion of every prompt.
    pub greedy: bool,
    /// A critic's value of every token. The critic is trained on the returns that the objective computes.
    pub values: bool,
    /// Scores of a whole optimizer step under the current policy before its first backward, for objectives that choose
    /// tokens out of the whole step: so the choice does not depend on how the batch was cut.
    pub scores: bool,
    /// Gradients of the entropy.
    pub entropy: bool,
}

/// An optimizer step before its first backward.
#[derive(Debug)]
pub struct OptimizerStep<'a> {
    /// Its sequences, with advantages, log-probs and corrections. [`Objective::prepare`] fills in weights and choices.
    pub sequences: &'a mut [Sequence],
    /// Longest possible completion.
    pub max_length: usize,
    /// The current policy's scores of the sequences, where [`Needs::scores`] asks for them.
    pub scores: Option<&'a MicroScores>,
    /// The run's seed.
    pub seed: u64,
    /// Optimizer steps before it.
    pub step: u64,
}

/// An algorithm, with methods in the order of a training step: its needed inputs, the advantages, then for every
/// optimizer step the values that are fixed before the first backward, the loss ([`TokenLoss`]), and the update of its
/// adaptive coefficients.
///
/// This crate implements [`PolicyGradient`](super::PolicyGradient). Other algorithms implement [`TokenLoss`] and this
/// trait; only the conversion of rewards to advantages has no default:
///
/// ```
/// use firebrick_objectives::{
///     AdaptiveCoefficients, Loss, Metric, Objective, Scores, TokenInputs, TokenLoss,
/// };
/// use firebrick_core::rollout::Rollout;
///
/// /// REINFORCE with the mean reward of the step as baseline.
/// struct Reinforce;
///
/// impl TokenLoss for Reinforce {
///     fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
///         let advantage = inputs.advantage() * inputs.weight();
///         let loss = scores.logp.clone().neg() * advantage;
///         Loss {
///             metrics: vec![Metric::weighted_sum("actor/pg_loss", loss.clone())],
///             total: loss.sum(),
///         }
///     }
/// }
///
/// impl Objective for Reinforce {
///     fn compute_advantages(
///         &self,
///         rollouts: &mut [Rollout],
///         _: &mut AdaptiveCoefficients,
///     ) -> Vec<(String, f64)> {
///         // a rollout to which no reward applies is not trained on, regardless of its columns
///         let rewards: Vec<f64> = rollouts.iter().filter_map(|r| r.reward).collect();
///         let mean = rewards.iter().sum::<f64>() / rewards.len().max(1) as f64;
///         for rollout in rollouts.iter_mut() {
///             let tokens = rollout.completion.len();
///             let reward = rollout.reward.unwrap_or(mean);
///             rollout.mask = vec![true; tokens];
///             rollout.columns.advantage = Some(vec![reward - mean; tokens]);
///             rollout.penalized_reward = reward;
///         }
///         vec![("reinforce/baseline".into(), mean)]
///     }
/// }
///
/// let objective: Box<dyn Objective> = Box::new(Reinforce);
/// assert!(objective.separates() && !objective.needs().reference);
/// ```
pub trait Objective: TokenLoss + Send + Sync {
    /// Inputs that it needs beyond rewards; each costs a pass. By default nothing.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Computes the advantages of a training step's rollouts, and returns metrics: names and values. Rollouts of one
    /// prompt have the same `prompt_index`.
    ///
    /// For every rollout it fills in `mask` (which completion tokens are scored), `penalized_reward` (the reward that
    /// metrics report) and columns of its completion tokens: `advantage`; `returns` too where [`Needs::values`] is set;
    /// and `correction` where the policy loss is corrected.
    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)>;

    /// Fixes everything of an optimizer step that its tokens share: weights with their normalisers, and choices out of
    /// the whole step. By default the loss is a mean over the step's scored tokens.
    fn prepare(&self, step: &mut OptimizerStep<'_>, _coefficients: &mut AdaptiveCoefficients) {
        step.set_weights(LossAggMode::TokenMean);
    }

    /// Moves coefficients that follow a measurement, after an optimizer step; `sums` are the loss and its metrics. By
    /// default nothing moves. Coefficients are part of checkpoints; those of another objective go into
    /// [`AdaptiveCoefficients::custom`].
    fn update_coefficients(&self, _sums: &LossSums, _coefficients: &mut AdaptiveCoefficients) {}
}
