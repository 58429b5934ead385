//! Signals and time: they end a run after its step, with a checkpoint, or at once; closed pipes do not end it.

use super::resume::wait_for;
use super::{Bench, program, stderr, succeeded};
use crate::support::{fixtures, project};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A judge that waits as long as there is a file `hold`.
const JUDGE: &str = "while IFS= read -r line; do
    while [ -e hold ]; do echo > held; sleep 0.01; done
    id=${line#*\\\"id\\\":}
    echo \"{\\\"id\\\": ${id%%,*}, \\\"reward\\\": 1.0}\"
done
";

const LONG: [&str; 3] = ["trainer.steps=400", "trainer.val_before_train=false", "trainer.save_freq=-1"];

/// A run whose judge can be held up.
struct Held {
    bench: Bench,
    task: String,
    run: Child,
}

fn send(signal: &str, to: &Child) {
    assert!(Command::new("kill").args([signal, &to.id().to_string()]).status().unwrap().success());
}

/// The exit code as a shell reports it, which comes within a minute.
fn code(run: &mut Child) -> i32 {
    let started = Instant::now();
    let status: ExitStatus = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > Duration::from_mins(1) {
            run.kill().unwrap();
            panic!("the run does not end");
        }
        std::thread::sleep(Duration::from_millis(3));
    };
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
}

fn bench_with_judge() -> (Bench, String) {
    let bench = Bench::new();
    bench.write("judge.sh", JUDGE);
    bench.write("rows.jsonl", "{\"q\": \"1+1=\", \"a\": \"2\"}\n{\"q\": \"2+1=\", \"a\": \"3\"}\n");
    let task = format!(
        "task={{kind: jsonl, train: {}, prompt: '{{q}}', answer_field: a, rewards: [{{kind: command, command: [sh, \
         judge.sh], folder: {}}}]}}",
        bench.path("rows.jsonl").display(),
        bench.path("").display()
    );
    (bench, task)
}

fn model() -> String {
    format!("model={{path: {}}}", fixtures().join("models/qwen2-tied").display())
}

impl Held {
    /// A run that is held up in a step after so many.
    fn after(steps: usize, more: &[&str]) -> Self {
        let (bench, task) = bench_with_judge();
        if steps == 0 {
            bench.write("hold", "");
        }
        let said = std::fs::File::create(bench.path("said")).unwrap();
        let mut command = bench.command("train", &[&LONG[..], &[&task, &model()], more].concat());
        let run = command.stdout(Stdio::null()).stderr(said).spawn().unwrap();
        let held = Self { bench, task, run };
        wait_for("no steps", || {
            assert!(!held.said().contains("error: "), "{}", held.said());
            held.steps() >= steps
        });
        held.bench.write("hold", "");
        wait_for("no judge", || held.bench.path("held").exists());
        held
    }

    /// Steps whose metrics are written.
    fn steps(&self) -> usize {
        let lines = std::fs::read_to_string(self.bench.path("run/metrics.jsonl")).unwrap_or_default();
        lines.lines().count().saturating_sub(1)
    }

    fn said(&self) -> String {
        self.bench.read("said")
    }

    fn release(&self) {
        std::fs::remove_file(self.bench.path("hold")).unwrap();
    }

    /// The run must have ended with a code and a message that has all of these.
    fn ended(mut self, expected: i32, parts: &[&str]) {
        let code = code(&mut self.run);
        let said = self.said();
        assert_eq!(code, expected, "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is not in: {said}");
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // fails for a run that has ended
        let _ = self.run.kill();
    }
}

#[test]
fn a_signal_finishes_the_step_and_saves_it_and_the_resumed_run_is_the_undisturbed_one() {
    for (signal, name) in [("-INT", "SIGINT"), ("-TERM", "SIGTERM")] {
        let mut held = Held::after(2, &[]);
        send(signal, &held.run);
        wait_for("no answer", || held.said().contains(name));
        held.release();
        let code = code(&mut held.run);
        let (said, steps) = (held.said(), held.steps());
        assert_eq!(code, 75, "{said}");
        for part in [
            format!("{name}: the run ends with a checkpoint after step {steps}, predicted in "),
            format!("stopped: {steps} of 400 steps in "),
            format!("stopped after step {steps} of 400; continue with --resume"),
        ] {
            assert!(said.contains(&part), "{part:?} is not in: {said}");
        }
        let bench = &held.bench;
        assert!(bench.path(&format!("run/checkpoints/step-{steps:06}")).is_dir());
        let rest = format!("trainer.steps={}", steps + 1);
        let model = model();
        let settings = ["trainer.val_before_train=false", &held.task, &model, &rest];
        succeeded(&bench.firebrick("train", &[&settings[..], &["--resume"]].concat()));
        let whole = format!("output={}", bench.path("whole").display());
        succeeded(&bench.firebrick("train", &[&settings[..], &[&whole]].concat()));
        assert_eq!(bench.read("run/samples.jsonl"), bench.read("whole/samples.jsonl"));
    }
}

#[test]
fn a_second_signal_ends_the_run_at_once_and_says_what_is_lost() {
    let held = Held::after(2, &["trainer.grace_seconds=1000"]);
    send("-INT", &held.run);
    wait_for("no answer", || held.said().contains("a second signal ends it at once"));
    let lost = format!("steps 1 to {} are lost; there is no checkpoint yet", held.steps() + 1);
    send("-TERM", &held.run);
    held.ended(143, &["the run ended at once (a second signal (SIGTERM)): ", &lost]);
}

