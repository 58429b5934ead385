//! Runs that are killed (SIGKILL) at any moment, several times in a row, and resumed: they leave what the undisturbed run
//! leaves, no line twice and none missing.
//!
//! A kill comes at a random time, which may lie in sampling, judging, an update, a warm-up or a validation, or at a
//! random operation on a file of the run: a write, which is then half done, a rename, a removal. The nightly test
//! `kills` takes many.

use super::corruptions::{checkpoint, files, learnt, random};
use super::{Bench, adapters, expert_adapters, program_path, stderr};
use crate::support::{campaign_points, is_campaign, project};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::load;
use firebrick_engine::metrics::is_of_a_machine;
use firebrick_engine::trainer::{Start, Trainer};
use rayon::prelude::*;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// Settings of all runs.
const SHORT: [&str; 9] = [
    "trainer.steps=5",
    "trainer.train_batch_size=2",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.val_max_samples=4",
    "trainer.max_ckpt_to_keep=2",
    "trainer.log_tokens=1",
    "trainer.seed=5",
    "rollout.n=2",
];
const STEPS: u64 = 5;

/// Most kills of a run.
const MOST: u64 = 3;

/// Points of the test; the nightly test takes more.
const SAMPLE: u64 = 20;

/// Names the arguments of the process of two ranks.
const RANKS: &str = "FIREBRICK_KILLED_RANKS";

/// A run, and what it leaves undisturbed.
struct Case {
    name: &'static str,
    config: PathBuf,
    settings: Vec<String>,
    /// Processes or threads.
    ranks: usize,
    seconds: f64,
    /// Operations on files of its folder.
    operations: u64,
    left: Left,
}

/// When a process is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Never,
    After(Duration),
    Operation(u64),
}

/// All that a run leaves, without times and memory.
#[derive(Debug, Default, PartialEq)]
struct Left {
    checkpoint: BTreeMap<String, Vec<u8>>,
    metrics: Vec<Map<String, Value>>,
    /// Steps and phases of the memory readings.
    readings: Vec<[Value; 2]>,
    /// Files that are compared by their bytes.
    whole: Vec<Option<String>>,
    names: Vec<PathBuf>,
}

