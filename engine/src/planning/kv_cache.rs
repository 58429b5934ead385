//! Size of the KV cache, from a share of the device's memory.

use crate::config::RolloutConfig;
use crate::{Error, Result};
use firebrick_arch::{Arch, TensorShare};
use firebrick_plan::Plan;
use firebrick_plan::estimate::{EstimatePhase, PhaseEstimate};
use firebrick_plan::planner::Request;
use firebrick_sampler::SchedulerConfig;
use firebrick_spec::Category;

/// Bytes of keys and values if sampling may use `share` of the device's memory within the budget: the share minus the
/// predicted weights, temporaries and overhead of the pools (vLLM's `gpu_memory_utilization`, which profiles them).
///
/// # Errors
/// [`Error::Config`] if the device does not report its memory, or the share leaves nothing.
pub fn cache_bytes_of_share(request: &Request, plan: &Plan, share: f64) -> Result<u64> {
    let Some(capacity) = request.profile.capacity_bytes else {
        return Err(Error::Config(format!(
            "rollout.gpu_memory_utilization is a share of the device's memory, but {} does not report its size; set \
             rollout.kv_cache_memory_bytes",
            request.profile.name
        )));
    };
    let predicted = |bytes: u64| {
        let mut limited = request.clone();
        limited.workload.kv_cache_bytes = Some(bytes);
        let estimate = limited.predict(plan.clone()).estimate;
        let rollout = estimate.phase(EstimatePhase::Rollout);
        rollout.map_or([0, 0], |p: &PhaseEstimate| {
            let overhead = p.categories.get(&Category::Overhead);
            [p.total_bytes, overhead.copied().unwrap_or(0)]
        })
    };
    // includes states of linear attention
    let [total, overhead] = predicted(0);
    let other = total - overhead;
    let of_device = (capacity as f64 * share) as u64;
    let allowed = request.allowed().map_or(of_device, |most| of_device.min(most));
    // pools add their overhead to the cache too
    let pool = request.profile.pool;
    let in_use = (allowed.saturating_sub(pool.fixed_bytes) as f64 / (1.0 + pool.share)) as u64;
    if other >= in_use {
        let used = other + pool.fixed_bytes + (pool.share * other as f64) as u64;
        let raise = match request.budget {
            Some(_) if allowed < of_device => "memory.budget",
            _ => "it",
        };
        return Err(Error::Config(format!(
            "rollout.gpu_memory_utilization={share} allows {allowed} of {capacity} bytes, and weights and temporaries take \
             {used} while sampling; raise {raise}"
        )));
    }
    let bytes = in_use - other;
    // with unified memory, routes grow with the keys and values
    let [total, _] = predicted(bytes);
    let beyond = total.saturating_sub(allowed) as f64;
    Ok((bytes as f64 / (1.0 + beyond / bytes as f64)) as u64)
}

/// Minimum bytes of keys and values of a run: those of one longest sequence.
pub fn least_cache_bytes(config: &RolloutConfig, arch: &Arch, max_num_seqs: usize) -> u64 {
    let longest = config.prompt_length + config.longest_response();
    // a rank caches only its key heads; invalid degrees are rejected elsewhere
    let degree = config.tensor_model_parallel_size.max(1);
    let share = TensorShare::check(arch, degree).map(|()| TensorShare::new(0, degree).arch(arch));
    limits(config, max_num_seqs, None).least_cache_bytes(share.as_ref().unwrap_or(arch), longest) as u64
}

/// Limits of the sampling engine.
///
/// # Errors
/// `Error::Config` if one longest sequence does not fit into the KV cache.
pub fn engine_limits(
    config: &RolloutConfig,
    arch: &Arch,
    max_num_seqs: usize,
    kv_cache_bytes: Option<u64>,
) -> Result<SchedulerConfig> {
    let longest = config.prompt_length + config.longest_response();
    let least = least_cache_bytes(config, arch, max_num_seqs);
    if let Some(bytes) = kv_cache_bytes.filter(|&bytes| bytes < least) {
        return Err(Error::Config(format!(
            "the KV cache is limited to {bytes} bytes, but sequences of {longest} tokens (rollout.prompt_length and \
             rollout.response_length) need at least {least}; raise rollout.kv_cache_memory_bytes or \
             rollout.gpu_memory_utilization, or shorten the sequences"
        )));
    }
    Ok(limits(config, max_num_seqs, kv_cache_bytes))
}

