//! Memory timelines of real runs: what they have, how they agree with the ledger, and `firebrick memory`, which prints
//! them.

use super::memory::{bench, peak, train};
use super::{Bench, firebrick, refused, stderr, succeeded};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const FILE: &str = "memory_timeline.json";

/// A timeline as a run left it.
struct Timeline(Value);

/// Bytes by category and home.
type Held = BTreeMap<(String, String), u64>;

impl Timeline {
    fn read(bench: &Bench, run: &str) -> Self {
        let text = bench.read(&format!("{run}/{FILE}"));
        Self(serde_json::from_str(&text).expect("JSON"))
    }

    fn column(&self, name: &str) -> Vec<u64> {
        let column = self.0["boundaries"][name].as_array().expect("a column");
        let number = |v: &Value| v.as_u64().unwrap_or_else(|| panic!("{name}: {v}"));
        column.iter().map(number).collect()
    }

    fn names(&self, list: &str, key: Option<&str>, column: &str) -> Vec<String> {
        let names = &self.0[list];
        let name = |i: u64| match key {
            Some(key) => &names[i as usize][key],
            None => &names[i as usize],
        };
        let all = self.column(column).into_iter().map(name);
        all.map(|n| n.as_str().expect("a name").to_owned()).collect()
    }

    fn phases(&self) -> Vec<String> {
        self.names("phases", Some("name"), "phase")
    }

    fn places(&self) -> Vec<String> {
        self.names("places", None, "place")
    }

    /// What is held at a boundary, all models together.
    fn held(&self, row: usize) -> Held {
        let mut held = Held::new();
        for account in self.0["accounts"].as_array().expect("accounts") {
            let name = |key: &str| account[key].as_str().expect("a name").to_owned();
            let bytes = account["bytes"][row].as_u64().expect("bytes");
            *held.entry((name("category"), name("home"))).or_default() += bytes;
        }
        held
    }

    /// Accounts that held something, as `category home model`.
    fn accounts(&self) -> Vec<String> {
        let accounts = self.0["accounts"].as_array().expect("accounts").iter();
        let name = |account: &Value| {
            let part = |key: &str| account[key].as_str().expect("a name").to_owned();
            [part("category"), part("home"), part("model")].join(" ")
        };
        accounts.map(name).collect()
    }
}

/// Categories whose peak is at a boundary: what a phase builds up stays until the boundary after it.
const AT_BOUNDARIES: [(&str, &[&str]); 3] = [
    ("gen", &["parameters", "kv_cache", "reference"]),
    ("ref", &["parameters", "reference"]),
    ("update_actor", &["parameters", "gradients", "moments", "live_graph", "kept_inputs"]),
];

/// The rows of a phase against its line of `memory.jsonl`.
fn agrees(timeline: &Timeline, line: &Value) {
    let (step, phase) = (line["step"].as_u64().unwrap(), line["phase"].as_str().unwrap());
    let (steps, phases) = (timeline.column("step"), timeline.phases());
    let rows: Vec<usize> = (0..steps.len()).filter(|&row| steps[row] == step && phases[row] == phase).collect();
    let (first, last) = (rows[0], rows[rows.len() - 1]);
    let places = timeline.places();
    assert_eq!((&*places[first], &*places[last]), ("begin", "end"));
    let most = line["peak_bytes"].as_u64().unwrap();
    let in_use = timeline.column("in_use_bytes");
    assert_eq!(in_use[last], line["in_use_bytes"]);
    assert_eq!(timeline.column("peak_bytes")[last], most);
    assert!(rows.iter().all(|&row| in_use[row] <= most), "{step} {phase}");

    let mut seen = Held::new();
    for &row in &rows {
        for (account, bytes) in timeline.held(row) {
            let most = seen.entry(account).or_default();
            *most = bytes.max(*most);
        }
    }
    let at_end = timeline.held(last);
    let exact = AT_BOUNDARIES.iter().find(|(name, _)| *name == phase);
    let exact = exact.map_or(&[][..], |(_, categories)| *categories);
    for balance in line["accounts"].as_array().unwrap() {
        let name = |key: &str| balance[key].as_str().unwrap().to_owned();
        let bytes = |key: &str| balance[key].as_u64().unwrap();
        let account = (name("category"), name("home"));
        let end = at_end.get(&account).copied().unwrap_or(0);
        assert_eq!(end, bytes("bytes"), "{step} {phase} {account:?}");
        let seen = seen.remove(&account).unwrap_or(0);
        assert!(seen <= bytes("peak_bytes"), "{step} {phase} {account:?}");
        if exact.contains(&account.0.as_str()) {
            assert_eq!(seen, bytes("peak_bytes"), "{step} {phase} {account:?}");
        }
    }
    assert!(seen.values().all(|&bytes| bytes == 0), "{step} {phase}: {seen:?}");
}

