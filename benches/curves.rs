//! Learning curves: GRPO, PPO, RLOO, DAPO and GSPO on two-digit sums, three seeds each, from the same warmed-up policy.
//!
//! `cargo bench --no-default-features --bench curves [-- DIR]` trains what is not yet in DIR (`runs/curves`), at most `JOBS` runs (2)
//! at a time on one thread each, draws `docs/curves.svg` and prints a table. `FIREBRICK` names a built program. About twenty minutes
//! on two idle cores. It can be stopped and started again.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

const SEEDS: [u64; 3] = [1, 2, 3];
const STEPS: u64 = 150;
const SCORE: &str = "val-core/arithmetic/reward";

struct Algorithm {
    name: &'static str,
    colour: &'static str,
    config: &'static str,
    settings: &'static [&'static str],
}

/// 768 completions a step for all of them, at the examples' learning rates. Four optimizer steps over those, so that ratios leave one
/// and the objectives differ; two for RLOO, whose ratio is of whole completions and which does not divide by a deviation.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm {
        name: "grpo",
        colour: "#0072b2",
        config: "arithmetic.yaml",
        settings: &GROUPS,
    },
    Algorithm {
        name: "ppo",
        colour: "#d55e00",
        config: "ppo_arithmetic.yaml",
        settings: &[
            "trainer.train_batch_size=768",
            "update.ppo_epochs=1",
            "update.ppo_mini_batch_size=192",
        ],
    },
    Algorithm {
        name: "rloo",
        colour: "#009e73",
        config: "arithmetic.yaml",
        settings: &[
            "objective=rloo",
            "trainer.train_batch_size=96",
            "rollout.n=8",
            "update.ppo_mini_batch_size=48",
        ],
    },
    Algorithm {
        name: "dapo",
        colour: "#cc79a7",
        config: "arithmetic.yaml",
        settings: &["objective=dapo", GROUPS[0], GROUPS[1], GROUPS[2]],
    },
    Algorithm {
        name: "gspo",
        colour: "#e69f00",
        config: "arithmetic.yaml",
        settings: &["objective=gspo", GROUPS[0], GROUPS[1], GROUPS[2]],
    },
];

const GROUPS: [&str; 3] = [
    "trainer.train_batch_size=96",
    "rollout.n=8",
    "update.ppo_mini_batch_size=24",
];

fn main() {
    // cargo hands `--bench` to every bench
    let named = std::env::args().skip(1).find(|a| !a.starts_with("--"));
    let dir = PathBuf::from(named.unwrap_or_else(|| "runs/curves".into()));
    std::fs::create_dir_all(&dir).expect("a folder for the runs");
    let dir = dir.canonicalize().expect("the folder");
    in_parallel(SEEDS.map(|seed| start(&dir, seed)).into());
    let runs = SEEDS.iter().flat_map(|&seed| {
        let dir = &dir;
        ALGORITHMS.iter().map(move |own| run(dir, own, seed))
    });
    in_parallel(runs.collect());
    let curves: Vec<Vec<Curve>> = ALGORITHMS
        .iter()
        .map(|own| {
            SEEDS
                .map(|seed| curve(&output(&dir, own.name, seed)))
                .into()
        })
        .collect();
    let picture = project().join("docs/curves.svg");
    std::fs::write(&picture, draw(&curves)).expect("a picture");
    print!("{}", table(&curves));
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
    let settings = [
        format!("trainer.seed={seed}"),
        "trainer.steps=1".into(),
        "trainer.test_freq=0".into(),
    ];
    training(
        "arithmetic.yaml",
        &output(dir, "start", seed),
        settings.into(),
    )
}

