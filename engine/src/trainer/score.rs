//! Passes without gradients over a step's rollouts: old log-probs, the reference's, the critic's values.

use super::Trainer;
use super::sequences::{replayed, unmasked};
use crate::Result;
use crate::config::OldLogProbs;
use crate::executor::ResidentModel;
use crate::learner::score_placed;
use crate::rollout::{Rerouted, Rollout};
use crate::sequence::column;

impl Trainer {
    /// The policy's log-probs before the update, and its values where it has a value head: one pass for both.
    pub(super) fn score_old(&self, rollouts: &mut [Rollout]) -> Result<()> {
        let temperature = self.config.rollout.temperature;
        let mut sequences = unmasked(rollouts);
        if self.config.rollout.router_replay {
            sequences = replayed(sequences, rollouts.iter());
        }
        let scored = self.learner.score(&sequences, temperature)?;
        let arch = self.learner.decoder().arch();
        let per_token: Vec<usize> = arch.expert_layers().map(|(_, own)| own.per_token).collect();
        for (rollout, now) in rollouts.iter_mut().zip(&scored.routes) {
            let both = rollout.routes.as_ref().zip(now.as_ref());
            rollout.rerouted = both.map(|(then, now)| Rerouted::between(then, now, &per_token));
        }
        let both = scored.logp.into_iter().zip(scored.values);
        for (rollout, (logp, values)) in rollouts.iter_mut().zip(both) {
            // a policy without a value head has none
            rollout.columns.value = (!values.is_empty()).then(|| column(&values));
            if self.config.update.old_log_probs == OldLogProbs::Trainer {
                rollout.columns.old_logp = Some(column(&logp));
            }
        }
        Ok(())
    }

    /// The log-probs of the reference policy.
    pub(super) fn score_reference(&self, rollouts: &mut [Rollout]) -> Result<()> {
        let scored = match &self.reference {
            Some(reference) => self.log_probs(reference, rollouts)?,
            // adapters are trained: the reference is the policy with them off
            None => {
                let temperature = self.config.rollout.temperature;
                let sequences = unmasked(rollouts);
                self.learner.score_base(&sequences, temperature)?.logp
            }
        };
        for (rollout, logp) in rollouts.iter_mut().zip(scored) {
            rollout.columns.ref_logp = Some(column(&logp));
        }
        Ok(())
    }

    /// Log-probs of the completions under a model, at the training temperature.
    fn log_probs(&self, model: &ResidentModel, rollouts: &[Rollout]) -> Result<Vec<Vec<f32>>> {
        let (runtime, temperature) = (&self.learner.runtime, self.config.rollout.temperature);
        Ok(score_placed(model, runtime, &unmasked(rollouts), temperature)?.logp)
    }

    /// The critic's values of the states that completion tokens were drawn in.
    pub(super) fn score_values(&mut self, rollouts: &mut [Rollout]) -> Result<()> {
        let (critic, _) = self.critic();
        let values = critic.values(&unmasked(rollouts))?;
        for (rollout, values) in rollouts.iter_mut().zip(values) {
            rollout.columns.value = Some(column(&values));
        }
        Ok(())
    }
}