/// A timeline as it is written.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub(super) fn timeline_of(bench: &Bench, run: &str) -> Value {
    Timeline::read(bench, run).0
}

/// Checks every phase of some steps, and gives how many they were.
pub(super) fn checked_phases(bench: &Bench, run: &str, steps: &[u64]) -> usize {
    let timeline = Timeline::read(bench, run);
    let mut found = timeline.column("step");
    found.dedup();
    assert_eq!(found, steps, "{run}");
    let text = bench.read(&format!("{run}/memory.jsonl"));
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    let lines: Vec<Value> = lines.filter(|l| steps.contains(&l["step"].as_u64().unwrap())).collect();
    for line in &lines {
        agrees(&timeline, line);
    }
    lines.len()
}

#[test]
fn a_snapshot_has_the_steps_that_were_asked_for_and_agrees_with_the_ledger() {
    let bench = bench();
    let segments = [
        "memory.snapshot=2",
        "memory.gradient_checkpointing=true",
        "memory.train_tokens=1024",
        "memory.score_tokens=1024",
    ];
    for (run, settings) in [("plain", &["memory.snapshot=2"][..]), ("segments", &segments)] {
        succeeded(&train(&bench, run, settings));
        assert!(checked_phases(&bench, run, &[1, 2]) >= 8);
        let timeline = Timeline::read(&bench, run);
        assert_eq!(timeline.0["version"], 1);
        assert_eq!(timeline.0["reason"], "snapshot");
        // the prediction that the plan file has
        let plan: Value = serde_json::from_str(&bench.read(&format!("{run}/plan.json"))).unwrap();
        assert_eq!(timeline.0["plans"], json!([{"from": 0, "phases": plan["phases"]}]));
        let times = timeline.0["boundaries"]["seconds"].as_array().unwrap();
        assert!(times.iter().all(|t| t.as_f64().unwrap() >= 0.0));
    }
    // four layers back in every micro-batch, and the optimizer's units
    let timeline = Timeline::read(&bench, "segments");
    let segments = timeline.0["boundaries"]["segment"].as_array().unwrap();
    for (place, units) in [("forward", 4), ("graph", 4), ("backward", 4), ("update", 10)] {
        let rows = timeline.places().into_iter().zip(segments);
        let own = rows.filter(|(p, _)| p == place);
        let mut own: Vec<u64> = own.map(|(_, s)| s.as_u64().unwrap()).collect();
        own.sort_unstable();
        own.dedup();
        assert_eq!(own, (0..units).collect::<Vec<u64>>(), "{place}");
    }
}

#[test]
fn accounts_tell_the_models_of_a_run_apart() {
    let bench = bench();
    let settings = [
        "objective={name: ppo, kl_loss_coef: 0.01}",
        "critic.optim.lr=0.001",
        "rollout.n=1",
        "trainer.train_batch_size=24",
        "trainer.steps=2",
        "memory.snapshot=1",
    ];
    succeeded(&train(&bench, "ppo", &settings));
    checked_phases(&bench, "ppo", &[1]);
    let accounts = Timeline::read(&bench, "ppo").accounts();
    for account in [
        "parameters device policy",
        "kv_cache device policy",
        "gradients device policy",
        "moments device policy",
        "reference device reference",
        "critic device critic",
        "gradients device critic",
        "live_graph device critic",
        "moments device critic",
    ] {
        assert!(accounts.iter().any(|a| a == account), "{account}: {accounts:?}");
    }
}

