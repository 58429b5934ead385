//! `firebrick watch`, and what a run shows while it runs.

use super::{Bench, firebrick, refused, stderr, succeeded};
use serde_json::Value;

impl Bench {
    fn watch(&self, run: &str, args: &[&str]) -> std::process::Output {
        let path = self.path(run);
        firebrick(&[&["watch", path.to_str().unwrap()], args].concat())
    }
}

#[test]
fn watch_shows_a_run_that_has_ended_with_the_numbers_of_its_files() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &[]));
    let shown = succeeded(&bench.watch("run", &[]));
    assert_eq!(shown.lines().count(), 24, "{shown}");
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    let metrics = bench.read("run/metrics.jsonl");
    let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    let reward = last["critic/score/mean"].as_f64().unwrap();
    let samples = bench.read("run/samples.jsonl");
    let newest: Value = serde_json::from_str(samples.lines().last().unwrap()).unwrap();
    for part in [
        "run  step 3 of 3",
        "finished",
        "truncated",
        "no spread",
        "mismatch",
        "update_actor",
        "planned",
        "newest of step 3",
        newest["prompt"].as_str().unwrap(),
        "q leave",
        &format!("{reward:.3}"),
    ] {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    assert!(!shown.contains('\x1b'));
    let large = succeeded(&bench.watch("run", &["--size", "150x40"]));
    assert_eq!(large.lines().count(), 40);
    assert!(large.contains("best of step 3") && large.contains("worst of step 3"));
}

#[test]
fn watch_shows_a_run_that_was_cut_off_and_what_its_log_warned_of() {
    let bench = Bench::new();
    // partly right answers are rewarded, so that the run itself warns of nothing
    succeeded(&bench.firebrick("train", &["task.partial=true"]));
    std::fs::remove_file(bench.path("run/summary.json")).unwrap();
    let metrics = bench.read("run/metrics.jsonl");
    let two = metrics.lines().take(3).collect::<Vec<_>>().join("\n");
    bench.write("run/metrics.jsonl", &format!("{two}\n{{\"training/glo"));
    let log = bench.read("run/run.log") + "2026-11-23T01:02:03Z  WARN something is odd\n";
    bench.write("run/run.log", &log);
    let shown = succeeded(&bench.watch("run", &["--once"]));
    assert!(shown.contains("step 2 of 3"), "{shown}");
    assert!(!shown.contains("finished"), "{shown}");
    assert!(shown.contains("1 warning") && shown.contains("something is odd"));
}

#[test]
fn watch_refuses_what_is_no_run_and_a_size_that_is_none() {
    let bench = Bench::new();
    refused(&bench.watch("nowhere", &[]), &["nowhere", "no such run folder"]);
    let size = bench.watch("run", &["--size", "80"]);
    refused(&size, &["80x24"]);
}

#[test]
fn a_run_in_a_pipe_prints_lines_and_a_quiet_one_nothing_and_both_keep_a_log() {
    let bench = Bench::new();
    let plain = bench.firebrick("train", &["--plain", "trainer.save_freq=2", "task.partial=true"]);
    assert_eq!(succeeded(&plain), "");
    let said = stderr(&plain);
    assert!(said.contains("train 3/3 reward") && said.contains("finished: 3 steps"));
    assert!(!said.contains('\x1b'), "{said:?}");
    let log = bench.read("run/run.log");
    assert!(log.contains(" INFO saved step-000002\n"), "{log}");
    assert!(log.lines().all(|line| line.contains("Z  INFO ")), "{log}");
    let quiet = bench.firebrick("train", &["--quiet", "output=quiet", "task.partial=true"]);
    assert_eq!(succeeded(&quiet), "");
    assert_eq!(stderr(&quiet), "");
    assert!(bench.read("quiet/run.log").contains(" INFO training "));
    let both = bench.firebrick("train", &["--quiet", "--plain", "output=both"]);
    refused(&both, &["--plain"]);
}
