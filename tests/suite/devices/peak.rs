//! What is known of a GPU's memory without waiting for it: the pools at segment boundaries and in between, the driver's
//! own count, and settings that bound what the pools reserve.

use burn::tensor::{Device, Tensor};
use firebrick_backends::accounts::Home;
use firebrick_backends::device::{Backend, open};
use firebrick_backends::driver_memory::DriverMemory;
use firebrick_backends::memory::{free_bytes, read, read_pools};
use firebrick_backends::profile;
use firebrick_engine::Error;
use firebrick_engine::config::parse;
use firebrick_engine::executor::{BoundaryKind, BoundaryLog, PoolPeak, Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::MemoryConfig;
use firebrick_engine::plan::estimate::{Parallel, Workload};
use firebrick_engine::plan::planner::Request;
use firebrick_engine::planning::cache_bytes_of_share;
use firebrick_engine::trainer::Trainer;
use firebrick_models::Decoder;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{GenerationRequest, Generator, SamplingParams, SchedulerConfig};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use super::memory::{arch, rows};
use super::training::{TRAINING, name};
use super::{backend, on_gpus};
use crate::support::report;

on_gpus!(
    a_reading_of_the_pools_does_not_wait_for_the_device,
    the_peak_of_an_update_is_what_lives_at_once_and_recomputing_lowers_it,
    what_lives_between_two_boundaries_counts_against_the_limit,
    a_run_says_what_its_phases_took_at_most_and_gives_free_pages_back,
    weights_and_cache_stay_within_the_share_that_sampling_may_have,
    the_driver_counts_what_the_pools_have_reserved,
);

fn a_reading_of_the_pools_does_not_wait_for_the_device(device: &Device) {
    let size = 256;
    let x = Tensor::<2>::ones([size, size], device);
    let work = || (0..8).fold(x.clone(), |y, _| y.matmul(x.clone()) / size as f32);
    let measure = || {
        let result = work();
        let started = Instant::now();
        let reading = read_pools(device).expect("pools");
        let took = started.elapsed();
        device.sync().expect("a device that works");
        let waited = started.elapsed();
        let after = read_pools(device).expect("pools");
        drop(result);
        // the count is that of what was submitted: waiting frees no tensor
        let tensor = (size * size * 4) as u64;
        assert!(reading.in_use_bytes < after.in_use_bytes + tensor);
        assert!(after.in_use_bytes < reading.in_use_bytes + tensor);
        (took, waited)
    };
    // kernels are compiled at their first use
    let _ = measure();
    let (took, waited) = (0..3).map(|_| measure()).min().expect("three");
    report(&format!("a reading of the pools took {took:?}, the work before it {waited:?}"));
    assert!(2 * took < waited, "{took:?} of {waited:?}");
}

/// Bytes of the second update of a model.
struct Taken {
    /// Most in use, without what was there before.
    most: u64,
    /// In use at the end, without what was there before.
    end: u64,
}

fn update(memory: &MemoryConfig, device: &Device) -> Taken {
    let plan = memory.plan(&arch()).expect("a plan");
    let runtime = Runtime::new(device).with_prefetch(plan.prefetch);
    runtime.forget_graphs();
    let before = read(device).in_use_bytes;
    let log = BoundaryLog::new(&runtime.accounts, None);
    let runtime = runtime.with_log(Arc::clone(&log));
    let decoder = Decoder::random(arch(), 1, device);
    let mut learner = Learner::new(decoder, plan, OptimConfig::default(), runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    for step in 1..=2 {
        log.begin_step(step, true);
        log.begin_phase(step, "update_actor", read_pools(device));
        learner.update(&rows(), 1.0, &Nll, 1e-4).expect("an update");
    }
    let end = read(device).in_use_bytes - before;
    let PoolPeak { in_use_bytes, reserved_bytes } = log.pool_peak().expect("the pools were read");
    assert!(in_use_bytes <= reserved_bytes);
    let found = log.rows();
    let own = found.rows.iter().filter(|(row, _)| row.moment.step == 2);
    let mut most_alive = 0;
    for (row, held) in own {
        let reading = row.reading.expect("every boundary is read");
        let on_device = found.accounts.iter().zip(held);
        let on_device = on_device.filter(|(account, _)| account.home == Home::Device);
        let alive: u64 = on_device.map(|(_, bytes)| bytes).sum();
        most_alive = most_alive.max(alive);
        let (used, place) = (reading.in_use_bytes - before, row.moment.boundary);
        assert!(alive <= used, "{alive} of {used} bytes at {place:?}");
        assert!(reading.in_use_bytes <= reading.peak_bytes.expect("a peak so far"));
    }
    let most = in_use_bytes - before;
    assert!(most_alive > 0 && most_alive <= most, "{most_alive} of {most}");
    Taken { most, end }
}

fn the_peak_of_an_update_is_what_lives_at_once_and_recomputing_lowers_it(device: &Device) {
    let [kept, recomputed] = [false, true].map(|gradient_checkpointing| {
        let memory = MemoryConfig { gradient_checkpointing, ..MemoryConfig::default() };
        update(&memory, device)
    });
    let said = format!("{} bytes with graphs kept, {} recomputed, {} at the end", kept.most, recomputed.most, kept.end);
    report(&said);
    assert!(recomputed.most < kept.most, "{said}");
    // what a reading at the end of a phase misses
    assert!(recomputed.end < recomputed.most, "{said}");
}

fn what_lives_between_two_boundaries_counts_against_the_limit(device: &Device) {
    let runtime = Runtime::new(device);
    runtime.forget_graphs();
    let log = BoundaryLog::new(&runtime.accounts, None);
    let limit = read(device).in_use_bytes + (1 << 20);
    let runtime = runtime.with_log(Arc::clone(&log)).with_limit(Some(limit));
    log.begin_phase(1, "update_actor", read_pools(device));
    runtime.boundary(BoundaryKind::Begin).expect("room enough");
    let between = Tensor::<1>::zeros([1 << 19], device);
    runtime.raise_peak();
    drop(between);
    let twice = [runtime.boundary(BoundaryKind::Forward), runtime.check()];
    for found in twice {
        let Err(Error::OutOfMemory(what)) = found else {
            panic!("two MiB more than the limit of one allows: {found:?}");
        };
        assert!(what.in_use_bytes() > Some(limit), "{what}");
        assert_eq!(what.limit_bytes(), Some(limit));
    }
    // the phase again, under another plan
    log.restart_phase(read_pools(device));
    runtime.boundary(BoundaryKind::Forward).expect("room again");
    runtime.check().expect("room again");
}

/// The lines of two files of a run of two steps: `memory.jsonl`, `metrics.jsonl`.
fn run(output: &Path, device: &Device, setting: &str) -> [Vec<Value>; 2] {
    let overrides = [
        format!("output={}", output.display()),
        format!("device={}", name(device)),
        "trainer.steps=2".to_owned(),
        // it gives free pages back after sampling, whatever `memory.cleanup_every` says
        "rollout.free_cache=false".to_owned(),
        setting.to_owned(),
    ];
    let config = parse(TRAINING, &overrides).expect("a configuration");
    let mut trainer = Trainer::builder(config).build().expect("a run");
    trainer.run().expect("two steps");
    ["memory.jsonl", "metrics.jsonl"].map(|file| {
        let text = std::fs::read_to_string(output.join(file)).expect("a file of the run");
        let lines = text.lines();
        lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
    })
}

fn number(line: &Value, key: &str) -> u64 {
    line[key].as_u64().unwrap_or_else(|| panic!("{key}: {line}"))
}

fn a_run_says_what_its_phases_took_at_most_and_gives_free_pages_back(device: &Device) {
    // free pages that a run could do without; of many tensors, since the page of a single large one may be given back
    // at once
    let many: Vec<Tensor<1>> = (0..64).map(|_| Tensor::zeros([64 << 10], device)).collect();
    let before = read_pools(device).expect("pools").reserved_bytes;
    drop(many);
    let temp = tempfile::tempdir().expect("a folder");
    let [readings, metrics] = run(&temp.path().join("kept"), device, "memory.cleanup_every=0");
    let is_cuda = backend(device) == Backend::Cuda;
    for line in &readings {
        assert_eq!(line["source"], "burn_pool");
        assert_eq!(line["peak_source"], "pool_at_boundaries");
        assert!(number(line, "peak_bytes") >= number(line, "in_use_bytes"));
        if is_cuda {
            let total = number(line, "driver_total_bytes");
            let used = total - number(line, "driver_free_bytes");
            assert!(used >= number(line, "reserved_bytes"), "{line}");
        } else {
            assert!(line["driver_free_bytes"].is_null() && line["driver_total_bytes"].is_null());
        }
    }
    let of = |phase: &str| {
        let own = readings.iter().rfind(|line| line["phase"] == phase);
        own.unwrap_or_else(|| panic!("no {phase}"))
    };
    for phase in ["gen", "update_actor"] {
        let line = of(phase);
        assert!(number(line, "peak_bytes") > number(line, "in_use_bytes"), "{line}");
    }
    let last = metrics.last().expect("a step");
    let gib = last["perf/max_memory_allocated_gb"].as_f64().expect("a number");
    let most = (gib * f64::from(1 << 30)).round() as u64;
    assert!(most >= number(of("update_actor"), "peak_bytes") && most >= number(of("gen"), "peak_bytes"));
    assert!(readings.iter().any(|line| number(line, "peak_bytes") == most));
    assert_eq!(last["perf/device_memory_used_gb"].is_number(), is_cuda);

    let [given, _] = run(&temp.path().join("given"), device, "memory.cleanup_every=1");
    let reserved = |lines: &[Value]| {
        let own = lines.iter().rfind(|line| line["phase"] == "adv");
        number(own.expect("a phase"), "reserved_bytes")
    };
    let (kept, given) = (reserved(&readings), reserved(&given));
    assert!(given < kept, "{given} bytes reserved, {kept} where nothing is given back, {before} before");
}

/// Bytes of the device that sampling may have a quarter of.
const CAPACITY: u64 = 512 << 20;
const SHARE: f64 = 0.25;
const SEQUENCES: usize = 64;
const PROMPT: usize = 8;
const COMPLETION: usize = 504;

fn weights_and_cache_stay_within_the_share_that_sampling_may_have(device: &Device) {
    let mut profile = profile::assumed(backend(device));
    profile.capacity_bytes = Some(CAPACITY);
    let lengths = [PROMPT as u64, COMPLETION as u64];
    let request = Request {
        workload: Workload::grpo(arch(), lengths, SEQUENCES as u64, 1),
        memory: MemoryConfig::default(),
        max_num_seqs: SEQUENCES,
        profile,
        budget: None,
        host_budget: None,
        phase_limits: BTreeMap::new(),
        parallel: Parallel::default(),
        ranks: 1,
    };
    let plan = request.as_configured().expect("a plan").plan;
    let cache = cache_bytes_of_share(&request, &plan, SHARE).expect("room");
    let sample = || sampled(device, cache);
    // a thread has pools of its own, which are empty at first
    let found = std::thread::scope(|scope| scope.spawn(sample).join());
    let (held, peak) = found.expect("a thread that ends well");
    let allowed = (CAPACITY as f64 * SHARE) as u64;
    let said = format!(
        "{held} of {cache} bytes of keys and values; {} bytes in use and {} reserved of {allowed}",
        peak.in_use_bytes, peak.reserved_bytes
    );
    report(&said);
    assert!(held <= cache && held > cache / 10 * 9, "{said}");
    assert!(held < peak.in_use_bytes, "{said}");
    assert!(peak.in_use_bytes <= peak.reserved_bytes, "{said}");
    assert!(peak.reserved_bytes <= allowed, "{said}");
}

/// Bytes of the cache, and by how much the pools grow, where a model is loaded and the first token ends every sequence.
fn sampled(device: &Device, cache: u64) -> (u64, PoolPeak) {
    let before = read(device);
    let arch = arch();
    let sampling = SamplingParams {
        temperature: 0.0,
        max_new_tokens: COMPLETION,
        stop_ids: (0..arch.vocab_size as u32).collect(),
        ..SamplingParams::default()
    };
    let decoder = Decoder::random(arch, 1, device);
    let request = |index: usize| GenerationRequest {
        tokens: (0..PROMPT).map(|t| ((index * 31 + t * 7) % 2048) as u32).collect(),
        key: DrawKey { seed: 3, step: 0, prompt_index: index as u32, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<GenerationRequest> = (0..SEQUENCES).map(request).collect();
    let limits = SchedulerConfig { kv_cache_bytes: Some(cache as usize), ..SchedulerConfig::new(SEQUENCES) };
    let [in_use, reserved] = [before.in_use_bytes, before.reserved_bytes].map(AtomicU64::new);
    let raise = || {
        let pools = read_pools(device).expect("pools");
        in_use.fetch_max(pools.in_use_bytes, Relaxed);
        reserved.fetch_max(pools.reserved_bytes, Relaxed);
    };
    let generator = Generator::new(&decoder, None, &sampling).expect("sampling that works");
    let generator = generator.with_memory_probe(&raise);
    let generated = generator.run_with(&requests, 1, &limits, |_| {});
    let stats = generated.expect("samples").stats;
    raise();
    let peak = PoolPeak {
        in_use_bytes: in_use.load(Relaxed) - before.in_use_bytes,
        reserved_bytes: reserved.load(Relaxed) - before.reserved_bytes,
    };
    (stats.cache_bytes as u64, peak)
}

fn the_driver_counts_what_the_pools_have_reserved(device: &Device) {
    let driver = DriverMemory::new(device);
    let (_, info) = open(name(device).parse().expect("a device's name")).expect("it is open");
    if backend(device) != Backend::Cuda {
        assert_eq!(driver.read(), None);
        assert_eq!(free_bytes(&info), info.memory_bytes);
        return;
    }
    device.memory_cleanup();
    let pools = read(device).reserved_bytes;
    let before = driver.read().expect("the driver's word");
    let bytes = 96 << 20;
    let held = Tensor::<1>::zeros([bytes / 4], device);
    let grown = read(device).reserved_bytes - pools;
    let after = driver.read().expect("the driver's word");
    assert!(grown >= bytes as u64);
    assert!(before.free_bytes - after.free_bytes >= grown, "{before:?} {after:?}");
    assert_eq!(before.total_bytes, after.total_bytes);
    // what `memory.budget: auto` may plan with: this program's own pages too
    let free = free_bytes(&info).expect("the driver says");
    assert_eq!(free, after.free_bytes + pools + grown);
    assert!(free <= info.memory_bytes.expect("the driver says"));
    drop(held);
}