#[test]
fn a_step_that_takes_longer_than_predicted_ends_with_the_grace_period() {
    let held = Held::after(3, &["trainer.grace_seconds=4", "trainer.save_freq=2"]);
    // on a busy machine an earlier step may have taken longer than the grace period
    std::thread::sleep(Duration::from_secs(2));
    send("-TERM", &held.run);
    held.ended(143, &["ends with a checkpoint", "trainer.grace_seconds (4) have passed", "continue after step "]);
}

#[test]
fn a_step_that_is_predicted_to_take_longer_ends_at_once() {
    let held = Held::after(2, &["trainer.grace_seconds=0", "trainer.save_freq=1"]);
    let step = held.steps();
    wait_for("no checkpoint", || held.bench.path(&format!("run/checkpoints/step-{step:06}")).exists());
    let lost = format!("step {} is lost; continue after step {step}, the last checkpoint, with --resume", step + 1);
    send("-INT", &held.run);
    held.ended(130, &["SIGINT: ", "s to a checkpoint, trainer.grace_seconds is 0", &lost]);
    let first = Held::after(0, &[]);
    send("-TERM", &first.run);
    first.ended(
        143,
        &["no earlier step predicts when this one ends", "step 1 is lost", "--resume starts the run again"],
    );
}

#[test]
fn a_run_of_supervised_training_stops_too() {
    let bench = Bench::new();
    bench.write("rows.jsonl", "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n");
    let rows = format!("sft={{train: {}, batch_size: 1, steps: 100000}}", bench.path("rows.jsonl").display());
    let mut command = bench.command("sft", &[&rows, "--quiet"]);
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let lines = || std::fs::read_to_string(bench.path("run/metrics.jsonl")).unwrap_or_default().lines().count();
    wait_for("no steps", || lines() > 3);
    send("-TERM", &run);
    assert_eq!(code(&mut run), 75);
    assert!(bench.path(&format!("run/checkpoints/step-{:06}", lines() - 1)).is_dir());
}

#[cfg(all(feature = "mpi", target_os = "linux"))]
#[test]
fn a_signal_to_one_of_two_ranks_stops_both_after_the_same_step() {
    use super::kills::{children, launcher};
    for signalled in [0..1, 1..2, 0..2] {
        let bench = Bench::new();
        let config = bench.path("config.yaml");
        let mut command = launcher(2);
        command.args(["train", config.to_str().unwrap(), "--quiet"]).args(LONG);
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let lines = || std::fs::read_to_string(bench.path("run/metrics.jsonl")).unwrap_or_default().lines().count();
        wait_for("no steps", || lines() > 3);
        for rank in &children(run.id())[signalled] {
            assert!(Command::new("kill").args(["-TERM", &rank.to_string()]).status().unwrap().success());
        }
        assert_eq!(code(&mut run), 75);
        let checkpoints = std::fs::read_dir(bench.path("run/checkpoints")).unwrap();
        let names: Vec<_> = checkpoints.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(names, [format!("step-{:06}", lines() - 1)]);
    }
}

#[test]
fn a_closed_terminal_and_closed_pipes_do_not_end_a_run() {
    let mut held = Held::after(1, &["trainer.steps=4"]);
    send("-HUP", &held.run);
    wait_for("no answer", || held.said().contains("SIGHUP: the terminal is gone, the run continues"));
    held.release();
    assert_eq!(code(&mut held.run), 0, "{}", held.said());
    assert_eq!(held.steps(), 4);

    let bench = Bench::new();
    let mut command = bench.command("train", &["trainer.steps=4"]);
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop((run.stdout.take(), run.stderr.take()));
    assert_eq!(code(&mut run), 0);
    assert_eq!(bench.read("run/metrics.jsonl").lines().count(), 5);
    assert!(bench.read("run/summary.json").contains("\"steps\": 4"));
}

#[test]
fn a_session_that_ends_in_time_and_a_run_that_ends_have_other_codes() {
    let bench = Bench::new();
    let limit = ["trainer.steps=2", "trainer.max_minutes=1e-9", "--resume"];
    let first = bench.firebrick("train", &limit);
    assert_eq!(first.status.code(), Some(75), "{}", stderr(&first));
    assert!(stderr(&first).contains("trainer.max_minutes: the session ends after step 1"), "{}", stderr(&first));
    let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
    assert_eq!((summary["steps"].as_u64(), summary["max_steps"].as_u64()), (Some(1), Some(2)));
    succeeded(&bench.firebrick("train", &limit));
}

#[test]
fn the_exit_codes_of_the_table_are_those_of_the_program() {
    let page = std::fs::read_to_string(project().join("docs/reference/cli.md")).unwrap();
    let (_, table) = page.split_once("Exit codes:\n").expect("a table");
    let rows = table.lines().take_while(|line| !line.is_empty()).map(|line| line.split_whitespace().next().unwrap());
    // 4 to 6 and 75 have tests of their own
    assert_eq!(rows.collect::<Vec<_>>(), ["0", "1", "2", "3", "4", "5", "6", "75", "128+N"]);
    let bench = Bench::new();
    let import = bench.write("run.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.nam=vllm\n");
    let full = |command: &mut Command| {
        let full = std::fs::File::create("/dev/full").unwrap();
        command.stdout(full).output().unwrap()
    };
    let codes = [
        program(&["completions", "bash"]).output().unwrap(),
        full(&mut program(&["completions", "bash"])),
        program(&["train", "no/such.yaml"]).output().unwrap(),
        program(&["import", import.to_str().unwrap()]).output().unwrap(),
    ];
    assert_eq!(codes.map(|output| output.status.code()), [Some(0), Some(1), Some(2), Some(3)]);
}
