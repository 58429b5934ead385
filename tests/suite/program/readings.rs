//! What a run says of its memory: `memory.jsonl`, and the metrics that come of it.

use super::runs::metrics;
use super::{Bench, succeeded};
use serde_json::Value;

fn lines(bench: &Bench, file: &str) -> Vec<Value> {
    let text = bench.read(&format!("run/{file}"));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_phase_is_read_at_its_end_with_its_source_its_peak_and_its_accounts() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &[]));
    let readings = lines(&bench, "memory.jsonl");
    let number = |reading: &Value, key: &str| reading[key].as_u64().unwrap_or_else(|| panic!("{key}: {reading}"));
    for reading in &readings {
        // what the program's own allocator counts, which is mimalloc
        assert_eq!(reading["source"], "counted_heap");
        let in_use = number(reading, "in_use_bytes");
        assert!(in_use > 0 && number(reading, "reserved_bytes") >= in_use);
        assert!(number(reading, "peak_bytes") >= in_use, "{reading}");
        let accounts = reading["accounts"].as_array().unwrap();
        let weights = accounts.iter().find(|a| a["category"] == "parameters");
        assert!(number(weights.expect("an account of weights"), "bytes") > 0);
    }
    let of_step = |step: u64| readings.iter().filter(move |r| r["step"] == step);
    for step in 1..=3 {
        for phase in ["gen", "reward", "adv", "update_actor"] {
            let count = of_step(step).filter(|r| r["phase"] == phase).count();
            assert_eq!(count, 1, "{phase} of step {step}");
        }
    }
    // nothing is validated in step 1, so the metric is about these phases
    let most = of_step(1).map(|r| number(r, "peak_bytes")).max().unwrap();
    let line = &lines(&bench, "metrics.jsonl")[1];
    let gib = line["perf/max_memory_allocated_gb"].as_f64().unwrap();
    assert!((gib * f64::from(1 << 30) - most as f64).abs() < 1.0);
}

#[test]
fn giving_free_pages_back_in_every_phase_changes_nothing_that_is_learnt() {
    let (kept, given) = (Bench::new(), Bench::new());
    succeeded(&kept.firebrick("train", &[]));
    succeeded(&given.firebrick("train", &["memory.cleanup_every=1"]));
    assert_eq!(metrics(&kept, "run"), metrics(&given, "run"));
}
