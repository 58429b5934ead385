//! How many bytes of keys and values a share of the device's memory leaves.

use crate::config::RolloutConfig;
use crate::{Error, Result};
use firebrick_models::generate::SchedulerConfig;
use firebrick_plan::Plan;
use firebrick_plan::estimate::PhaseEstimate;
use firebrick_plan::planner::Request;
use firebrick_spec::{Arch, Category};

/// Bytes of keys and values where everything that is on the device while sampling may have `share` of its memory: what a plan leaves
/// beside weights and temporaries, as predicted (vLLM's `gpu_memory_utilization`, which profiles them).
///
/// # Errors
/// [`Error::Config`] where the device does not report its memory, or the share leaves nothing.
pub fn cache_bytes_of_share(request: &Request, plan: &Plan, share: f64) -> Result<u64> {
    let Some(capacity) = request.profile.capacity_bytes else {
        return Err(Error::Config(format!(
            "rollout.gpu_memory_utilization is a share of the device's memory, and {} does not say how much it has; give \
             rollout.kv_cache_memory_bytes",
            request.profile.name
        )));
    };
    let mut without = request.clone();
    without.workload.kv_cache_bytes = Some(0);
    let estimate = without.predict(plan.clone()).estimate;
    let rollout = estimate.phase("rollout");
    let cache = |p: &PhaseEstimate| p.categories.get(&Category::KvCache).copied().unwrap_or(0);
    let other = rollout.map_or(0, |p| p.total_bytes - cache(p));
    let allowed = (capacity as f64 * share) as u64;
    if other >= allowed {
        return Err(Error::Config(format!(
            "rollout.gpu_memory_utilization={share} allows {allowed} of {capacity} bytes, and weights and temporaries take \
             {other} while sampling; raise it"
        )));
    }
    Ok(allowed - other)
}

/// The engine's limits; refused where one sequence of the longest would not fit.
pub fn engine_limits(
    config: &RolloutConfig,
    arch: &Arch,
    max_num_seqs: usize,
    kv_cache_bytes: Option<u64>,
) -> Result<SchedulerConfig> {
    let longest = config.prompt_length + config.longest_response();
    let limits = SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens.max(max_num_seqs),
        max_model_len: config.max_model_len,
        kv_cache_bytes: kv_cache_bytes.map(|bytes| bytes as usize),
        kv_cache_dtype: config.kv_cache_dtype,
        keep_completions: false,
        async_scheduling: config.async_scheduling,
    };
    let least = limits.least_cache_bytes(arch, longest) as u64;
    if let Some(bytes) = kv_cache_bytes.filter(|&bytes| bytes < least) {
        return Err(Error::Config(format!(
            "the KV cache may have {bytes} bytes, and sequences of {longest} tokens (rollout.prompt_length and \
             rollout.response_length) need at least {least}; raise rollout.kv_cache_memory_bytes or \
             rollout.gpu_memory_utilization, or shorten the sequences"
        )));
    }
    Ok(limits)
}
