//! Which files are fetched, and that they are those that the Hub has.

use super::{COMMIT, Hub, TASK, model, repos};
use crate::program::{Bench, program, refused, stderr, succeeded};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;

/// The sum that a Hub states of a large file.
pub(super) fn sha256(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in Sha256::digest(bytes) {
        write!(text, "{byte:02x}").expect("text takes more");
    }
    text
}

fn generate(hub: &Hub, cache: &Path) -> Output {
    let args = "generate --model owner/tiny --prompt Jean --device cpu --max-new-tokens 2";
    let command = program(&args.split(' ').collect::<Vec<_>>());
    hub.reach(command, cache).output().unwrap()
}

#[test]
fn weights_that_are_damaged_on_the_way_are_fetched_again() {
    let mut shared = repos();
    shared.damaged = Mutex::new(1);
    let (bench, hub) = (Bench::new(), Hub::serve(shared));
    let cache = bench.path("cache");
    succeeded(&generate(&hub, &cache));
    let snapshot = cache.join("hub/models--owner--tiny/snapshots").join(COMMIT);
    let bytes = std::fs::read(snapshot.join("model.safetensors")).unwrap();
    assert_eq!(sha256(&bytes), sha256(&model()["model.safetensors"]));
    assert_eq!(*hub.shared.damaged.lock().unwrap(), 0);
}

#[test]
fn weights_that_are_others_than_the_hub_states_are_refused_and_not_kept() {
    let mut shared = repos();
    shared.damaged = Mutex::new(usize::MAX);
    let (bench, hub) = (Bench::new(), Hub::serve(shared));
    let cache = bench.path("cache");
    let wanted = sha256(&model()["model.safetensors"]);
    refused(&generate(&hub, &cache), &["model.safetensors", "its SHA-256 is", &format!("the Hub states {wanted}")]);
    let snapshot = cache.join("hub/models--owner--tiny/snapshots").join(COMMIT);
    assert!(!snapshot.join("model.safetensors").exists());
    assert!(snapshot.join("config.json").exists());
}

#[test]
fn a_cache_that_cannot_be_written_to_is_named_at_once() {
    let (bench, hub) = (Bench::new(), Hub::serve(repos()));
    let file = bench.write("file", "");
    let cache = file.join("hub");
    refused(&generate(&hub, &file), &[cache.to_str().unwrap(), "cannot be written to", "set HF_HOME"]);
}

/// A configuration whose model, critic and rows are of the Hub.
fn configured(bench: &Bench, command: &str, more: &[&str]) -> Command {
    let settings = [
        "model={path: owner/tiny}",
        "objective=ppo",
        "critic={model: {path: owner/tiny}}",
        "rollout.prompt_length=64",
        TASK,
    ];
    bench.command(command, &[&settings[..], more].concat())
}

#[test]
fn planning_checking_and_a_dry_run_fetch_no_weights() {
    let bench = Bench::new();
    for (command, more) in [("plan", &[][..]), ("train", &["--dry-run"])] {
        let hub = Hub::serve(repos());
        let cache = bench.path(command);
        let output = hub.reach(configured(&bench, command, more), &cache).output();
        let output = output.unwrap();
        succeeded(&output);
        assert!(!stderr(&output).contains("model.safetensors"), "{command}");
        let fetched = |file: &str| hub.ranges_of(file).len();
        assert!(fetched("config.json") > 0 && fetched("tokenizer.json") > 0);
        assert_eq!(fetched("model.safetensors"), 0, "{command}");
    }
    let hub = Hub::serve(repos());
    let task = TASK.trim_start_matches("task=");
    let text = format!(
        "model: {{path: owner/tiny}}\ntask: {task}\noutput: run\nrollout: {{prompt_length: 64, response_length: 4}}\n"
    );
    bench.write("hub.yaml", &text);
    let mut check = program(&["config", "check", "hub.yaml"]);
    check.current_dir(bench.path(""));
    let checked = hub.reach(check, &bench.path("check")).output().unwrap();
    let said = succeeded(&checked);
    assert!(said.contains("no mistakes"), "{said}");
    assert!(!hub.ranges_of("tokenizer.json").is_empty());
    assert!(hub.ranges_of("model.safetensors").is_empty());
}

#[test]
fn a_check_that_stays_offline_looks_at_the_rest_and_says_what_it_left_out() {
    let bench = Bench::new();
    let hub = Hub::serve(repos());
    let cache = bench.path("cache");
    let check = |args: &[&str]| {
        let mut check = program(&[&["config", "check", "config.yaml"], args].concat());
        check.current_dir(bench.path(""));
        hub.reach(check, &cache).output().unwrap()
    };
    let task = TASK.trim_start_matches("task=");
    let text = |path: &str| {
        format!(
            "model:\n  path: {path}\ntask: {task}\noutput: run\nrollout: {{prompt_length: 64, response_length: 4}}\n"
        )
    };
    bench.write("config.yaml", &text("owner/tiny"));
    let said = succeeded(&check(&["--offline"]));
    for part in [
        "not checked: model.path: model owner/tiny, being offline",
        "not checked: task.train: dataset owner/rows, being offline",
        "no mistakes",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(hub.shared.requests.lock().unwrap().is_empty());
    // what was fetched once is looked at
    succeeded(&check(&[]));
    assert_eq!(succeeded(&check(&["--offline"])), "config.yaml: no mistakes\n");
    assert!(hub.ranges_of("model.safetensors").is_empty());
    // a name that the Hub does not have is marked where it is written
    bench.write("config.yaml", &text("owner/none"));
    let output = check(&[]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("config.yaml:2:3: ") && said.contains("owner/none"), "{said}");
    assert!(said.contains("  2 |   path: owner/none"), "{said}");
}
