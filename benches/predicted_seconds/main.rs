//! Predicted seconds of a step beside measured ones, by phase: steps of GRPO on the CPU with completions of different lengths, under
//! many plans, of models and batches that no profile was made with.
//!
//! `cargo bench --no-default-features --bench predicted_seconds` measures the device as `firebrick devices --measure` does, predicts, and
//! takes five steps under each plan after one that does not count. Phases above a tenth of the step count; the program ends with 1 where
//! a prediction is more than 25 % from the median. A product is timed after every step: where it takes longer than the profile says, other
//! work or the machine's clock slows down steps as well, and predictions are multiplied by the median of that (`pace`). `--shape NAME` takes one shape, `--only 'PLAN;PLAN'` some plans, `--profile FILE` a
//! profile that was measured before (written where there is no such file), `--families` adds where the time went, by kernel.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

mod cases;
mod step;
#[allow(dead_code, reason = "each bench uses its own part")]
#[path = "../support/mod.rs"]
mod support;

use burn::tensor::{Device, Tensor};
use cases::{PLANS, PlanCase, Shape, shapes};
use firebrick::backends::DeviceInfo;
use firebrick::backends::allocator::CountingAllocator;
use firebrick::backends::kernels;
use firebrick::backends::profile::measure;
use firebrick::backends::trace;
use firebrick::engine::plan::estimate::{EstimatePhase, Seconds, estimate};
use firebrick::spec::DeviceProfile;
use serde_json::json;
use std::path::Path;
use std::time::Instant;
use step::{PHASES, Steps, Taken};
use support::{Options, fail};

/// The program's own.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Steps whose median counts.
const STEPS: usize = 5;

/// How far a prediction may be from the median, as a share of it.
const TOLERANCE: f64 = 0.25;

/// The least share of a step that counts.
const SHARE: f64 = 0.1;

/// A side of the matrices whose product says how fast the machine is now: that of `devices --measure`.
const SIDE: usize = 1024;

fn main() {
    let mut options = Options::parse_with(&["--shape", "--only", "--profile"], &["--families"]);
    let families = options.own("--families").is_some();
    let (device, info) = options.open();
    let profile = profile(&options, &device, &info);
    println!(
        "{}",
        serde_json::to_string(&profile).expect("a profile writes")
    );
    println!(
        "\n| shape | plan | pace | phase | predicted, ms | median of {STEPS}, ms | least to most, ms | off by |"
    );
    println!("|---|---|---:|---|---:|---:|---:|---:|");
    let mut count = Count::default();
    let chosen = options.own("--shape").map(str::to_owned);
    let only = options.own("--only").map(str::to_owned);
    for shape in shapes() {
        if chosen.as_ref().is_some_and(|name| name != shape.name) {
            continue;
        }
        for plan in &PLANS {
            let wanted = |names: &String| names.split(';').any(|name| name == plan.name);
            if only.as_ref().is_none_or(wanted) {
                compare(&shape, plan, &profile, &device, &mut options, &mut count);
                if families {
                    spans(&shape, plan, &device);
                }
            }
        }
    }
    let Count { phases, off, worst } = count;
    println!(
        "\n{off} of {phases} phases are more than {:.0} % off; the furthest is {:.0} %",
        100.0 * TOLERANCE,
        100.0 * worst
    );
    if off > 0 {
        std::process::exit(1);
    }
}

/// Phases that were compared.
#[derive(Default)]
struct Count {
    phases: usize,
    /// Those whose prediction is too far away.
    off: usize,
    /// The largest distance.
    worst: f64,
}

/// A profile measured now, or the one of a file.
fn profile(options: &Options, device: &Device, info: &DeviceInfo) -> DeviceProfile {
    let path = options.own("--profile");
    if let Some(text) = path.and_then(|path| std::fs::read_to_string(Path::new(path)).ok()) {
        let read: DeviceProfile =
            serde_json::from_str(&text).unwrap_or_else(|e| fail(&format!("--profile: {e}")));
        return DeviceProfile {
            kernels: kernels::table(read.backend),
            ..read
        };
    }
    let measured = measure(device, info).unwrap_or_else(|error| fail(&error.to_string()));
    if let Some(path) = path {
        let text = serde_json::to_string_pretty(&measured).expect("a profile writes");
        std::fs::write(path, text).unwrap_or_else(|error| fail(&format!("--profile: {error}")));
    }
    measured
}

