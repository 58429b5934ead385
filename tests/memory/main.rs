//! Predicted bytes against counted ones, on the CPU. A test binary of its own: its allocator counts everything in it.

mod measure;

use firebrick::backends::allocator::CountingAllocator;
use measure::{error, rows};
use std::io::Write;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// How far a prediction may be from what was counted.
const TOLERANCE: f64 = 0.15;

#[test]
fn predictions_are_within_15_percent_of_what_is_counted() {
    let mut off = Vec::new();
    let rows = rows(|row| {
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
            if apart.abs() > TOLERANCE {
                off.push(line);
            }
        }
    });
    let peaks = rows
        .iter()
        .map(|row| error(row.predicted(), row.measured()).abs());
    let worst = peaks.fold(0.0, f64::max);
    writeln!(
        std::io::stderr(),
        "memory: peaks of {} plans within {:.1} %",
        rows.len(),
        100.0 * worst
    )
    .expect("writing to stderr");
    assert!(rows.len() >= 12, "only {} plans", rows.len());
    assert!(off.is_empty(), "{}", off.join("\n"));
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