fn run(dir: &Path, own: &Algorithm, seed: u64) -> Option<Command> {
    let start = output(dir, "start", seed).join("checkpoints/step-000001/model");
    let mut settings = vec![
        format!("model={{path: {}}}", start.display()),
        "warmup=null".into(),
        format!("trainer.seed={seed}"),
        format!("trainer.steps={STEPS}"),
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
    let point = |line: Value| {
        Some((
            line["training/global_step"].as_u64()?,
            line[SCORE].as_f64()?,
        ))
    };
    lines.filter_map(point).collect()
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 16.0;
const RIGHT: f64 = 90.0;
const BOTTOM: f64 = 44.0;

fn x(step: u64) -> f64 {
    LEFT + step as f64 / STEPS as f64 * (WIDTH - LEFT - RIGHT)
}

fn y(accuracy: f64) -> f64 {
    TOP + (1.0 - accuracy) * (HEIGHT - TOP - BOTTOM)
}

/// Mean, least and largest of the seeds at each step.
fn spread(curves: &[Curve]) -> Vec<(u64, f64, f64, f64)> {
    let steps = curves[0].iter().enumerate();
    steps
        .map(|(i, &(step, _))| {
            let all = curves.iter().map(|c| c[i].1);
            let mean = all.clone().sum::<f64>() / curves.len() as f64;
            let (low, high) = (all.clone().fold(1.0, f64::min), all.fold(0.0, f64::max));
            (step, mean, low, high)
        })
        .collect()
}

fn draw(all: &[Vec<Curve>]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>Accuracy by step on two-digit sums: mean and range of three seeds</title>\n\
         <style>text{{fill:#444}}.grid{{stroke:#ccc}}@media(prefers-color-scheme:dark){{text{{fill:#bbb}}.grid{{stroke:#555}}}}</style>\n"
    );
    let line = |x1: f64, y1: f64, x2: f64, y2: f64, more: &str| {
        format!(
            "<line class=\"grid\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"{more}/>\n"
        )
    };
    let text = |x: f64, y: f64, more: &str, what: &str| {
        format!("<text x=\"{x:.1}\" y=\"{y:.1}\"{more}>{what}</text>\n")
    };
    for tenth in (0..=10).step_by(2) {
        let at = f64::from(tenth) / 10.0;
        svg += &line(x(0), y(at), x(STEPS), y(at), "");
        let label = format!("{} %", tenth * 10);
        svg += &text(x(0) - 6.0, y(at) + 4.0, " text-anchor=\"end\"", &label);
    }
    svg += &line(x(0), y(0.9), x(STEPS), y(0.9), " stroke-dasharray=\"4 4\"");
    for step in (0..=STEPS).step_by(30) {
        svg += &text(
            x(step),
            y(0.0) + 18.0,
            " text-anchor=\"middle\"",
            &step.to_string(),
        );
    }
    let middle = " text-anchor=\"middle\"";
    svg += &text(
        x(STEPS / 2),
        HEIGHT - 6.0,
        middle,
        "RL steps of 768 completions",
    );
    let turned = " text-anchor=\"middle\" transform=\"rotate(-90 14 180)\"";
    svg += &text(14.0, 180.0, turned, "held-out sums that are right");
    for (i, (own, curves)) in ALGORITHMS.iter().zip(all).enumerate() {
        let points = spread(curves);
        let upper = points.iter().map(|p| (p.0, p.3));
        let lower = points.iter().rev().map(|p| (p.0, p.2));
        let place = |(step, at): (u64, f64)| format!("{:.1},{:.1}", x(step), y(at));
        let band: Vec<String> = upper.chain(lower).map(place).collect();
        let mean: Vec<String> = points.iter().map(|p| place((p.0, p.1))).collect();
        let Algorithm { name, colour, .. } = own;
        let _ = write!(
            svg,
            "<polygon points=\"{}\" fill=\"{colour}\" opacity=\"0.13\"/>\n\
             <polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
            band.join(" "),
            mean.join(" ")
        );
        let (row, right) = (TOP + 14.0 + 18.0 * i as f64, WIDTH - RIGHT + 14.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{right}\" y=\"{:.1}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>",
            row - 6.0
        );
        svg += &text(right + 20.0, row, "", &name.to_uppercase());
    }
    svg + "</svg>\n"
}

fn table(all: &[Vec<Curve>]) -> String {
    let mut text = String::from(
        "| algorithm | seed | before | after | best | first at 90 % or more, step |\n|---|---|---:|---:|---:|---:|\n",
    );
    for (own, curves) in ALGORITHMS.iter().zip(all) {
        for (seed, curve) in SEEDS.iter().zip(curves) {
            let percent = |accuracy: f64| format!("{:.1} %", 100.0 * accuracy);
            let best = curve.iter().map(|p| p.1).fold(0.0, f64::max);
            let reached = curve.iter().find(|p| p.1 >= 0.9);
            let _ = writeln!(
                text,
                "| {} | {seed} | {} | {} | {} | {} |",
                own.name,
                percent(curve[0].1),
                percent(curve[curve.len() - 1].1),
                percent(best),
                reached.map_or_else(|| "–".into(), |p| p.0.to_string())
            );
        }
    }
    text
}