fn lines(file: &Path) -> Vec<Map<String, Value>> {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

impl Left {
    fn by(run: &Path) -> Self {
        let mut metrics = lines(&run.join("metrics.jsonl"));
        for line in &mut metrics {
            line.retain(|name, _| !is_of_a_machine(name));
        }
        let readings = lines(&run.join("memory.jsonl"));
        let whole = ["samples.jsonl", "tokens.jsonl", "best.json"];
        Self {
            checkpoint: learnt(&checkpoint(run, STEPS)),
            metrics,
            readings: readings.into_iter().map(|line| ["step", "phase"].map(|key| line[key].clone())).collect(),
            whole: whole.map(|name| fs::read_to_string(run.join(name)).ok()).into(),
            names: files(run).into_iter().map(|file| file.strip_prefix(run).unwrap().to_owned()).collect(),
        }
    }

    /// The first difference from another.
    fn difference(&self, other: &Self) -> Option<String> {
        let [names, others] = [&self.names, &other.names];
        if names != others {
            let extra: Vec<_> = others.iter().filter(|name| !names.contains(name)).collect();
            let missing: Vec<_> = names.iter().filter(|name| !others.contains(name)).collect();
            return Some(format!("files {extra:?} are left, {missing:?} are missing"));
        }
        let weights = self.checkpoint.iter().find(|(name, bytes)| other.checkpoint.get(*name) != Some(*bytes));
        if let Some((name, _)) = weights {
            return Some(format!("another {name}"));
        }
        let lengths = [self, other].map(|left| (left.metrics.len(), left.readings.len()));
        let steps = self.metrics.iter().zip(&other.metrics).position(|(a, b)| a != b);
        match (lengths[0] == lengths[1], steps) {
            (false, _) => Some(format!("lines of metrics and memory: {lengths:?}")),
            (_, Some(step)) => Some(format!("other metrics of step {step}")),
            _ if self.readings != other.readings => Some("other readings of memory".into()),
            _ if self.whole != other.whole => Some("other samples, tokens or best.json".into()),
            _ => (self != other).then(|| "something else".into()),
        }
    }
}

impl Case {
    fn new(bench: &Bench, name: &'static str, config: PathBuf, settings: &[&str], ranks: usize) -> Self {
        let settings = SHORT.iter().chain(settings).map(|s| (*s).to_owned()).collect();
        let mut case = Self { name, config, settings, ranks, seconds: 0.0, operations: 0, left: Left::default() };
        let run = bench.path(&format!("{name}/run"));
        let began = Instant::now();
        let output = case.attempt(bench, &run, Moment::Never);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        case.seconds = began.elapsed().as_secs_f64();
        let counts = bench.read(&format!("{name}/count"));
        case.operations = counts.lines().map(|count| count.parse().unwrap()).max().unwrap();
        case.left = Left::by(&run);
        assert_eq!(case.left.metrics.len() as u64, STEPS + 1);
        case
    }

    /// The process of the run, or the launcher of its processes.
    fn command(&self, run: &Path) -> Command {
        let output = format!("output={}", run.display());
        let config = self.config.to_str().unwrap();
        let settings = self.settings.iter().map(String::as_str).chain([output.as_str()]);
        if self.ranks > 1 && cfg!(not(feature = "mpi")) {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", "program::kills::the_process_of_two_ranks"]);
            let args: Vec<&str> = [config].into_iter().chain(settings).collect();
            command.env(RANKS, serde_json::to_string(&args).unwrap());
            return command;
        }
        let mut command = if self.ranks > 1 { launcher(self.ranks) } else { Command::new(program_path()) };
        command.args(["train", config, "--resume", "--quiet"]).args(settings);
        command
    }

    /// The run's process, from its start or its last checkpoint to its end or the kill.
    fn attempt(&self, bench: &Bench, run: &Path, moment: Moment) -> Output {
        let beside = |name: &str| run.with_file_name(name);
        fs::create_dir_all(run.parent().unwrap()).unwrap();
        let mut command = self.command(run);
        command.env_remove("FIREBRICK_LOG").env("RAYON_NUM_THREADS", "1");
        if let Moment::Never | Moment::Operation(_) = moment {
            let at = if let Moment::Operation(at) = moment { at } else { 0 };
            command.env("LD_PRELOAD", bench.path("kill_at.so")).env("KILL_IN", run).env("KILL_AT", at.to_string());
            command.env("KILL_SAID", beside("said")).env("KILL_COUNT", beside("count"));
        }
        let process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        if let Moment::After(time) = moment {
            std::thread::sleep(time);
            let ranks = children(process.id());
            for rank in if self.ranks > 1 && !ranks.is_empty() { ranks } else { vec![process.id()] } {
                // it may have ended
                let _ = Command::new("kill").args(["-KILL", &rank.to_string()]).stderr(Stdio::null()).status();
            }
        }
        process.wait_with_output().unwrap()
    }

    /// Kills and resumes a run, which then ends: its kills, or what is wrong.
    fn outcome(&self, bench: &Bench, point: u64) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir_in(bench.path("")).unwrap();
        let run = folder.path().join("run");
        let mut kills = Vec::new();
        let number = |kill: u64, which: u64, below: u64| random(16 * point + 4 * kill + which, below);
        for kill in 0..=number(MOST, 0, MOST) {
            let moment = if number(kill, 1, 2) == 0 {
                let thousandths = number(kill, 2, 1000) as f64;
                Moment::After(Duration::from_secs_f64(self.seconds * thousandths / 1000.0))
            } else {
                Moment::Operation(1 + number(kill, 2, self.operations))
            };
            let output = self.attempt(bench, &run, moment);
            if was_killed(output.status) || (self.ranks > 1 && !output.status.success()) {
                let said = fs::read_to_string(folder.path().join("said")).unwrap_or_default();
                let operation = said.lines().last().unwrap_or("an operation").to_owned();
                kills.push(if let Moment::After(_) = moment { "a time".into() } else { operation });
            } else if output.status.success() {
                break;
            } else {
                return Err(format!("{}, {moment:?} after {kills:?}: {}", self.name, stderr(&output)));
            }
        }
        let output = self.attempt(bench, &run, Moment::Never);
        if !output.status.success() {
            return Err(format!("{}, resumed after {kills:?}: {}", self.name, stderr(&output)));
        }
        match self.left.difference(&Left::by(&run)) {
            Some(difference) => Err(format!("{}, resumed after {kills:?}: {difference}", self.name)),
            None => Ok(kills),
        }
    }
}

fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(9)
}

/// The program as so many ranks; its arguments are to follow.
pub fn launcher(ranks: usize) -> Command {
    let mut launcher = Command::new("mpirun");
    launcher.args(["--oversubscribe", "-n", &ranks.to_string()]).arg(program_path());
    launcher.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    launcher.envs([("OMPI_MCA_plm", "isolated"), ("OMPI_MCA_btl_vader_single_copy_mechanism", "none")]);
    launcher
}

/// Processes that a process has started.
pub fn children(parent: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[test]
#[ignore = "the test of kills starts it, where the program is built without MPI"]
fn the_process_of_two_ranks() {
    let args: Vec<String> = serde_json::from_str(&std::env::var(RANKS).expect("arguments")).unwrap();
    let config = load(Path::new(&args[0]), &args[1..]).unwrap();
    let done = Threads::run(2, Settings::default(), |rank| {
        let run = Trainer::builder(config.clone()).world(rank).start(Start::Resume).run();
        run.map(drop).map_err(|error| error.to_string())
    });
    assert!(done.iter().all(|rank| *rank == Ok(Ok(()))), "{done:?}");
}

/// PPO with a critic and a reference, adapters, a mixture of experts, a tool, and two ranks; all but the adapters with a
/// warm-up.
fn cases(bench: &Bench) -> Vec<Case> {
    let (_, base) = adapters::base(bench);
    let own = || bench.path("config.yaml");
    let warm_up = "warmup.sft={steps: 4, optim: {lr: 0.01}}";
    let best = "trainer.keep_best=val-core/arithmetic/reward";
    let critic = ["objective={name: ppo, kl_loss_coef: 0.05}", "critic={optim: {lr: 0.01}}", warm_up, best];
    let lora = ["model.arch=null", &base, "model.lora.rank=2", "model.lora.dropout=0.1", "objective=grpo"];
    let experts = [expert_adapters::QWEN3, warm_up];
    let tool = [
        "task.digits=1",
        "task.validation_size=4",
        "model.arch.hidden_size=32",
        "model.arch.intermediate_size=64",
        "model.arch.num_hidden_layers=2",
        "model.arch.num_attention_heads=2",
        "warmup.sft={steps: 40, until_reward: null, batch_size: 16, optim: {lr: 0.01}}",
    ];
    let ranks = ["memory.zero_stage=2", warm_up];
    vec![
        Case::new(bench, "critic", own(), &critic, 1),
        Case::new(bench, "adapters", own(), &lora, 1),
        Case::new(bench, "experts", own(), &experts, 1),
        Case::new(bench, "tool", project().join("examples/calculator.yaml"), &tool, 1),
        Case::new(bench, "ranks", own(), &ranks, 2),
    ]
}

#[test]
fn a_run_that_is_killed_again_and_again_leaves_what_the_undisturbed_run_leaves() {
    let bench = Bench::new();
    let source = bench.write("kill_at.c", include_str!("kills/kill_at.c"));
    let library = bench.path("kill_at.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    let cases = cases(&bench);
    let calls = lines(&bench.path("tool/run/samples.jsonl")).iter().filter(|sample| sample["num_turns"] == 2).count();
    assert!(calls > 0, "no rollout calls the tool");
    let points = campaign_points().filter(|_| is_campaign("kills")).unwrap_or(0..SAMPLE);
    let outcomes: Vec<_> =
        points.into_par_iter().map(|point| cases[point as usize % cases.len()].outcome(&bench, point)).collect();
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    let (mut passed, mut failures) = (0, Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(kills) => {
                passed += 1;
                for kill in kills {
                    let kind = kill.split('/').next().unwrap_or_default().trim().to_owned();
                    *counts.entry(kind).or_default() += 1;
                }
            }
            Err(failure) => failures.push(failure),
        }
    }
    let summary = format!("kills at {counts:?}\n{passed} passed, {} failed\n", failures.len());
    std::io::stderr().write_all(summary.as_bytes()).unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    assert!(!counts.is_empty());
}