#[test]
fn a_resumed_run_takes_its_first_steps_after_the_resumption() {
    let bench = bench();
    let length = |steps: &str| {
        let schedule = "optim.lr_scheduler={lr_scheduler_type: constant}";
        [format!("trainer.steps={steps}"), schedule.to_owned()]
    };
    let run = |steps: &str, more: &[&str]| {
        let length = length(steps);
        let length = length.each_ref().map(String::as_str);
        succeeded(&train(&bench, "run", &[&length[..], more].concat()));
    };
    run("2", &["trainer.save_freq=1"]);
    run("4", &["trainer.save_freq=1", "--resume", "memory.snapshot=1"]);
    checked_phases(&bench, "run", &[3]);
    // more than there are: what there was
    run("5", &["trainer.save_freq=1", "--resume", "memory.snapshot=9"]);
    checked_phases(&bench, "run", &[5]);
    assert_eq!(Timeline::read(&bench, "run").0["reason"], "ended");
}

#[test]
fn without_the_key_nothing_is_written_and_the_command_names_it() {
    let bench = bench();
    succeeded(&train(&bench, "run", &["trainer.steps=1", "memory.trace=100"]));
    assert!(!bench.path(&format!("run/{FILE}")).exists());
    let run = bench.path("run");
    let output = firebrick(&["memory", run.to_str().unwrap()]);
    refused(&output, &["no memory_timeline.json", "memory.snapshot=N", "out of memory"]);
}

#[test]
fn a_run_that_ends_out_of_memory_leaves_its_last_boundaries() {
    let bench = bench();
    succeeded(&train(&bench, "plain", &["trainer.steps=1"]));
    let limit = peak(&bench, "plain") * 6 / 10;
    let settings = [format!("memory.limit={limit}"), "memory.recover=false".to_owned(), "memory.trace=500".to_owned()];
    let settings = settings.each_ref().map(String::as_str);
    let output = train(&bench, "run", &settings);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.contains("error: out of memory: the update_actor phase of step 1"), "{said}");

    let timeline = Timeline::read(&bench, "run");
    assert_eq!(timeline.0["reason"], "out_of_memory");
    let error = timeline.0["error"].as_str().unwrap();
    assert!(said.contains(error), "{error}");
    let (phases, places) = (timeline.phases(), timeline.places());
    let last = places.len() - 1;
    assert_eq!(&places[last - 1..], ["out_of_memory", "end"]);
    assert_eq!((&*phases[last - 2], timeline.column("step")[last]), ("update_actor", 1));
    assert!(["forward", "head", "graph", "backward", "embedding"].contains(&&*places[last - 2]));
    let peaks = timeline.column("peak_bytes");
    assert!(peaks[last - 2] > limit, "{} of {limit}", peaks[last - 2]);
    let traced = timeline.0["trace"]["events"]["bytes"].as_array().unwrap();
    assert!((1..=500).contains(&traced.len()), "{}", traced.len());

    let run = bench.path("run");
    let printed = succeeded(&firebrick(&["memory", run.to_str().unwrap()]));
    for part in ["ended out of memory", "update_actor", "error   out of memory", "live at the same time"] {
        assert!(printed.contains(part), "{part:?} is not in:\n{printed}");
    }
}

