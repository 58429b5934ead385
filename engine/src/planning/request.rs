//! The planner's question for a configuration.

use super::kv_cache::{cache_bytes_of_share, least_cache_bytes};
use super::workload::{rl_workload, sft_workload, warm_up};
use crate::config::{Mode, RunConfig, sft_of};
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_plan::estimate::{Parallel, Workload};
use firebrick_plan::planner::Request;
use firebrick_plan::size::Budget;
use firebrick_spec::DeviceProfile;

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
            Some((_, sft)) if mode == Mode::Sft => sft_workload(config, &sft, arch)?,
            supervised => Workload {
                warm_up: supervised.map(|(_, sft)| warm_up(config, &sft, arch)),
                ..rl_workload(config, arch)?
            },
        },
        memory: config.memory.clone(),
        max_num_seqs: config.rollout.max_num_seqs,
        profile,
        budget,
        host_budget: config.memory.host_budget.map(|b| b.0),
        parallel: sharing_models(config),
        ranks: 1,
    })
}

/// As many devices as share matrices, in training or while they sample, or layers, where several do.
fn sharing_models(config: &RunConfig) -> Parallel {
    let tensor = config.memory.tensor_model_parallel_size.max(1) as u64;
    let together = config.rollout.tensor_model_parallel_size.max(1) as u64;
    Parallel {
        data: together.div_ceil(tensor),
        tensor,
        pipeline: config.memory.pipeline_model_parallel_size.max(1) as u64,
        rollout_tensor: Some(together).filter(|&n| n != tensor),
        ..Parallel::default()
    }
}

/// The request of a configuration whose budget may be `auto`: `free` is what the device has free, where that is known.
/// Where the cache is a share of the device, it is what the settings as written leave;
/// [`resolve_kv_cache`](super::resolve_kv_cache) makes it what a plan does.
///
/// # Errors
/// `Error::Config` for `memory.budget: auto` on a device that says of no free memory, and for a share of it that leaves
/// nothing for the cache; those of what the request reads: the reward models' folders, the plans of models, settings of
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
    let mut this = request_within(config, mode, arch, profile, budget)?;
    if let Some(share) = config.rollout.gpu_memory_utilization {
        let plan = this.as_configured()?.plan;
        let written = cache_bytes_of_share(&this, &plan, share);
        // the plan that is taken may be a cheaper one, which leaves something where the settings as written leave
        // nothing
        let is_taken = budget.is_none() && config.memory.plan.is_none();
        let least = || least_cache_bytes(&config.rollout, arch, this.max_num_seqs);
        this.workload.kv_cache_bytes = Some(match written {
            Ok(bytes) if is_taken => bytes,
            Ok(bytes) => bytes.max(least()),
            Err(_) if !is_taken => least(),
            Err(error) => return Err(error),
        });
    }
    Ok(this)
}
