//! Settings of memory in whole runs on GPUs: timelines, shares of a device, what a device has.

use super::Bench;
use super::timeline::{checked_phases, timeline_of};
use crate::devices::{backend, on_gpus};
use crate::support::checked;
use burn::tensor::Device;
use firebrick_backends::device::open;
use firebrick_engine::config::parse;
use firebrick_engine::metrics::Summary;
use firebrick_engine::trainer::Trainer;
use serde_json::Value;

on_gpus!(
    a_timeline_of_a_gpu_agrees_with_the_ledger_and_its_trace_names_accounts,
    a_share_of_a_gpu_bounds_the_cache_and_changes_no_sample,
    a_budget_of_what_a_gpu_has_is_kept,
);

/// A run in this process, where kernels are compiled once.
fn run(bench: &Bench, name: &str, device: &Device, overrides: &[&str]) -> firebrick_engine::Result<Summary> {
    let own = [
        format!("device={}", backend(device).name()),
        format!("output={}", bench.path(name).display()),
        "trainer.test_freq=0".to_owned(),
        "trainer.val_max_samples=1".to_owned(),
        "trainer.steps=2".to_owned(),
    ];
    let overrides = overrides.iter().map(|setting| (*setting).to_owned());
    let settings: Vec<String> = own.into_iter().chain(overrides).collect();
    let config = parse(&bench.read("config.yaml"), &settings).expect("a configuration");
    let summary = Trainer::builder(config).build()?.run();
    device.memory_cleanup();
    summary
}

fn json(bench: &Bench, file: &str) -> Value {
    serde_json::from_str(&bench.read(file)).expect("JSON")
}

/// What a plan predicts of sampling: all bytes, and those of the cache.
fn sampling(bench: &Bench, name: &str) -> [u64; 2] {
    let plan = json(bench, &format!("{name}/plan.json"));
    let phases = plan["phases"].as_array().expect("phases");
    let own = phases.iter().find(|phase| phase["name"] == "rollout");
    let own = own.expect("sampling");
    [&own["total_bytes"], &own["categories"]["kv_cache"]].map(|v| v.as_u64().expect("bytes"))
}

/// The most that the cache held in a run.
fn cache(bench: &Bench, name: &str) -> u64 {
    let readings = bench.read(&format!("{name}/memory.jsonl"));
    let lines = readings.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of = |line: Value| {
        let accounts = line["accounts"].as_array().expect("accounts").clone();
        let own = accounts.into_iter().filter(|a| a["category"] == "kv_cache");
        own.map(|a| a["peak_bytes"].as_u64().expect("bytes")).max()
    };
    lines.filter_map(of).max().expect("a cache")
}

fn a_timeline_of_a_gpu_agrees_with_the_ledger_and_its_trace_names_accounts(device: &Device) {
    let bench = Bench::new();
    let settings =
        ["memory.snapshot=2", "memory.trace=200", "memory.gradient_checkpointing=true", "memory.param_offload=idle"];
    run(&bench, "run", device, &settings).expect("a run");
    let phases = checked_phases(&bench, "run", &[1, 2]);
    assert!(phases >= 6, "{phases} phases");
    let timeline = timeline_of(&bench, "run");
    assert_eq!(timeline["unified"], false);
    let trace = &timeline["trace"];
    assert_eq!(trace["source"], "accounts");
    let events = &trace["events"];
    let bytes = events["bytes"].as_array().expect("a column");
    assert_eq!(bytes.len(), 200, "the last of a run that has more");
    let accounts = events["account"].as_array().expect("a column");
    assert!(accounts.iter().all(Value::is_u64));
    // the plan in force says what the table shows beside the bytes
    let plan = json(&bench, "run/plan.json");
    assert_eq!(timeline["plans"][0]["phases"], plan["phases"]);
    let said = super::firebrick(&["memory", bench.path("run").to_str().expect("UTF-8")]);
    let said = super::succeeded(&said);
    for part in ["update_actor", "moments", "parameters"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    checked("phases of a timeline", phases);
}

fn a_share_of_a_gpu_bounds_the_cache_and_changes_no_sample(device: &Device) {
    let bench = Bench::new();
    let many = ["rollout.n=8", "trainer.train_batch_size=4"];
    run(&bench, "whole", device, &many).expect("a run");
    let [all, cache_bytes] = sampling(&bench, "whole");
    let name = backend(device).name();
    let (_, info) = open(name.parse().expect("a device")).expect("opened before");
    let share = |bytes: u64| {
        let capacity = info.memory_bytes.unwrap_or(all) as f64;
        format!("rollout.gpu_memory_utilization={:.17}", bytes as f64 / capacity)
    };
    let half = share(all - cache_bytes / 2);
    let ran = run(&bench, "half", device, &[&many[..], &[&half]].concat());
    if info.memory_bytes.is_none() {
        let said = ran.expect_err("a share of nothing known").to_string();
        assert!(said.contains("does not report its size"), "{said}");
        return;
    }
    ran.expect("a run");
    let (whole, half) = (cache(&bench, "whole"), cache(&bench, "half"));
    // a share counts what the allocator adds too
    assert!(half > 0 && 5 * half <= 3 * whole, "{half} of {whole} bytes of keys and values");
    let samples = |name: &str| bench.read(&format!("{name}/samples.jsonl"));
    assert_eq!(samples("half"), samples("whole"));
    let too_little = share(all / 4);
    let said = run(&bench, "little", device, &[&many[..], &[&too_little]].concat());
    let said = said.expect_err("weights alone take more").to_string();
    assert!(said.contains("gpu_memory_utilization"), "{said}");
    checked("shares of a device", 2);
}

fn a_budget_of_what_a_gpu_has_is_kept(device: &Device) {
    let bench = Bench::new();
    let name = backend(device).name();
    let (_, info) = open(name.parse().expect("a device")).expect("opened before");
    let ran = run(&bench, "run", device, &["memory.budget=auto"]);
    let Some(capacity) = info.memory_bytes else {
        let said = ran.expect_err("a budget of nothing known").to_string();
        assert!(said.contains("budget"), "{said}");
        return;
    };
    let summary = ran.expect("a run");
    let plan = json(&bench, "run/plan.json");
    let budget = plan["budget_bytes"].as_u64().expect("a budget");
    assert!(budget <= capacity && budget > capacity / 2, "{budget} of {capacity}");
    assert_eq!(summary.replans, 0);
    assert!(summary.measured_peak_bytes > 0 && summary.measured_peak_bytes < budget);
    checked("budgets of a device", 1);
}
