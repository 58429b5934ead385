//! The program as its users meet it: run as a process, judged by its exit code, its messages and the files it leaves.

mod adapters;
mod bad_input;
mod commands;
mod config;
mod corruptions;
mod data;
#[cfg(target_os = "linux")]
mod disk;
mod dry_run;
mod ends;
mod expert_adapters;
mod families;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod gpu_memory;
#[cfg(target_os = "linux")]
mod hangs;
mod hostile;
mod hub;
mod import;
#[cfg(unix)]
mod install;
#[cfg(target_os = "linux")]
mod kills;
mod links;
mod memory;
mod messages;
mod non_finite;
mod objectives;
mod plan;
mod plan_stages;
mod ppo;
mod precision;
mod programs;
mod quantization;
mod quantized_base;
mod readings;
mod replay;
mod report;
mod resume;
mod reward_models;
mod rewards;
mod rollout;
mod runs;
mod saves;
mod sft;
mod shared_trunk;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod shortage;
#[cfg(unix)]
mod signals;
mod streams;
mod timeline;
mod tokens;
mod trackers;
mod unjudged;
mod validation;
mod watch;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder for one test and a configuration in it.
pub struct Bench {
    dir: tempfile::TempDir,
}

/// A run that takes about a second: a two-layer decoder that learns to add single digits.
const TINY: &str = "
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, validation_size: 10}
output: OUTPUT
device: cpu
rollout: {n: 4, prompt_length: 6, response_length: 4}
optim: {lr: 1.0e-3}
trainer: {steps: 3, train_batch_size: 4, seed: 5}
";

impl Bench {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bench = Self { dir };
        bench.write("config.yaml", &TINY.replace("OUTPUT", bench.path("run").to_str().unwrap()));
        bench
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// `firebrick COMMAND config.yaml ARGS…`
    pub fn firebrick(&self, command: &str, args: &[&str]) -> Output {
        self.command(command, args).output().unwrap()
    }

    /// The same, not started.
    pub fn command(&self, command: &str, args: &[&str]) -> Command {
        let config = self.path("config.yaml");
        let args = [&[command, config.to_str().unwrap()], args].concat();
        let mut command = program(&args);
        command.current_dir(self.dir.path());
        command
    }
}

/// Runs the program.
pub fn firebrick(args: &[&str]) -> Output {
    program(args).output().unwrap()
}

/// The program where Cargo built it, or beside this one where both were packed for another machine.
pub fn program_path() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_firebrick"));
    if built.exists() { built } else { std::env::current_exe().expect("a path").with_file_name("firebrick") }
}

pub fn program(args: &[&str]) -> Command {
    let mut command = Command::new(program_path());
    command.args(args).env_remove("FIREBRICK_LOG");
    command
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The run must have succeeded; gives what it printed on stdout.
pub fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{:?}\n{}", output.status, stderr(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The run must have ended with the exit code for users' mistakes and a message that holds all of these.
pub fn refused(output: &Output, parts: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// Copies a fixture model, so that a test can damage it.
pub fn copy_model(name: &str, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(crate::support::fixtures().join("models").join(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}
