//! Predicted bytes against counted ones, on the CPU. A test binary of its own, for its allocator; what that allocator
//! counts is the whole process's, so each test runs in a process of its own ([`own_process`]).

mod cases;
mod ended_rows;
mod limit_of_one_rank;
mod loopback;
mod measure;
mod own_process;
mod parts_of_models;
mod pipeline_stages;
mod recorded_plans;
mod reuse;
mod routes;
mod sampling_groups;
mod shared_matrices;
mod shared_sequences;
mod warm_up;

use burn::tensor::Tensor;
use cases::cases;
use firebrick::backends::DeviceSpec;
use firebrick::backends::allocator::CountingAllocator;
use firebrick::backends::device::open;
use firebrick::backends::memory::MemoryScope;
use firebrick::engine::executor::Gradients;
use firebrick::engine::world::World;
use firebrick::spec::Pool;
use measure::{Case, Plans, Row, error, rows};
use own_process::in_own_process;
use std::io::Write;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// How far a prediction may be from what was counted, as a share of the latter.
const TOLERANCE: f64 = 0.15;

/// How far it may be besides, in bytes: as many as predictions add for whatever runs. How much matrix products keep for
/// packing depends on the machine's caches and cores; with two cores 3 MiB and 6 MiB were seen.
const SCRATCH: u64 = Pool::HEAP.fixed_bytes;

in_own_process!(
    a_scope_counts_before_after_and_the_peak_of_what_it_encloses_and_leaves_the_outer_peak,
    predictions_are_within_15_percent_of_what_is_counted,
    the_norm_of_gradients_squares_a_part_of_a_gradient_at_a_time,
);

fn a_scope_counts_before_after_and_the_peak_of_what_it_encloses_and_leaves_the_outer_peak() {
    const MIB: usize = 1 << 20;
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let outer = MemoryScope::enter(&device);
    drop(vec![1_u8; 9 * MIB]);
    let inner = MemoryScope::enter(&device);
    let kept = vec![1_u8; MIB];
    drop(vec![1_u8; 4 * MIB]);
    let inner = inner.finish();
    let outer = outer.finish();
    let grew = |bytes: u64, mib: u64| bytes.abs_diff(mib * MIB as u64) < MIB as u64 / 4;
    assert!(grew(inner.after_bytes - inner.before_bytes, 1), "{inner:?}");
    assert!(grew(inner.peak_bytes - inner.before_bytes, 5), "{inner:?}");
    assert!(grew(outer.peak_bytes - outer.before_bytes, 9), "{outer:?}");
    drop(kept);
}

fn the_norm_of_gradients_squares_a_part_of_a_gradient_at_a_time() {
    // 128 MiB, and parts of 32 MiB
    let (rows, columns) = (1 << 14, 1 << 11);
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let mut gradients = Gradients::new(1);
    gradients.add(0, Tensor::ones([rows, columns], &device));
    let scope = MemoryScope::enter(&device);
    let norm = gradients.global_norm(&World::default()).expect("a norm");
    let counted = scope.finish();
    let expected = f64::from(rows * columns).sqrt();
    assert!((norm - expected).abs() < 1e-6 * expected, "{norm}");
    let grew = counted.peak_bytes - counted.before_bytes;
    assert!(grew < 33 << 20, "the norm took {grew} bytes");
}

fn predictions_are_within_15_percent_of_what_is_counted() {
    let mut off = Vec::new();
    let rows = rows(sample(cases(), 8), |row| {
        off.extend(phases_off(row, TOLERANCE));
    });
    let peaks = rows.iter().map(|row| error(row.predicted(), row.measured()).abs());
    let worst = peaks.fold(0.0, f64::max);
    writeln!(std::io::stderr(), "memory: peaks of {} plans within {:.1} %", rows.len(), 100.0 * worst)
        .expect("writing to stderr");
    assert!(rows.len() >= 12, "only {} plans", rows.len());
    assert!(off.is_empty(), "{}", off.join("\n"));
}

/// Says what was predicted and counted in each phase; gives those that are further apart than this share of what was
/// counted.
fn phases_off(row: &Row, tolerance: f64) -> Vec<String> {
    let mut off = Vec::new();
    for phase in &row.phases {
        let apart = error(phase.predicted, phase.measured);
        let line = format!(
            "memory: {}, {}: {} predicted {:.1} MiB ({}), counted {:.1} MiB, {:+.1} %",
            row.case,
            row.plan,
            phase.name,
            mib(phase.predicted),
            phase.moment,
            mib(phase.measured),
            100.0 * apart
        );
        writeln!(std::io::stderr(), "{line}").expect("writing to stderr");
        let allowed = tolerance * phase.measured as f64 + SCRATCH as f64;
        if phase.predicted.abs_diff(phase.measured) as f64 > allowed {
            off.push(line);
        }
    }
    off
}

/// Every `step`th plan, and whatever has everything on the host: what every run of the tests has the time for. All of
/// them take minutes: `tests/campaigns/run predictions`.
fn sample(cases: Vec<(Case, Plans)>, step: usize) -> Vec<(Case, Plans)> {
    if std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|name| name == "predictions") {
        return cases;
    }
    let mut index = 0;
    let chosen = cases.into_iter().map(|(case, mut plans)| {
        plans.retain(|(name, _)| {
            index += 1;
            (index - 1) % step == 0 || name.starts_with("everything on the host")
        });
        (case, plans)
    });
    chosen.collect()
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
