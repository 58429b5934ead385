//! Learning curves: GRPO, PPO, RLOO, DAPO and GSPO on two-digit sums, three seeds each, from the same warmed-up policy.
//!
//! `cargo bench --no-default-features --bench curves [-- DIR]` trains what is not yet in DIR (`runs/curves`), at most
//! `JOBS` runs (2) at a time on one thread each, draws `docs/curves.svg` and prints a table. `FIREBRICK` names a built
//! program. About half an hour on two idle cores. It can be stopped and started again.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/plot.rs"]
mod plot;
#[path = "support/results.rs"]
mod results;

use plot::{COLOURS, Chart, Line};
use results::{Figures, rounded};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Seeds, and the steps of each: the third begins lowest, and 150 steps do not take all algorithms to nine in ten.
const SEEDS: [(u64, u64); 3] = [(1, 150), (2, 150), (3, 240)];
const SCORE: &str = "val-core/arithmetic/reward";

struct Algorithm {
    name: &'static str,
    config: &'static str,
    settings: &'static [&'static str],
}

/// 768 completions a step for all of them, at the examples' learning rates. Four optimizer steps over those, so that
/// ratios leave one and the objectives differ; two for RLOO, whose ratio is of whole completions and which does not
/// divide by a deviation.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm { name: "grpo", config: "arithmetic.yaml", settings: &GROUPS },
    Algorithm {
        name: "ppo",
        config: "ppo_arithmetic.yaml",
        settings: &["trainer.train_batch_size=768", "update.ppo_epochs=1", "update.ppo_mini_batch_size=192"],
    },
    Algorithm {
        name: "rloo",
        config: "arithmetic.yaml",
        settings: &["objective=rloo", "trainer.train_batch_size=96", "rollout.n=8", "update.ppo_mini_batch_size=48"],
    },
    Algorithm {
        name: "dapo",
        config: "arithmetic.yaml",
        settings: &["objective=dapo", GROUPS[0], GROUPS[1], GROUPS[2]],
    },
    Algorithm {
        name: "gspo",
        config: "arithmetic.yaml",
        settings: &["objective=gspo", GROUPS[0], GROUPS[1], GROUPS[2]],
    },
];

const GROUPS: [&str; 3] = ["trainer.train_batch_size=96", "rollout.n=8", "update.ppo_mini_batch_size=24"];

fn main() {
    // cargo hands `--bench` to every bench
    let named = std::env::args().skip(1).find(|a| !a.starts_with("--"));
    let dir = PathBuf::from(named.unwrap_or_else(|| "runs/curves".into()));
    std::fs::create_dir_all(&dir).expect("a folder for the runs");
    let dir = dir.canonicalize().expect("the folder");
    in_parallel(SEEDS.map(|(seed, _)| start(&dir, seed)).into());
    let runs = SEEDS.iter().flat_map(|&(seed, steps)| {
        let dir = &dir;
        ALGORITHMS.iter().map(move |own| run(dir, own, seed, steps))
    });
    in_parallel(runs.collect());
    let curves: Vec<Vec<Curve>> =
        ALGORITHMS.iter().map(|own| SEEDS.map(|(seed, _)| curve(&output(&dir, own.name, seed))).into()).collect();
    draw(&curves);
    print!("{}", table(&curves));
    let rows = ALGORITHMS.iter().zip(&curves).flat_map(|(own, curves)| {
        SEEDS.iter().zip(curves).map(move |((seed, steps), curve)| {
            let [before, after] = [curve[0].1, curve[curve.len() - 1].1].map(|accuracy| rounded(100.0 * accuracy, 1));
            vec![own.name.into(), (*seed).into(), (*steps).into(), before, after, reached(curve).into()]
        })
    });
    Figures {
        bench: "curves",
        title: "Five algorithms",
        command: "cargo bench --no-default-features --bench curves",
        what: "Two-digit sums from one warmed-up policy per seed, 768 completions per step, 150 steps (240 for seed 3).",
        columns: &["algorithm", "seed", "steps", "before, %", "after, %", "90 % at step"],
        rows: rows.collect(),
    }
    .write();
}

/// The first step at which nine in ten are right.
fn reached(curve: &[(u64, f64)]) -> Option<u64> {
    curve.iter().find(|point| point.1 >= 0.9).map(|point| point.0)
}

fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn output(dir: &Path, name: &str, seed: u64) -> PathBuf {
    dir.join(format!("{name}-{seed}"))
}

/// A training run, if it is not yet there.
fn training(config: &str, output: &Path, settings: Vec<String>) -> Option<Command> {
    if output.join("summary.json").is_file() {
        return None;
    }
    if output.is_dir() {
        std::fs::remove_dir_all(output).expect("what an unfinished run left");
    }
    let program = std::env::var("FIREBRICK").unwrap_or(env!("CARGO_BIN_EXE_firebrick").into());
    let mut command = Command::new(program);
    command
        .arg("train")
        .arg(project().join("examples").join(config))
        .args(settings)
        .arg(format!("output={}", output.display()))
        .env("RAYON_NUM_THREADS", "1")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Some(command)
}

/// The supervised warm-up of a seed. The rate of the one RL step is 0: it changes nothing.
fn start(dir: &Path, seed: u64) -> Option<Command> {
    let settings = [format!("trainer.seed={seed}"), "trainer.steps=1".into(), "trainer.test_freq=0".into()];
    training("arithmetic.yaml", &output(dir, "start", seed), settings.into())
}

fn run(dir: &Path, own: &Algorithm, seed: u64, steps: u64) -> Option<Command> {
    let start = output(dir, "start", seed).join("checkpoints/step-000001/model");
    let mut settings = vec![
        format!("model={{path: {}}}", start.display()),
        "warmup=null".into(),
        format!("trainer.seed={seed}"),
        format!("trainer.steps={steps}"),
        "trainer.test_freq=15".into(),
        "trainer.save_freq=0".into(),
    ];
    settings.extend(own.settings.iter().map(ToString::to_string));
    training(own.config, &output(dir, own.name, seed), settings)
}

fn in_parallel(commands: Vec<Option<Command>>) {
    let jobs = std::env::var("JOBS").ok().and_then(|n| n.parse().ok());
    let queue = Mutex::new(commands.into_iter().flatten());
    std::thread::scope(|scope| {
        for _ in 0..jobs.unwrap_or(2) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().expect("the queue").next();
                    let Some(mut command) = next else { break };
                    let ended = command.status().expect("the program runs");
                    assert!(ended.success(), "{command:?} failed");
                }
            });
        }
    });
}

/// Accuracy by step.
type Curve = Vec<(u64, f64)>;

fn curve(run: &Path) -> Curve {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    let lines = text.lines().map(|l| serde_json::from_str(l).expect("JSON"));
    let point = |line: Value| Some((line["training/global_step"].as_u64()?, line[SCORE].as_f64()?));
    lines.filter_map(point).collect()
}

fn draw(all: &[Vec<Curve>]) {
    let mut lines = Vec::new();
    for ((own, colour), curves) in ALGORITHMS.iter().zip(COLOURS).zip(all) {
        lines.extend(curves.iter().enumerate().map(|(i, curve)| Line {
            name: (i == 0).then(|| own.name.to_uppercase()),
            colour,
            points: curve.iter().map(|&(step, y)| (step as f64, y)).collect(),
        }));
    }
    let longest = SEEDS.iter().map(|own| own.1).max().unwrap_or(1);
    let chart = Chart {
        title: "Two-digit sums, three seeds",
        x: "RL steps of 768 completions",
        y: "held-out sums that are right",
        ends: (longest as f64, 1.0),
        ordinate: |share| format!("{:.0} %", 100.0 * share),
        mark: Some(0.9),
        lines,
    };
    plot::draw(&project().join("docs/curves.svg"), &[chart]);
}

fn table(all: &[Vec<Curve>]) -> String {
    let mut text = String::from(
        "| algorithm | seed | steps | before | after | first at 90 % or more, step |\n|---|---|---:|---:|---:|---:|\n",
    );
    for (own, curves) in ALGORITHMS.iter().zip(all) {
        for ((seed, steps), curve) in SEEDS.iter().zip(curves) {
            let percent = |accuracy: f64| format!("{:.1} %", 100.0 * accuracy);
            let _ = writeln!(
                text,
                "| {} | {seed} | {steps} | {} | {} | {} |",
                own.name,
                percent(curve[0].1),
                percent(curve[curve.len() - 1].1),
                reached(curve).map_or_else(|| "–".into(), |step| step.to_string())
            );
        }
    }
    text
}
