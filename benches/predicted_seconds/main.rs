//! Predicted seconds of a step beside measured ones, by phase: steps of GRPO on the CPU with completions of different
//! lengths, under many plans, of models and batches that no profile was made with.
//!
//! `cargo bench --no-default-features --bench predicted_seconds` measures the device as `firebrick devices --measure`
//! does, takes five steps under a plan after one that does not count, and measures again: a shared machine is up to
//! twice as fast a minute later. The prediction is the mean of those from both profiles. Phases above a tenth of the
//! step count; the program ends with 1 where a prediction is more than 25 % from the median. `--shape NAME` takes one
//! shape, `--only 'PLAN;PLAN'` some plans, `--families` adds where the time went, by kernel.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

mod cases;
#[path = "../support/results.rs"]
mod results;
mod step;
#[allow(dead_code, reason = "each bench uses its own part")]
#[path = "../support/mod.rs"]
mod support;

use burn::tensor::Device;
use cases::{PLANS, PlanCase, Shape, shapes};
use firebrick::backends::DeviceInfo;
use firebrick::backends::allocator::CountingAllocator;
use firebrick::backends::profile::measure;
use firebrick::backends::trace;
use firebrick::engine::plan::estimate::{EstimatePhase, Seconds, estimate};
use firebrick::spec::DeviceProfile;
use results::{Figures, rounded};
use serde_json::json;
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

fn main() {
    let mut options = Options::parse_with(&["--shape", "--only"], &["--families"]);
    let families = options.own("--families").is_some();
    let (device, info) = options.open();
    let mut before = measured(&device, &info);
    println!("{}", serde_json::to_string(&before).expect("a profile writes"));
    println!(
        "\n| shape | plan | phase | predicted, ms: by the profile before; after | mean | median of {STEPS}, ms | least to most, ms | off by |"
    );
    println!("|---|---|---|---:|---:|---:|---:|---:|");
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
                let mut steps = Steps::new(&shape, plan, &device);
                steps.take();
                let taken: Vec<Taken> = (0..STEPS).map(|_| steps.take()).collect();
                let after = measured(&device, &info);
                let workload = steps.workload(&taken);
                let predicted = [&before, &after].map(|profile| estimate(&workload, steps.plan(), profile).seconds);
                compare([shape.name, plan.name], &predicted, &taken, &mut options, &mut count);
                before = after;
                if families {
                    spans(&shape, plan, &device);
                }
            }
        }
    }
    write(&count);
    let Count { phases, off, worst, .. } = count;
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
    /// The distances, each with its phase.
    all: Vec<(EstimatePhase, f64)>,
}

/// Writes the figures by phase, if that is asked for.
fn write(count: &Count) {
    let row = |phase: EstimatePhase| {
        let offs: Vec<f64> = count.all.iter().filter(|own| own.0 == phase).map(|own| 100.0 * own.1).collect();
        let [least, most] = [f64::min, f64::max].map(|choose| offs.iter().copied().reduce(choose));
        let beyond = offs.iter().filter(|off| off.abs() > 100.0 * TOLERANCE).count();
        let [least, most] = [least?, most?].map(|off| rounded(off, 0));
        Some(vec![phase.name().into(), offs.len().into(), least, most, beyond.into()])
    };
    Figures {
        bench: "predicted_seconds",
        title: "Predicted and measured time",
        command: "cargo bench --no-default-features --bench predicted_seconds",
        what: "Phases above a tenth of a GRPO step, 13 plans of each of three models, predicted from profiles of the same \
               minutes.",
        columns: &["phase", "cases", "off, least, %", "off, most, %", "beyond 25 %"],
        rows: PHASES.into_iter().filter_map(row).collect(),
    }
    .write();
}

fn measured(device: &Device, info: &DeviceInfo) -> DeviceProfile {
    measure(device, info).unwrap_or_else(|error| fail(&error.to_string()))
}

/// Prints a line a phase, beside what the profiles before and after the steps predict.
fn compare(
    [shape, plan]: [&str; 2],
    predicted: &[Seconds; 2],
    taken: &[Taken],
    options: &mut Options,
    count: &mut Count,
) {
    let medians = PHASES.map(|phase| summary(taken, phase));
    let whole: f64 = medians.iter().map(|[_, median, _]| median).sum();
    for (phase, [least, median, most]) in PHASES.into_iter().zip(medians) {
        let [before, after] = predicted.each_ref().map(|seconds| of(seconds, phase));
        let found = f64::midpoint(before, after);
        let off = found / median - 1.0;
        options.write(&json!({
            "shape": shape, "plan": plan, "phase": phase.name(), "before": before, "after": after, "predicted": found,
            "median": median, "least": least, "most": most, "counts": median >= SHARE * whole
        }));
        if median < SHARE * whole {
            continue;
        }
        println!(
            "| {shape} | {plan} | {phase} | {:.1}; {:.1} | {:.1} | {:.1} | {:.1} to {:.1} | {:+.0} % |",
            1e3 * before,
            1e3 * after,
            1e3 * found,
            1e3 * median,
            1e3 * least,
            1e3 * most,
            100.0 * off
        );
        count.phases += 1;
        count.off += usize::from(off.abs() > TOLERANCE);
        count.worst = count.worst.max(off.abs());
        count.all.push((phase, off));
    }
}

fn of(seconds: &Seconds, phase: EstimatePhase) -> f64 {
    let all = seconds.by_phase();
    all.iter().find(|(own, _)| *own == phase).map_or(0.0, |(_, seconds)| *seconds)
}

/// The least, the median and the most seconds of a phase.
fn summary(taken: &[Taken], phase: EstimatePhase) -> [f64; 3] {
    let at = PHASES.iter().position(|own| *own == phase).expect("one of the phases");
    let mut seconds: Vec<f64> = taken.iter().map(|step| step.seconds[at]).collect();
    seconds.sort_by(f64::total_cmp);
    [seconds[0], seconds[seconds.len() / 2], seconds[seconds.len() - 1]]
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
