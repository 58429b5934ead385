//! The interface between the trainer and an algorithm.

use super::coefficients::AdaptiveCoefficients;
use super::loss_sums::{LossSums, MicroScores};
use super::token_loss::TokenLoss;
use crate::rollout::Rollout;
use crate::sequence::Sequence;

/// What an objective wants to know beyond rewards; each costs a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "each is a pass that there is or is not"
)]
pub struct Needs {
    /// Log-probs under a reference policy.
    pub reference: bool,
    /// The reward of a greedy completion of every prompt.
    pub greedy: bool,
    /// A critic's value of every token; and the critic learns from what the tokens turned out to be worth.
    pub values: bool,
    /// Scores of a whole optimizer step under the current policy before its first backward, because something is chosen
    /// out of the whole step: so the choice does not depend on how the step is cut.
    pub scores: bool,
    /// Gradients of the entropy.
    pub entropy: bool,
}

/// What an optimizer step is made of, before its first backward.
#[derive(Debug)]
pub struct OptimizerStep<'a> {
    /// Its sequences. Their advantages, log-probs and corrections are there; weights and choices are filled in.
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

/// An algorithm, in the order in which a training step calls it: what it needs, the advantages, then for every optimizer step
/// what is fixed before the first backward, the loss ([`TokenLoss`]), and the update of its adaptive coefficients.
pub trait Objective: TokenLoss + Send + Sync {
    /// What it wants to know beyond rewards.
    fn needs(&self) -> Needs;

    /// Fills in the advantages, masks and corrections of a training step's rollouts, and says what to report. Rollouts of
    /// one prompt have the same `draw`.
    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)>;

    /// Fixes everything of an optimizer step that its tokens share: weights with their normalisers, and choices out of the
    /// whole step.
    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients);

    /// Moves coefficients that follow a measurement, after an optimizer step.
    fn update_coefficients(&self, _sums: &LossSums, _controls: &mut AdaptiveCoefficients) {}
}
