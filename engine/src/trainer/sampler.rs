//! The policy as it samples: itself, a rounded copy, or on groups of ranks this rank's share of it; and what sampling
//! may use.

use super::Trainer;
use crate::Result;
use crate::planning::{cache_bytes, engine_limits};
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_models::Decoder;
use firebrick_sampler::SchedulerConfig;

/// A policy that samples, and what it takes beside the one that is trained.
pub(super) struct Sampler {
    pub decoder: Decoder,
    _hold: Option<MemoryGuard>,
}

impl Trainer {
    /// The policy as it samples rollouts: in their precision.
    pub(super) fn rollout_sampler(&self) -> Result<Sampler> {
        self.sampler(self.config.rollout.precision(self.config.precision))
    }

    /// The policy as it samples with the weights that it has, for validation and baselines.
    pub(super) fn own_sampler(&self) -> Result<Sampler> {
        self.sampler(self.config.precision)
    }

    /// The policy in a precision. On groups of ranks it is cut anew from the weights as they are, a unit at a time.
    /// Where ranks share matrices in training and each samples by itself, it is put together.
    fn sampler(&self, precision: Precision) -> Result<Sampler> {
        let model = &self.learner.model;
        let copy = match self.world.tensor_group() {
            Some(group) => model.tensor_shard(&group, precision)?,
            None if model.decoder.share().is_some() => {
                // the whole model on every rank, as one rank samples
                let mut whole = model.assembled(true)?.unwrap_or_else(|| model.decoder.clone());
                whole.move_to(Home::Device)?;
                whole.in_precision(precision)
            }
            None if precision == self.config.precision => {
                return Ok(Sampler { decoder: model.decoder.clone(), _hold: None });
            }
            None => model.decoder.in_precision(precision),
        };
        let accounts = &self.learner.runtime.accounts;
        let bytes = if self.samples_from_trained(precision) { 0 } else { copy.bytes_in(Home::Device) };
        let hold = accounts.hold(Category::Parameters, Home::Device, bytes);
        Ok(Sampler { decoder: copy, _hold: Some(hold) })
    }

    /// Whether ranks that share matrices sample from the very parts that they train, which wait on the device: in the
    /// same groups and the same precision.
    fn samples_from_trained(&self, precision: Precision) -> bool {
        let model = &self.learner.model;
        let group = self.world.tensor_group();
        let same = group.is_some_and(|group| model.decoder.share() == Some(group.share()));
        let here = model.decoder.bytes_in(Home::Host) == 0 && !model.is_shared_out();
        same && here && precision == self.config.precision
    }

    /// What the engine may use under the plan in force, where the policy samples in a precision.
    fn limits_in(&self, precision: Precision) -> Result<SchedulerConfig> {
        let arch = self.learner.decoder().whole_arch();
        let cache = cache_bytes(&self.config, arch, &self.request, &self.plan)?;
        engine_limits(
            &self.config.rollout,
            &arch.clone().in_precision(precision),
            self.plan.rollout.max_num_seqs,
            cache,
        )
    }

    /// The same for rollouts.
    pub(super) fn rollout_limits(&self) -> Result<SchedulerConfig> {
        self.limits_in(self.config.rollout.precision(self.config.precision))
    }

    /// The same for validation and baselines.
    pub(super) fn engine_limits(&self) -> Result<SchedulerConfig> {
        self.limits_in(self.config.precision)
    }
}
