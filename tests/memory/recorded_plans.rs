//! Plans and predictions as recorded: of every case under its settings, and of the planner under budgets.
//!
//! A refactoring keeps all of them. A change of plans records them again, and its review includes the difference:
//! `FIREBRICK_REFERENCE=write cargo test --release --workspace --test memory recorded`.

use crate::cases::cases;
use crate::measure::Case;
use firebrick::backends::device::Backend;
use firebrick::backends::profile;
use firebrick::engine::plan::estimate::{Estimate, Parallel, estimate_parallel};
use firebrick::engine::plan::planner::{Fit, Request};
use firebrick::engine::plan::{MemoryConfig, Plan, Result, Zero};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Budgets as shares of the peak of a case's first plan.
const BUDGETS: [f64; 4] = [1.5, 0.8, 0.5, 0.35];

#[test]
fn plans_and_predictions_are_the_recorded_ones() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/plans.jsonl");
    let lines: Vec<String> = cases().iter().flat_map(|(case, plans)| lines(case, plans)).collect();
    if std::env::var("FIREBRICK_REFERENCE").is_ok_and(|mode| mode == "write") {
        fs::write(&path, lines.join("\n") + "\n").expect("the recorded plans can be written");
        return;
    }
    let recorded = fs::read_to_string(&path).expect("the recorded plans can be read");
    let recorded: Vec<&str> = recorded.lines().collect();
    for (line, recorded) in lines.iter().zip(&recorded) {
        assert_eq!(line, recorded, "a plan or its prediction changed");
    }
    assert_eq!(lines.len(), recorded.len(), "cases were added or removed");
}

fn lines(case: &Case, plans: &[(&str, Value)]) -> Vec<String> {
    let mut lines = Vec::new();
    for backend in [Backend::Cpu, Backend::Cuda] {
        for (name, settings) in plans {
            let memory: MemoryConfig = serde_json::from_value(settings.clone()).expect("memory settings");
            let plan = memory.plans(&case.arch, false, case.critic_arch().as_ref(), case.sequences).expect("a plan");
            let zero = plan.policy().zero;
            let parallel = Parallel { data: if zero > Zero::Off { 2 } else { 1 }, zero, ..Parallel::default() };
            let estimate = estimate_parallel(&case.workload(), &plan, &profile::assumed(backend), &parallel);
            lines.push(line(case, backend, name, &recorded(&plan, &estimate)));
        }
        lines.extend(under_budgets(case, backend));
    }
    lines
}

fn under_budgets(case: &Case, backend: Backend) -> Vec<String> {
    let length = (case.prompt + case.response) * case.sequences;
    let settings = json!({"train_tokens": length, "score_tokens": length, "critic": {}});
    let mut request = Request {
        workload: case.workload(),
        memory: serde_json::from_value(settings).expect("memory settings"),
        max_num_seqs: case.sequences,
        profile: profile::assumed(backend),
        budget: None,
        host_budget: None,
        phase_limits: BTreeMap::new(),
        parallel: Parallel::default(),
        ranks: 1,
    };
    let plain = request.as_configured().expect("a plan").estimate.peak_bytes;
    let of_share = |share: f64| {
        request.budget = Some((plain as f64 * share) as u64);
        line(case, backend, &format!("budget {share}"), &chosen(request.fit()))
    };
    BUDGETS.map(of_share).to_vec()
}

fn line(case: &Case, backend: Backend, name: &str, value: &Value) -> String {
    json!([case.name, backend.name(), name, value]).to_string()
}

fn chosen(fit: Result<Fit>) -> Value {
    match fit {
        Ok(fit) => recorded(&fit.plan, &fit.estimate),
        Err(error) => json!(error.to_string()),
    }
}

/// A plan with the bytes of its phases, on the device and on the host, and its seconds to six digits.
fn recorded(plan: &Plan, estimate: &Estimate) -> Value {
    let phases = estimate.phases.iter();
    let bytes: Vec<Value> =
        phases.map(|phase| json!([phase.name.to_string(), phase.total_bytes, phase.host_bytes])).collect();
    json!({"plan": plan, "bytes": bytes, "seconds": format!("{:.5e}", estimate.seconds.total())})
}
