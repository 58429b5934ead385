//! Learning-rate schedules against transformers' `get_scheduler`.

use firebrick_engine::lr_scheduler::{LrSchedulerConfig, SchedulerType};
use serde_json::{Map, Value};

use crate::support::{checked, fixtures};

/// Rates agree to the rounding of a cosine.
const TOLERANCE: f64 = 1e-14;

/// The `lr[k]` convention that the fixture states and the comparison below relies on.
const NOTE: &str = "lr[k] is the rate used by optimizer step k (0-based)";

#[test]
fn parity_of_learning_rate_schedules_with_transformers() {
    let path = fixtures().join("optim/optim.json");
    let text = std::fs::read_to_string(&path).expect("optim.json");
    let golden: Value = serde_json::from_str(&text).expect("optim.json is JSON");
    let (mut cases, mut rates) = (0, 0);
    for case in golden["cases"].as_array().expect("a list of cases") {
        let name = case["name"].as_str().expect("a case has a name");
        match case["fn"].as_str() {
            Some("transformers.get_scheduler") => {
                rates += check(name, case);
                cases += 1;
            }
            // The optimizer's own parity test takes these.
            Some("torch.optim.AdamW" | "torch.nn.utils.clip_grad_norm_") => {}
            other => panic!("{name}: unknown fn {other:?}"),
        }
    }
    assert!(cases > 0, "optim.json has no schedule case");
    assert!(rates > cases, "schedule cases without rates");
    checked("learning-rate schedules", cases);
}

/// Compares every rate of one case, and says how many there were.
fn check(name: &str, case: &Value) -> usize {
    let params = case["params"].as_object().expect("params");
    let (config, base_lr, total) = config(name, params);
    let schedule = config.build(base_lr, total).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut compared = 0;
    for (key, output) in case["outputs"].as_object().expect("outputs") {
        match key.as_str() {
            "lr" => {
                for (step, rate) in (0u64..).zip(output.as_array().expect("a list of rates")) {
                    let (expected, found) = (rate.as_f64().expect("a rate"), schedule.lr(step));
                    let allowed = TOLERANCE * base_lr;
                    assert!(
                        (found - expected).abs() <= allowed,
                        "{name}, step {step}: expected {expected:e}, found {found:e}"
                    );
                    compared += 1;
                }
            }
            "note" => assert_eq!(output, NOTE, "{name}: the meaning of `lr` has changed"),
            other => panic!("{name}: unknown output {other}"),
        }
    }
    assert!(compared > 0, "{name}: no rates");
    compared
}

/// The case's parameters as our settings, its full rate and its number of steps.
fn config(name: &str, params: &Map<String, Value>) -> (LrSchedulerConfig, f64, u64) {
    let mut config = LrSchedulerConfig::default();
    let (mut kind, mut base_lr, mut total) = (None, None, None);
    for (key, value) in params {
        let number = || value.as_f64().unwrap_or_else(|| panic!("{name}: {key} is {value}"));
        let count = || value.as_u64().unwrap_or_else(|| panic!("{name}: {key} is {value}"));
        match key.as_str() {
            "kind" => kind = Some(scheduler(name, value)),
            "base_lr" => base_lr = Some(number()),
            "total_steps" => total = Some(count()),
            "warmup_steps" => config.warmup_steps = count(),
            "num_cycles" => config.num_cycles = Some(number()),
            "power" => config.power = Some(number()),
            "lr_end" => config.lr_end = Some(number()),
            "min_lr" => config.min_lr = Some(number()),
            "min_lr_rate" => config.min_lr_rate = Some(number()),
            "num_decay_steps" => config.num_decay_steps = Some(count()),
            "num_stable_steps" => config.num_stable_steps = Some(count()),
            "min_lr_ratio" => config.min_lr_ratio = Some(number()),
            _ => panic!("{name}: unknown parameter {key} = {value}"),
        }
    }
    config.lr_scheduler_type = kind.unwrap_or_else(|| panic!("{name}: no kind"));
    let base_lr = base_lr.unwrap_or_else(|| panic!("{name}: no base_lr"));
    (config, base_lr, total.unwrap_or_else(|| panic!("{name}: no total_steps")))
}

fn scheduler(name: &str, kind: &Value) -> SchedulerType {
    match kind.as_str() {
        Some("constant") => SchedulerType::Constant,
        Some("constant_with_warmup") => SchedulerType::ConstantWithWarmup,
        Some("linear") => SchedulerType::Linear,
        Some("cosine") => SchedulerType::Cosine,
        Some("cosine_with_restarts") => SchedulerType::CosineWithRestarts,
        Some("cosine_with_min_lr") => SchedulerType::CosineWithMinLr,
        Some("polynomial") => SchedulerType::Polynomial,
        Some("inverse_sqrt") => SchedulerType::InverseSqrt,
        Some("warmup_stable_decay") => SchedulerType::WarmupStableDecay,
        _ => panic!("{name}: unknown kind {kind}"),
    }
}
