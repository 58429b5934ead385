use super::{
    AccountBytes, Boundaries, FORMAT, MemoryTimeline, PlannedBytes, Reason, TimelinePhase, TraceEvents, TraceTable,
    VERSION,
};
use crate::Result;
use crate::executor::BoundaryKind;
use crate::plan::estimate::{EstimatePhase, PhaseEstimate};
use firebrick_backends::accounts::{Account, Category, Home, Role};
use firebrick_backends::allocation_trace::TraceSource;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn account(category: Category, home: Home, model: Role, bytes: &[u64]) -> AccountBytes {
    AccountBytes { account: Account { category, home, model }, bytes: bytes.to_vec() }
}

fn estimate(name: EstimatePhase, categories: &[(Category, u64)]) -> PhaseEstimate {
    PhaseEstimate {
        stage: None,
        name,
        total_bytes: categories.iter().map(|(_, bytes)| bytes).sum(),
        host_bytes: 0,
        moment: "a segment's graph".into(),
        categories: categories.iter().copied().collect::<BTreeMap<_, _>>(),
    }
}

/// Two steps of an update: step 2 holds moments, and its largest row is the graph of segment 0.
pub fn two_steps() -> MemoryTimeline {
    let rows = [
        (1, BoundaryKind::Begin, None, 100),
        (1, BoundaryKind::Forward, Some(0), 160),
        (1, BoundaryKind::End, None, 130),
        (2, BoundaryKind::Begin, None, 150),
        (2, BoundaryKind::Graph, Some(0), 240),
        (2, BoundaryKind::Update, Some(1), 200),
        (2, BoundaryKind::End, None, 150),
    ];
    let place = |p: BoundaryKind| BoundaryKind::ALL.iter().position(|&q| q == p).expect("a place");
    MemoryTimeline {
        format: FORMAT.into(),
        version: VERSION,
        reason: Reason::Snapshot,
        error: None,
        device: "cpu".into(),
        unified: true,
        dropped: 0,
        phases: vec![TimelinePhase {
            name: "update_actor".into(),
            estimates: vec![EstimatePhase::Backward, EstimatePhase::Optimizer],
        }],
        places: BoundaryKind::ALL.to_vec(),
        boundaries: Boundaries {
            step: rows.iter().map(|r| r.0).collect(),
            phase: vec![0; rows.len()],
            place: rows.iter().map(|r| place(r.1)).collect(),
            segment: rows.iter().map(|r| r.2).collect(),
            seconds: (0..rows.len()).map(|i| i as f64 * 0.25).collect(),
            in_use_bytes: rows.iter().map(|r| Some(r.3)).collect(),
            peak_bytes: rows.iter().map(|r| Some(r.3 + 10)).collect(),
            reserved_bytes: rows.iter().map(|r| Some(r.3)).collect(),
        },
        accounts: vec![
            account(Category::Parameters, Home::Device, Role::Policy, &[80; 7]),
            account(Category::LiveGraph, Home::Device, Role::Policy, &[0, 60, 0, 0, 90, 0, 0]),
            account(Category::Moments, Home::Host, Role::Critic, &[0, 0, 0, 40, 40, 40, 40]),
        ],
        plans: vec![PlannedBytes {
            from: 0,
            phases: vec![
                estimate(
                    EstimatePhase::Backward,
                    &[(Category::Parameters, 80), (Category::LiveGraph, 100), (Category::Buffers, 20)],
                ),
                estimate(EstimatePhase::Optimizer, &[(Category::Parameters, 80), (Category::Moments, 45)]),
            ],
        }],
        trace: None,
    }
}

fn parse(text: &str) -> Result<MemoryTimeline> {
    MemoryTimeline::parse(text, Path::new("run/memory_timeline.json"))
}

fn refused(text: &str, part: &str) {
    let message = parse(text).expect_err("a refusal").to_string();
    assert!(message.contains(part) && message.contains("run/memory_timeline.json"), "{part:?} is not in: {message}");
}

#[test]
fn a_timeline_is_read_as_it_was_written() {
    let mut timeline = two_steps();
    timeline.trace = Some(TraceTable {
        source: TraceSource::Heap,
        least_bytes: 65_536,
        dropped: 3,
        functions: vec!["firebrick_engine::a".into(), "main".into()],
        stacks: vec![vec![0, 1]],
        events: TraceEvents {
            released: vec![0, 1],
            id: vec![Some(0), None],
            bytes: vec![70_000, 80_000],
            step: vec![1, 2],
            phase: vec![Some(0), None],
            place: vec![Some(2), None],
            segment: vec![Some(0), None],
            account: vec![None, None],
            stack: vec![Some(0), None],
        },
    });
    let text = timeline.to_json().expect("JSON");
    assert_eq!(parse(&text).expect("a timeline"), timeline);
    assert_eq!(timeline.steps(), [1, 2]);
    // names once, columns of numbers
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["accounts"][1]["category"], "live_graph");
    assert_eq!(value["accounts"][1]["bytes"][1], 60);
    assert_eq!(value["places"][4], "graph");
}

#[test]
fn what_is_no_timeline_of_this_version_is_refused_with_the_reason() {
    let whole = two_steps().to_json().expect("JSON");
    let edited = |edit: fn(&mut Value)| {
        let mut value: Value = serde_json::from_str(&whole).expect("JSON");
        edit(&mut value);
        value.to_string()
    };
    refused(&whole[..whole.len() / 2], "it is truncated");
    refused("", "it is truncated");
    refused("{]", "not JSON");
    refused("[1]", "not a memory timeline");
    refused("{\"steps\": 3}", "not a memory timeline");
    refused(&edited(|v| v["version"] = json!(2)), "version 2");
    refused(&edited(|v| v["version"] = json!("x")), "`version`");
    refused(&edited(|v| v["version"] = json!(0)), "`version`");
    let column = edited(|v| v["boundaries"]["seconds"] = json!([1.0]));
    refused(&column, "seconds has 1 values for 7 boundaries");
    let account = edited(|v| v["accounts"][0]["category"] = json!("lunch"));
    refused(&account, "accounts[0]");
    let bytes = edited(|v| v["boundaries"]["step"][0] = json!(-1));
    refused(&bytes, "boundaries.step[0]");
    refused(&edited(|v| v["phases"] = json!([])), "boundaries.phase");
}
