//! The planner's request for a configuration.

use super::kv_cache::{cache_bytes_of_share, least_cache_bytes};
use super::workload::{rl_workload, sft_workload, warm_up};
use crate::config::{Mode, RunConfig, sft_of};
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_plan::estimate::{Parallel, Workload};
use firebrick_plan::planner::Request;
use firebrick_plan::size::Budget;
use firebrick_spec::DeviceProfile;
use std::collections::BTreeMap;

/// The request of a configuration in one of its modes. `budget` in bytes; `None` sets no limit.
pub(super) fn request_within(
    config: &RunConfig,
    mode: Mode,
    arch: &Arch,
    profile: DeviceProfile,
    budget: Option<u64>,
) -> Result<Request> {
    Ok(Request {
        workload: match sft_of(config, mode)? {
            Some((_, sft)) if mode == Mode::Sft => sft_workload(config, &sft, arch, profile.backend)?,
            supervised => Workload {
                warm_up: supervised.map(|(_, sft)| warm_up(config, &sft, arch)),
                ..rl_workload(config, arch, profile.backend)?
            },
        },
        memory: config.memory.clone(),
        max_num_seqs: config.rollout.max_num_seqs,
        profile,
        budget,
        host_budget: config.memory.host_budget.map(|b| b.0),
        phase_limits: BTreeMap::new(),
        parallel: model_parallel(config),
        ranks: 1,
    })
}

/// The fewest devices of the configured tensor and pipeline parallelism.
fn model_parallel(config: &RunConfig) -> Parallel {
    let tensor = config.memory.tensor_model_parallel_size.max(1) as u64;
    let sampling = config.rollout.tensor_model_parallel_size.max(1) as u64;
    Parallel {
        data: sampling.div_ceil(tensor),
        tensor,
        pipeline: config.memory.pipeline_model_parallel_size.max(1) as u64,
        rollout_tensor: Some(sampling).filter(|&degree| degree != tensor),
        ..Parallel::default()
    }
}

/// The request of a configuration whose budget may be `auto`: `free` are the free bytes of the device, if known. A KV
/// cache given as a share of the device is the one that the configured settings leave;
/// [`cache_bytes`](super::cache_bytes) is the one that a plan leaves.
///
/// # Errors
/// `Error::Config` for `memory.budget: auto` on a device that does not report its free memory, and for a share of it
/// that leaves nothing for the cache; those of the reward models' folders, the plans of models and settings of
/// supervised training.
pub fn request(
    config: &RunConfig,
    mode: Mode,
    arch: &Arch,
    profile: DeviceProfile,
    free: Option<u64>,
) -> Result<Request> {
    let budget = match (config.memory.budget, free) {
        (None, _) => None,
        (Some(Budget::Bytes(bytes)), _) => Some(bytes.0),
        (Some(Budget::Auto), Some(free)) => Some(free),
        (Some(Budget::Auto), None) => {
            return Err(Error::Config(format!(
                "memory.budget is auto, but {} does not report its free memory; set a size, as in memory.budget=8GiB",
                profile.name
            )));
        }
    };
    let mut request = request_within(config, mode, arch, profile, budget)?;
    if let Some(share) = config.rollout.gpu_memory_utilization {
        let plan = request.as_configured()?.plan;
        let bytes = cache_bytes_of_share(&request, &plan, share);
        // another, cheaper plan may leave more than the configured settings
        let is_final = budget.is_none() && config.memory.plan.is_none();
        let least = || least_cache_bytes(&config.rollout, arch, request.max_num_seqs);
        request.workload.kv_cache_bytes = Some(if is_final { bytes? } else { bytes.unwrap_or(0).max(least()) });
    }
    Ok(request)
}