#[test]
fn a_trace_on_the_cpu_names_the_functions_that_allocate() {
    let bench = bench();
    let settings = ["trainer.steps=1", "memory.snapshot=1", "memory.trace=20000"];
    succeeded(&train(&bench, "run", &settings));
    let timeline = Timeline::read(&bench, "run");
    let trace = &timeline.0["trace"];
    assert_eq!(trace["source"], "heap");
    let events = &trace["events"];
    let sizes = events["bytes"].as_array().unwrap();
    assert!(sizes.len() > 100);
    assert!(sizes.iter().all(|bytes| bytes.as_u64() >= Some(65_536)));
    let functions: Vec<&str> =
        trace["functions"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let stacks = trace["stacks"].as_array().unwrap();
    let through = |part: &str| {
        let own = stacks.iter().filter(|stack| {
            let mut frames = stack.as_array().unwrap().iter();
            frames.any(|frame| functions[frame.as_u64().unwrap() as usize].contains(part))
        });
        own.count()
    };
    for part in ["firebrick_models::", "firebrick_engine::"] {
        assert!(through(part) > 0, "{part}: {functions:?}");
    }

    let run = bench.path("run");
    let printed = succeeded(&firebrick(&["memory", run.to_str().unwrap()]));
    for part in [
        "HELD AT THE PEAK",
        "policy",
        "in no account",
        "PREDICTED",
        "update_actor",
        "traced allocations were live at the same time",
        "MADE IN",
    ] {
        assert!(printed.contains(part), "{part:?} is not in:\n{printed}");
    }
    let report = firebrick(&["memory", run.to_str().unwrap(), "--json"]);
    let report: Value = serde_json::from_str(&succeeded(&report)).unwrap();
    let (peak, live) = (&report["peak"], &report["live"]);
    let held: u64 = peak["holders"].as_array().unwrap().iter().map(|holder| holder["bytes"].as_u64().unwrap()).sum();
    let rest = peak["unaccounted_bytes"].as_u64().unwrap();
    assert_eq!(peak["bytes"].as_u64().unwrap(), held + rest);
    assert!(live["bytes"].as_u64() > Some(65_536));
    assert!(!live["groups"][0]["stack"].as_array().unwrap().is_empty());
}

#[test]
fn a_timeline_that_cannot_be_written_or_read_is_told_and_ends_no_run() {
    let bench = bench();
    // in place of the file that is written aside
    bench.write(&format!("run/{FILE}.tmp/in_the_way"), "");
    let settings = ["trainer.steps=2", "memory.snapshot=1"];
    let output = train(&bench, "run", &settings);
    succeeded(&output);
    let said = stderr(&output);
    assert_eq!(said.matches("the memory timeline is missing").count(), 1, "{said}");
    let run = bench.path("run");
    let memory = || firebrick(&["memory", run.to_str().unwrap()]);
    refused(&memory(), &["no memory_timeline.json"]);

    std::fs::remove_dir_all(bench.path(&format!("run/{FILE}.tmp"))).unwrap();
    let whole = {
        succeeded(&train(&bench, "other", &settings));
        bench.read(&format!("other/{FILE}"))
    };
    for (text, part) in [
        (whole[..whole.len() / 2].to_owned(), "it is truncated"),
        ("no JSON".to_owned(), "it is not JSON"),
        (whole.replacen("\"version\":1", "\"version\":2", 1), "reads up to 1"),
        (whole.replacen("\"format\":\"", "\"format\":\"other.", 1), "not a memory timeline"),
    ] {
        bench.write(&format!("run/{FILE}"), &text);
        refused(&memory(), &[FILE, part]);
    }
    let nowhere = bench.path("nowhere");
    refused(&firebrick(&["memory", nowhere.to_str().unwrap()]), &["nowhere", "no such run"]);
    std::fs::create_dir(&nowhere).unwrap();
    refused(&firebrick(&["memory", nowhere.to_str().unwrap()]), &["contains no run"]);
}

#[test]
fn values_that_make_no_sense_are_refused() {
    let bench = bench();
    for (setting, part) in [
        ("memory.snapshot=-1", "memory.snapshot"),
        ("memory.snapshot=all", "memory.snapshot"),
        ("memory.trace=-5", "memory.trace"),
        ("memory.trace=1000001", "memory.trace must be at most 1000000, found 1000001"),
        ("memory.snapshots=1", "did you mean `snapshot`"),
        ("memory.critic={snapshot: 1}", "set it only in `memory`"),
    ] {
        refused(&train(&bench, "run", &[setting]), &[part]);
    }
}
