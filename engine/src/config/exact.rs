//! `rollout.exact`: settings, models and devices with which the sampler's log-probs are the trainer's to the bit.

use super::run::RunConfig;
use super::update::OldLogProbs;
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_arch::arch::{Rope, RopeScaling};
use firebrick_backends::device::Backend;
use firebrick_models::KvCacheDtype;

impl RunConfig {
    /// True if the sampler's log-probs of an RL run are the trainer's to the bit: `rollout.exact`, by default if it
    /// costs nothing, which is in f32 on the CPU.
    pub fn is_exact(&self, backend: Backend, arch: &Arch) -> bool {
        let corrects = || self.objective.build().is_ok_and(|objective| objective.compares_sampler_and_trainer());
        self.rollout.exact.unwrap_or_else(|| {
            backend == Backend::Cpu
                && self.inexact_on(backend).is_none()
                && self.inexact_setting().is_none()
                && inexact_model(arch).is_none()
                // token by token where training takes chunks
                && arch.delta_net.is_none()
                && !corrects()
        })
    }

    /// Source of the old log-probs: by default the sampler if its log-probs are the trainer's to the bit.
    pub fn old_log_probs(&self, backend: Backend, arch: &Arch) -> OldLogProbs {
        let exact = || self.is_exact(backend, arch);
        self.update.old_log_probs.unwrap_or_else(|| if exact() { OldLogProbs::Sampler } else { OldLogProbs::Trainer })
    }

    /// Rejects `rollout.exact: true` with a setting that prevents it.
    pub(super) fn check_exact(&self) -> Result<()> {
        self.refuse_exact(
            self.inexact_setting().map(|key| {
                format!("makes sampling round as training does, and {key} changes that; remove one of the two")
            }),
        )
    }

    /// Rejects `rollout.exact: true` with a model that prevents it.
    pub(crate) fn check_exact_for(&self, arch: &Arch) -> Result<()> {
        self.refuse_exact(inexact_model(arch).map(|why| format!("is not built for {why}; remove the key")))
    }

    /// Rejects `rollout.exact: true` on a device that prevents it.
    ///
    /// # Errors
    /// `Error::Config` with the reason.
    pub fn check_exact_on(&self, backend: Backend) -> Result<()> {
        self.refuse_exact(self.inexact_on(backend))
    }

    fn refuse_exact(&self, why: Option<String>) -> Result<()> {
        match why.filter(|_| self.rollout.exact == Some(true)) {
            Some(why) => Err(Error::Config(format!("rollout.exact: true {why}"))),
            None => Ok(()),
        }
    }

    /// A setting that makes sampler and trainer round differently.
    fn inexact_setting(&self) -> Option<&'static str> {
        let Self { rollout, memory, .. } = self;
        let settings = [
            (rollout.precision(self.precision) != self.precision, "rollout.precision"),
            (rollout.quantization.is_some(), "rollout.quantization"),
            (rollout.kv_cache_dtype != KvCacheDtype::Auto, "rollout.kv_cache_dtype"),
            (rollout.tensor_model_parallel_size > 1, "rollout.tensor_model_parallel_size"),
            // which joins matrices on GPUs
            (rollout.pack_weights == Some(true) && self.precision.is_half(), "rollout.pack_weights"),
            (self.base().is_some(), "model.lora.base"),
            (memory.tensor_model_parallel_size > 1, "memory.tensor_model_parallel_size"),
            (memory.ulysses_sequence_parallel_size > 1, "memory.ulysses_sequence_parallel_size"),
        ];
        settings.into_iter().find_map(|(prevents, key)| prevents.then_some(key))
    }

    /// Reason why exact log-probs are not built for a device.
    fn inexact_on(&self, backend: Backend) -> Option<String> {
        let sampled = self.rollout.precision(self.precision);
        (sampled.is_half() && backend == Backend::Cpu).then(|| {
            format!(
                "needs f32 on the CPU, or a GPU; this run samples in {sampled} on {}, and log-probs then depend on the batch \
                 in their last digits; remove rollout.exact",
                backend.name()
            )
        })
    }
}

/// Property of a model for which exact log-probs are not built on any device.
fn inexact_model(arch: &Arch) -> Option<&'static str> {
    let grows = |rope: &Rope| matches!(rope.scaling, RopeScaling::Dynamic { .. });
    let grow = arch.ropes.iter().flatten().any(grows);
    grow.then_some("rope_type: dynamic, whose angles depend on the longest sequence of a batch")
}
