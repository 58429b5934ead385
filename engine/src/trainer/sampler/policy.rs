//! The policy as it samples: itself, a rounded copy, or on groups of ranks this rank's share of it.

use super::super::recovery::Recovery;
use crate::Result;
use crate::planning::{cache_bytes, engine_limits};
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_models::Decoder;
use firebrick_sampler::SchedulerConfig;

/// A policy that samples, what it may use, and what it takes beside the one that is trained.
pub(in crate::trainer) struct SamplingPolicy {
    pub decoder: Decoder,
    pub limits: SchedulerConfig,
    _hold: Option<MemoryGuard>,
}

impl SamplingPolicy {
    /// The policy as it samples rollouts: in their precision.
    pub fn of_rollouts(run: &Recovery) -> Result<Self> {
        let config = &run.session.config;
        Self::new(run, config.rollout.precision(config.precision))
    }

    /// The policy as it samples with the weights that it has, for validation and baselines.
    pub fn as_trained(run: &Recovery) -> Result<Self> {
        Self::new(run, run.session.config.precision)
    }

    /// The policy in a precision, and what the plan in force leaves it. On groups of ranks it is cut anew from the
    /// weights as they are, a unit at a time. Where ranks share matrices in training and each samples by itself, it is
    /// put together.
    fn new(run: &Recovery, precision: Precision) -> Result<Self> {
        let (session, policy, planned) = (&run.session, &run.models.policy, &run.planned);
        let (model, config) = (&policy.model, &session.config);
        let arch = policy.decoder().whole_arch();
        let cache = cache_bytes(config, arch, &planned.request, &planned.plan)?;
        let sampled = arch.clone().in_precision(precision);
        let limits = engine_limits(&config.rollout, &sampled, planned.plan.rollout.max_num_seqs, cache)?;
        let decoder = match session.world.tensor_group() {
            Some(group) => model.tensor_shard(&group, precision)?,
            None if model.decoder.share().is_some() => {
                // the whole model on every rank, as one rank samples
                let mut whole = model.assembled(true)?.unwrap_or_else(|| model.decoder.clone());
                whole.move_to(Home::Device)?;
                whole.in_precision(precision)
            }
            None if precision == config.precision => {
                return Ok(Self { decoder: model.decoder.clone(), limits, _hold: None });
            }
            None => model.decoder.in_precision(precision),
        };
        let bytes = if samples_from_trained(run, precision) { 0 } else { decoder.bytes_in(Home::Device) };
        let hold = policy.runtime.accounts.hold(Category::Parameters, Home::Device, bytes);
        Ok(Self { decoder, limits, _hold: Some(hold) })
    }
}

/// Whether ranks that share matrices sample from the very parts that they train, which wait on the device: in the same
/// groups and the same precision.
fn samples_from_trained(run: &Recovery, precision: Precision) -> bool {
    let model = &run.models.policy.model;
    let group = run.session.world.tensor_group();
    let same = group.is_some_and(|group| model.decoder.share() == Some(group.share()));
    let here = model.decoder.bytes_in(Home::Host) == 0 && !model.is_shared_out();
    same && here && precision == run.session.config.precision
}