fn limits(config: &RolloutConfig, max_num_seqs: usize, kv_cache_bytes: Option<u64>) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens.max(max_num_seqs),
        max_model_len: config.max_model_len,
        kv_cache_bytes: kv_cache_bytes.map(|bytes| bytes as usize),
        kv_cache_dtype: config.kv_cache_dtype,
        keep_completions: false,
        async_scheduling: config.async_scheduling,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_plan::MemoryConfig;
    use firebrick_plan::estimate::{Parallel, Workload};
    use firebrick_spec::{Backend, DeviceProfile};
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::path::Path;

    /// On a device of 256 MiB whose pool adds nothing.
    fn request() -> Request {
        request_of(&json!({"model_type": "llama"}))
    }

    fn request_of(family: &Value) -> Request {
        let mut config = json!({
            "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2
        });
        let (Value::Object(config), Value::Object(family)) = (&mut config, family) else { unreachable!("objects") };
        config.extend(family.clone());
        let arch = Arch::from_config(config, Path::new("test")).expect("an architecture");
        Request {
            workload: Workload::grpo(arch, [256, 256], 16, 8),
            memory: MemoryConfig::default(),
            max_num_seqs: 128,
            profile: DeviceProfile { capacity_bytes: Some(256 << 20), ..DeviceProfile::assumed(Backend::Cpu) },
            budget: None,
            host_budget: None,
            phase_limits: BTreeMap::new(),
            parallel: Parallel::default(),
            ranks: 1,
        }
    }

    #[test]
    fn the_cache_gets_what_its_share_of_all_memory_leaves_beside_weights_and_temporaries() {
        let mut request = request();
        let plan = request.as_configured().expect("a plan").plan;
        let bytes = cache_bytes_of_share(&request, &plan, 0.75).expect("room");
        request.workload.kv_cache_bytes = Some(bytes);
        let estimate = request.predict(plan.clone()).estimate;
        let rollout = estimate.phase(EstimatePhase::Rollout).expect("a phase");
        assert_eq!(rollout.total_bytes, 192 << 20);
        assert_eq!(rollout.categories[&Category::KvCache], bytes);
        let message = cache_bytes_of_share(&request, &plan, 0.1).expect_err("no room");
        assert!(message.to_string().contains("raise it"), "{message}");
        request.profile.capacity_bytes = None;
        let message = cache_bytes_of_share(&request, &plan, 0.75).expect_err("no capacity");
        let message = message.to_string();
        assert!(message.contains("rollout.kv_cache_memory_bytes"), "{message}");
    }

    #[test]
    fn what_a_gpu_s_pools_add_to_the_cache_is_in_its_share_of_the_memory() {
        let mut request = request();
        request.profile = DeviceProfile { capacity_bytes: Some(1 << 30), ..DeviceProfile::assumed(Backend::Cuda) };
        let plan = request.as_configured().expect("a plan").plan;
        let share = 0.1875;
        let bytes = cache_bytes_of_share(&request, &plan, share).expect("room");
        request.workload.kv_cache_bytes = Some(bytes);
        let estimate = request.predict(plan).estimate;
        let rollout = estimate.phase(EstimatePhase::Rollout).expect("a phase");
        assert_eq!(rollout.categories[&Category::KvCache], bytes);
        let allowed = 192 << 20;
        assert!(rollout.total_bytes <= allowed && rollout.total_bytes > allowed - 4);
    }

    #[test]
    fn a_budget_below_the_share_bounds_the_cache_too() {
        let mut request = request();
        let plan = request.as_configured().expect("a plan").plan;
        let of = |request: &Request| cache_bytes_of_share(request, &plan, 0.75);
        let share = of(&request).expect("room");
        request.memory.margin = 0.5;
        request.budget = Some(320 << 20);
        assert_eq!(of(&request).expect("room"), share - (32 << 20));
        request.budget = Some(1 << 30);
        assert_eq!(of(&request).expect("room"), share);
        request.budget = Some(2 << 20);
        let message = of(&request).expect_err("no room").to_string();
        assert!(message.contains("raise memory.budget"), "{message}");
    }

    #[test]
    fn states_and_routes_are_within_the_share_of_the_memory() {
        let experts = json!({
            "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 32
        });
        let linear = json!({
            "model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32
        });
        for family in [experts, linear] {
            let mut request = request_of(&family);
            let plan = request.as_configured().expect("a plan").plan;
            let bytes = cache_bytes_of_share(&request, &plan, 0.75).expect("room");
            request.workload.kv_cache_bytes = Some(bytes);
            let estimate = request.predict(plan).estimate;
            let rollout = estimate.phase(EstimatePhase::Rollout).expect("a phase");
            assert!(rollout.categories[&Category::KvCache] > bytes, "{family}: {bytes}");
            let (total, allowed) = (rollout.total_bytes, 192 << 20);
            // pools are whole blocks, which routes follow
            assert!(total <= allowed && total > allowed - (1 << 20), "{family}: {total} of {allowed}");
        }
    }
}