/// Runs a shape under a plan and prints a line a phase.
fn compare(
    shape: &Shape,
    plan: &PlanCase,
    profile: &DeviceProfile,
    device: &Device,
    options: &mut Options,
    count: &mut Count,
) {
    let mut steps = Steps::new(shape, plan, device);
    steps.take();
    let reference = Reference::new(device, profile);
    let (taken, mut paces): (Vec<Taken>, Vec<f64>) =
        (0..STEPS).map(|_| (steps.take(), reference.pace())).unzip();
    paces.sort_by(f64::total_cmp);
    let pace = paces[STEPS / 2];
    let workload = steps.workload(&taken);
    let predicted = estimate(&workload, steps.plan(), profile).seconds;
    let medians = PHASES.map(|phase| summary(&taken, phase));
    let whole: f64 = medians.iter().map(|[_, median, _]| median).sum();
    for (phase, [least, median, most]) in PHASES.into_iter().zip(medians) {
        let found = pace * of(&predicted, phase);
        let off = found / median - 1.0;
        options.write(&json!({
            "shape": shape.name, "plan": plan.name, "pace": pace, "phase": phase.name(), "predicted": found, "median": median,
            "least": least, "most": most, "counts": median >= SHARE * whole
        }));
        if median < SHARE * whole {
            continue;
        }
        println!(
            "| {} | {} | {pace:.2} | {phase} | {:.1} | {:.1} | {:.1} to {:.1} | {:+.0} % |",
            shape.name,
            plan.name,
            1e3 * found,
            1e3 * median,
            1e3 * least,
            1e3 * most,
            100.0 * off
        );
        count.phases += 1;
        count.off += usize::from(off.abs() > TOLERANCE);
        count.worst = count.worst.max(off.abs());
    }
}

/// A product whose time is known from the profile.
struct Reference {
    matrix: Tensor<2>,
    /// Seconds, by the profile.
    expected: f64,
}

impl Reference {
    fn new(device: &Device, profile: &DeviceProfile) -> Self {
        Self {
            matrix: Tensor::ones([SIDE, SIDE], device),
            expected: 2.0 * (SIDE as f64).powi(3) / profile.matmul_flops.f32,
        }
    }

    /// How often as long it takes now.
    fn pace(&self) -> f64 {
        let started = Instant::now();
        for _ in 0..2 {
            let x = &self.matrix;
            let product =
                kernels::linear(x, x).unwrap_or_else(|| x.clone().matmul(x.clone().transpose()));
            // reading a number waits for it
            let _ = product.slice([0..1, 0..1]).into_data();
        }
        started.elapsed().as_secs_f64() / 2.0 / self.expected
    }
}

fn of(seconds: &Seconds, phase: EstimatePhase) -> f64 {
    let all = seconds.by_phase();
    all.iter()
        .find(|(own, _)| *own == phase)
        .map_or(0.0, |(_, seconds)| *seconds)
}

/// The least, the median and the most seconds of a phase.
fn summary(taken: &[Taken], phase: EstimatePhase) -> [f64; 3] {
    let at = PHASES
        .iter()
        .position(|own| *own == phase)
        .expect("one of the phases");
    let mut seconds: Vec<f64> = taken.iter().map(|step| step.seconds[at]).collect();
    seconds.sort_by(f64::total_cmp);
    [
        seconds[0],
        seconds[seconds.len() / 2],
        seconds[seconds.len() - 1],
    ]
}

/// Where one step's time goes.
fn spans(shape: &Shape, plan: &PlanCase, device: &Device) {
    let mut steps = Steps::new(shape, plan, device);
    steps.take();
    for phase in PHASES {
        trace::record();
        steps.run(phase);
        let spans = trace::finish();
        for (name, total) in trace::totals_by_name(&spans) {
            let rate = total.flops / total.own_seconds.max(1e-9) / 1e9;
            println!(
                "    {phase}: {name}: {} calls, {:.2} ms, {rate:.1} GFLOP/s",
                total.calls,
                1e3 * total.own_seconds
            );
        }
    }
}
