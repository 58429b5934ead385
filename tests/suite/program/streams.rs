//! Standard output and standard error: who reads them, who stops reading, and what is written there.

use super::{Bench, firebrick, program, refused, stderr};
use std::io::pipe;
use std::process::{Command, ExitStatus, Stdio};

/// Runs a program whose output goes into a pipe that nobody reads, as `… 2>&1 | head` leaves it.
fn unread(mut command: Command) -> ExitStatus {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    command.stdin(Stdio::null()).stdout(writer.try_clone().unwrap()).stderr(writer).status().unwrap()
}

#[test]
fn a_run_whose_output_nobody_reads_goes_on_to_its_end() {
    let bench = Bench::new();
    let mut command = bench.command("train", &["warmup.sft.steps=2", "trainer.test_freq=2"]);
    command.env("FIREBRICK_LOG", "debug");
    let status = unread(command);
    assert_eq!(status.code(), Some(0), "{status}");
    let steps = bench.read("run/metrics.jsonl").lines().count();
    assert_eq!(steps, 4, "a line of the warm-up and one for each step");
    assert_eq!(bench.read("run/samples.jsonl").lines().count(), 3 * 16);
    assert!(bench.read("run/summary.json").ends_with("}\n"));
    let model = bench.path("run/checkpoints/step-000003/model/model.safetensors");
    assert!(model.exists());
}

#[test]
fn results_that_nobody_reads_are_no_failure() {
    let bench = Bench::new();
    let model = crate::support::fixtures().join("models/llama-gqa");
    let model = model.to_str().unwrap();
    let generate = ["generate", "--model", model, "--prompt", "Jean", "-n", "2"];
    for command in [
        bench.command("plan", &["--json"]),
        bench.command("plan", &[]),
        bench.command("bench", &["--steps", "1"]),
        bench.command("eval", &["--json"]),
        program(&[&generate[..], &["--device", "cpu"]].concat()),
        program(&["devices"]),
        program(&["--help"]),
    ] {
        let said = format!("{command:?}");
        let status = unread(command);
        assert_eq!(status.code(), Some(0), "{said}: {status}");
    }
}

#[test]
fn an_error_that_nobody_reads_keeps_its_exit_code() {
    let status = unread(program(&["train", "no/such.yaml"]));
    assert_eq!(status.code(), Some(2), "{status}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_result_that_cannot_be_written_is_an_error() {
    let bench = Bench::new();
    let mut command = bench.command("plan", &["--json"]);
    let full = std::fs::File::create("/dev/full").unwrap();
    let output = command.stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(message.contains("cannot write to stdout"), "{message}");
}

#[test]
fn an_error_gives_its_cause_once() {
    let missing = "os error 2";
    let bench = Bench::new();
    let dataset = "task={kind: jsonl, train: nowhere.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: exact}]}";
    let broken = bench.path("broken");
    std::fs::create_dir_all(broken.join("config.json")).unwrap();
    let broken = broken.to_str().unwrap();
    for (output, cause) in [
        (firebrick(&["train", "no/such.yaml"]), missing),
        (bench.firebrick("train", &[dataset]), missing),
        (firebrick(&["generate", "--model", broken, "--prompt", "x"]), "os error"),
        (bench.firebrick("train", &["optim.lr_scheduler.warmup_ratio=2"]), "found 2"),
        (bench.firebrick("train", &["task.difficulty=0"]), "difficulty"),
    ] {
        refused(&output, &[cause]);
        let message = stderr(&output);
        assert_eq!(message.matches(cause).count(), 1, "{message}");
    }
}

/// Mesa's device selection asks libwayland for the compositor's GPU, which writes `error: XDG_RUNTIME_DIR is invalid or
/// not set`.
#[cfg(target_os = "linux")]
#[test]
fn a_machine_without_a_display_server_is_no_error() {
    let mut command = program(&["devices"]);
    for variable in ["XDG_RUNTIME_DIR", "WAYLAND_DISPLAY", "WAYLAND_SOCKET"] {
        command.env_remove(variable);
    }
    let output = command.output().unwrap();
    assert!(output.status.success());
    // software adapters write a warning of their own
    let message = stderr(&output);
    assert!(!message.contains("error:"), "{message}");
}
