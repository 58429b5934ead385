//! Checks of a configuration, before anything is loaded.

use super::run::{Matmul, RunConfig};
use super::schema::SCHEMA;
use super::update::OldLogProbs;
use crate::objective::advantage::AdvantageEstimator;
use crate::objective::{Objective, PolicyGradient};
use crate::plan::Zero;
use crate::{Error, Result};
use firebrick_backends::device::Backend;
use firebrick_settings::violations;

impl RunConfig {
    /// Checks the settings, before anything is loaded.
    ///
    /// # Errors
    /// `Error::Config`, the first of [`problems`](Self::problems), with the key, its value and the allowed ones.
    pub fn check(&self) -> Result<()> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// Invalid settings, one error each: violations of the schema, or else contradictions of settings, the first one of
    /// each section.
    pub fn problems(&self) -> Vec<Error> {
        let settings = match serde_json::to_value(self) {
            Ok(settings) => settings,
            // the run folder keeps the configuration as text
            Err(error) => return vec![Error::Config(format!("{error}: rename the file or folder"))],
        };
        let violations = violations(&SCHEMA, &settings);
        if !violations.is_empty() {
            return violations.into_iter().map(|violation| Error::Config(violation.message)).collect();
        }
        if *self != self.clone() {
            return vec![Error::Config("a number of the configuration is NaN".into())];
        }
        let mut checks = vec![self.check_model(), self.check_lora()];
        checks.push(self.rollout.check(self.precision).map_err(Error::Config));
        checks.extend([self.check_matmul(), self.check_sampling(), self.check_exact(), self.check_groups()]);
        checks.push(self.trainer.logger.check(cfg!(feature = "trackio")).map_err(Error::Config));
        match self.objective.build() {
            Ok(objective) => {
                checks.push(self.check_objective(&objective));
                checks.push(self.check_critic(objective.needs().values));
            }
            Err(error) => checks.push(Err(error)),
        }
        checks.extend(self.memory.checks().map(|check| check.map_err(Error::from)));
        checks.push(self.optim.check_schedule("optim", self.trainer.steps));
        for (section, sft) in [("warmup.sft", &self.warmup.sft), ("sft", &self.sft)] {
            if let Some(sft) = sft {
                checks.push(sft.check(section, section == "warmup.sft"));
            }
        }
        checks.into_iter().filter_map(Result::err).collect()
    }

    fn check_model(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(what.to_owned()));
        match (&self.model.path, &self.model.arch) {
            (Some(_), Some(_)) => bad("model: set either `path` or `arch`, not both"),
            (None, None) => bad("model: set `path` (a checkpoint folder) or `arch` (random initialization)"),
            (Some(_), None) if self.model.tokenizer.is_some() => {
                bad("model.tokenizer requires model.arch; a checkpoint at model.path has a tokenizer")
            }
            _ if self.output.as_os_str().is_empty() => bad("output must name the run folder"),
            _ => Ok(()),
        }
    }

    fn check_lora(&self) -> Result<()> {
        let lora = self.model.lora.as_ref();
        lora.map_or(Ok(()), |lora| lora.check(self.model.path.is_some()))?;
        match (self.base(), self.rollout.quantization) {
            (Some(base), Some(_)) => Err(Error::Config(format!(
                "rollout.quantization has no effect with model.lora.base: the sampler already uses the {base} weights; \
                 remove it"
            ))),
            (Some(base), None) if self.memory.zero() == Zero::Stage3 => Err(Error::Config(format!(
                "memory.zero_stage: 3 cannot shard quantized weights (model.lora.base: {base}); use memory.zero_stage: \
                 2"
            ))),
            _ => Ok(()),
        }
    }

    fn check_matmul(&self) -> Result<()> {
        if self.matmul == Matmul::Cublaslt && !self.precision.is_half() {
            return Err(Error::Config(format!(
                "matmul: cublaslt multiplies in half precision, and this run computes in {}; remove it, or set precision: \
                 bf16",
                self.precision
            )));
        }
        Ok(())
    }

    /// Rejects `matmul: cublaslt` on a device that is none of NVIDIA's.
    ///
    /// # Errors
    /// `Error::Config` with the reason.
    pub fn check_matmul_on(&self, backend: Backend) -> Result<()> {
        if self.matmul == Matmul::Cublaslt && backend != Backend::Cuda {
            return Err(Error::Config(format!(
                "matmul: cublaslt is a library for NVIDIA GPUs, and this run's device is {}; remove it, or set device: cuda",
                backend.name()
            )));
        }
        Ok(())
    }

    fn check_sampling(&self) -> Result<()> {
        self.rollout.sampling(Vec::new()).check().map_err(|e| Error::Config(format!("rollout: {e}")))
    }

    /// Rejects an objective that the rest of the run does not support.
    fn check_objective(&self, objective: &PolicyGradient) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("objective: {what}")));
        let best_of_two = matches!(objective.advantages().estimator(), Some(AdvantageEstimator::PassAtK(_)));
        if best_of_two && self.rollout.n < 2 {
            return bad(
                "adv_estimator: pass_at_k compares the two best completions of a prompt; set rollout.n to at least 2",
            );
        }
        let compares = objective.compares_sampler_and_trainer();
        if compares && self.rollout.exact == Some(true) {
            return bad(
                "rollout_is and rollout_rs correct the difference of sampler and trainer, and rollout.exact: true leaves none; \
                 remove one of the two",
            );
        }
        if compares && self.update.old_log_probs == Some(OldLogProbs::Sampler) {
            return bad(
                "rollout_is and rollout_rs compare the trainer's old log-probs with the sampler's; set update.old_log_probs: \
                 trainer",
            );
        }
        Ok(())
    }

    /// Checks that there is a critic if and only if the objective needs one.
    fn check_critic(&self, values: bool) -> Result<()> {
        match &self.critic {
            Some(critic) if values && critic.shared_trunk && !self.memory.critic.is_empty() => Err(Error::Config(
                "memory.critic plans a separate critic, but with critic.shared_trunk: true the critic is part of the \
                     policy; remove it, or use a separate critic"
                    .into(),
            )),
            Some(critic) if values => critic.check(self.trainer.steps),
            None if values => Err(Error::Config(
                "objective.adv_estimator: gae needs a critic; add `critic: {}` for one with default settings".into(),
            )),
            None if self.memory.critic.is_empty() => Ok(()),
            _ => {
                let key = if self.critic.is_some() { "critic" } else { "memory.critic" };
                Err(Error::Config(format!(
                    "{key} requires objective: ppo (objective.adv_estimator: gae); no other objective has a critic"
                )))
            }
        }
    }

    fn check_groups(&self) -> Result<()> {
        let (prompts, mini) = (self.trainer.train_batch_size, self.update.ppo_mini_batch_size);
        match mini {
            Some(mini) if mini > 0 && (mini > prompts || prompts % mini != 0) => Err(Error::Config(format!(
                "update.ppo_mini_batch_size ({mini} prompts) must divide trainer.train_batch_size ({prompts})"
            ))),
            _ => Ok(()),
        }
    }
}
