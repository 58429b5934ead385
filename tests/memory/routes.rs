//! The table of routes beside the KV cache of a model with experts.

use crate::measure::{Case, requests};
use crate::own_process::in_own_process;
use firebrick::backends::accounts::{Accounts, Category, Home};
use firebrick::backends::allocator;
use firebrick::backends::device::{Backend, DeviceSpec, open};
use firebrick::backends::profile;
use firebrick::engine::plan::MemoryConfig;
use firebrick::engine::plan::estimate::{EstimatePhase, Workload, estimate};
use firebrick::models::cache::KvCache;
use firebrick::models::{Decoder, KvCacheDtype};
use firebrick::sampler::{Generator, SamplingParams, SchedulerConfig};
use serde_json::json;

in_own_process!(the_table_of_routes_takes_the_host_bytes_that_an_estimate_counts);

/// Few heads and many experts: a token's routes take a quarter of what its keys and values do.
fn case() -> Case {
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4,
        "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 16,
        "num_experts_per_tok": 8, "moe_intermediate_size": 16
    });
    Case::new("routes", &config, [70, 30, 16]).sampled(4)
}

fn the_table_of_routes_takes_the_host_bytes_that_an_estimate_counts() {
    let case = case();
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let decoder = Decoder::random(case.arch.clone(), 1, &device);
    let memory = MemoryConfig::default();
    let plan = memory.plans(&case.arch, false, None, case.sequences).expect("a plan");
    // on a GPU the host's bytes are apart from the device's
    let host = |kv_cache_bytes| {
        let workload = Workload { kv_cache_bytes, ..case.workload() };
        let estimate = estimate(&workload, &plan, &profile::assumed(Backend::Cuda));
        let rollout = estimate.phase(EstimatePhase::Rollout).expect("a phase");
        rollout.host_bytes
    };
    let least = SchedulerConfig::new(case.sequences).least_cache_bytes(&case.arch, 100);
    let mut counted = Vec::new();
    for limit in [None, Some(2 * least)] {
        let accounts = Accounts::new();
        let sampling = SamplingParams { max_new_tokens: case.response, ..SamplingParams::default() };
        let limits = SchedulerConfig { kv_cache_bytes: limit, ..SchedulerConfig::new(case.sequences) };
        let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
        let generator = generator.with_accounts(&accounts);
        let ran = generator.run_with(&requests(&case), case.group, &limits, |_| {});
        ran.expect("samples");
        let balance = accounts.balance(Category::KvCache, Home::Host);
        let predicted = host(limit.map(|bytes| bytes as u64)) - host(Some(0));
        assert_eq!(balance.peak_bytes, predicted, "{limit:?}");
        drop(generator);
        assert_eq!(accounts.balance(Category::KvCache, Home::Host).bytes, 0);
        counted.push(predicted);
    }
    assert!(counted[1] > 0 && counted[1] < counted[0], "{counted:?}");
    // and that is what the allocator counts
    let heap = || allocator::heap().expect("the counting allocator").current_bytes;
    let before = heap();
    let cache = KvCache::new(&case.arch, &[1024], KvCacheDtype::Auto, &device);
    let (grew, bytes) = (heap() - before, cache.bytes() + cache.route_bytes());
    assert!(cache.route_bytes() * 4 == cache.bytes(), "a quarter");
    let apart = grew.abs_diff(bytes as u64) as f64;
    assert!(apart < 0.05 * bytes as f64, "{grew} bytes for {bytes} of pools and routes");
}
