//! Trackers and profiles of a whole run: what they leave, and that they change nothing else.

use super::runs::metrics;
use super::{Bench, firebrick, program, refused, stderr, succeeded};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A run with these trackers, in a folder of its own.
fn tracked(bench: &Bench, run: &str, trackio: &Path, args: &[&str]) -> String {
    let output = format!("output={}", bench.path(run).display());
    let args = [&[output.as_str(), "trainer.save_freq=1"], args].concat();
    let output = bench.command("train", &args).env("TRACKIO_DIR", trackio).output().unwrap();
    succeeded(&output);
    stderr(&output)
}

fn samples_and_weights(bench: &Bench, run: &str) -> (String, Vec<u8>) {
    let weights = format!("{run}/checkpoints/step-000003/model/model.safetensors");
    (bench.read(&format!("{run}/samples.jsonl")), std::fs::read(bench.path(&weights)).unwrap())
}

fn warnings(messages: &str) -> Vec<&str> {
    let lines = messages.lines();
    lines.filter(|line| line.contains("WARN")).collect()
}

const ALL: &str = "trainer.logger=[console, file, tensorboard, trackio]";

#[test]
fn a_run_whose_trackers_are_all_broken_differs_in_nothing_but_its_warnings() {
    let bench = Bench::new();
    let trackio = bench.path("trackio");
    let plain = tracked(&bench, "plain", &trackio, &[]);
    // where their folders should be there are files
    let in_the_way = bench.write("in_the_way", "");
    bench.write("broken/tensorboard", "");
    let broken = tracked(&bench, "broken", &in_the_way, &[ALL]);
    assert_eq!(metrics(&bench, "plain"), metrics(&bench, "broken"));
    assert_eq!(samples_and_weights(&bench, "plain"), samples_and_weights(&bench, "broken"));
    assert!(!trackio.exists(), "nobody asked for it");
    // each is told once, however often it fails
    let told: Vec<&str> = warnings(&broken).into_iter().filter(|line| !warnings(&plain).contains(line)).collect();
    assert_eq!(told.len(), 2, "{broken}");
    for name in ["tensorboard: ", "trackio: "] {
        let own = told.iter().filter(|line| line.contains(name));
        assert_eq!(own.count(), 1, "{broken}");
    }
}

#[test]
fn trackers_are_written_and_a_resumed_run_goes_on_in_them() {
    let bench = Bench::new();
    let trackio = bench.path("trackio");
    tracked(&bench, "run", &trackio, &[ALL, "trainer.steps=1"]);
    let link = bench.read("run/trackio.json");
    tracked(&bench, "run", &trackio, &[ALL, "--resume"]);
    assert_eq!(bench.read("run/trackio.json"), link);
    assert_eq!(metrics(&bench, "run").len(), 4);
    let files = std::fs::read_dir(bench.path("run/tensorboard")).unwrap();
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 2, "a file a session: {files:?}");
    let holds = |file: &Path, text: &str| {
        let bytes = std::fs::read(file).unwrap();
        bytes.windows(text.len()).any(|w| w == text.as_bytes())
    };
    for file in &files {
        for text in ["brain.Event:2", "critic/score/mean", "samples/best", "train_batch_size"] {
            assert!(holds(file, text), "{text} in {}", file.display());
        }
    }
    assert!(trackio.join("firebrick.db").metadata().unwrap().len() > 0);
}

#[test]
fn a_quiet_run_says_nothing_and_an_unknown_tracker_is_refused() {
    let bench = Bench::new();
    let said = tracked(&bench, "run", &bench.path("trackio"), &["trainer.logger=file"]);
    let told: Vec<&str> = said.lines().filter(|line| !line.contains("WARN")).collect();
    assert_eq!(told, [""; 0], "{said}");
    let output = bench.firebrick("train", &["trainer.logger=[console, wandb]"]);
    refused(&output, &["trainer.logger", "tensorboard, trackio"]);
}

#[test]
fn a_profile_has_steps_phases_kernels_and_memory_and_changes_no_number() {
    let bench = Bench::new();
    let trackio = bench.path("trackio");
    tracked(&bench, "plain", &trackio, &[]);
    tracked(&bench, "profiled", &trackio, &["--profile", "2"]);
    assert_eq!(metrics(&bench, "plain"), metrics(&bench, "profiled"));
    assert!(!bench.path("plain/profile.pftrace").exists());
    let trace = std::fs::read(bench.path("profiled/profile.pftrace")).unwrap();
    let holds = |text: &str| trace.windows(text.len()).any(|w| w == text.as_bytes());
    for text in ["step 2", "step 3", "update_actor", "product", "backward 0", "memory: gradients"] {
        assert!(holds(text), "{text}");
    }
    assert!(!holds("step 1"), "the first step is left out");
}

#[test]
fn the_doctor_finds_a_device_and_says_what_an_empty_path_lacks() {
    let output = Command::new(super::program_path()).args(["doctor", "--json"]).env("PATH", "").output().unwrap();
    let checks: Vec<Value> = serde_json::from_str(&succeeded(&output)).unwrap();
    let of = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    assert_eq!(of("cpu")["status"], "ok");
    for name in ["Python", "MPI"] {
        assert_eq!(of(name)["status"], "missing", "{}", of(name));
        assert!(of(name)["fix"].as_str().unwrap().contains("install"));
    }
    let told = succeeded(&firebrick(&["doctor"]));
    assert!(told.contains("run folder") && told.contains("auto"), "{told}");
}

#[test]
fn the_doctor_runs_the_kernels_of_a_device_and_holds_them_to_their_formulas() {
    let output = firebrick(&["doctor", "--device", "cpu", "--json"]);
    let checks: Vec<Value> = serde_json::from_str(&succeeded(&output)).unwrap();
    for family in ["linear", "norm", "rotary", "attention", "paged attention", "scores", "sampling", "delta rule"] {
        let check = checks.iter().find(|check| check["name"] == format!("cpu {family} f32")).expect(family);
        assert_eq!(check["status"], "ok", "{check}");
        assert!(check["found"].as_str().unwrap().contains("from the formula"), "{check}");
    }
    let output = firebrick(&["doctor", "--device", "cuda:99"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("kernels of cuda:99"), "{}", stderr(&output));
}

#[test]
fn a_home_that_cannot_be_written_to_stops_no_run() {
    let bench = Bench::new();
    let home = bench.write("file", "");
    let within = |mut command: Command| {
        for name in ["XDG_CACHE_HOME", "HF_HOME", "LOCALAPPDATA"] {
            command.env_remove(name);
        }
        command.env("HOME", &home).output().unwrap()
    };
    succeeded(&within(bench.command("train", &["trainer.steps=1"])));
    let configuration = bench.path("new.yaml");
    succeeded(&within(program(&["new", "--model", "tiny", "--output", configuration.to_str().unwrap()])));
    let report = succeeded(&within(program(&["doctor"])));
    assert!(report.contains("cache") && report.contains("cannot be written to"), "{report}");
    refused(&within(program(&["generate", "--model", "owner/none", "--prompt", "a"])), &["HF_HOME"]);
}

#[test]
fn the_doctor_fails_where_nothing_can_train() {
    let bench = Bench::new();
    let file = bench.write("file", "");
    let inside = file.join("runs");
    let output = firebrick(&["doctor", "--output", inside.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("nothing can train"));
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(report.contains("FAILED") && report.contains("output="), "{report}");
}
