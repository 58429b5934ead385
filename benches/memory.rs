//! Predicted and counted peaks of many plans on the CPU, as the table of BENCHMARKS.md.
//!
//! `cargo bench --no-default-features --bench memory`
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "../tests/memory/cases.rs"]
mod cases;
#[path = "../tests/memory/loopback.rs"]
mod loopback;
#[allow(dead_code, reason = "the bench has no critic of a degree of its own")]
#[path = "../tests/memory/measure.rs"]
mod measure;
#[path = "support/results.rs"]
mod results;

use cases::cases;
use firebrick::backends::allocator::CountingAllocator;
use measure::{error, rows};
use results::{Figures, rounded};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() {
    println!("| model | plan | the peak, as predicted | predicted, MiB | counted, MiB | off by |");
    println!("|---|---|---|---:|---:|---:|");
    let mut figures = Vec::new();
    rows(cases(), |row| {
        let worst = row.phases.iter().max_by_key(|p| p.predicted);
        let worst = worst.map_or(String::new(), |p| format!("{}: {}", p.name, p.moment));
        let [predicted, measured] = [row.predicted(), row.measured()].map(mib);
        let off = 100.0 * error(row.predicted(), row.measured());
        println!("| {} | {} | {worst} | {predicted:.1} | {measured:.1} | {off:+.1} % |", row.case, row.plan);
        let family = row.case.split(',').next().unwrap_or_default();
        figures.push(vec![
            family.into(),
            row.case.into(),
            row.plan.clone().into(),
            worst.into(),
            rounded(predicted, 1),
            rounded(measured, 1),
            rounded(off, 1),
        ]);
    });
    Figures {
        bench: "memory",
        title: "Predicted and counted peaks on a CPU",
        command: "cargo bench --no-default-features --bench memory",
        what: "Peaks of the heap in an update: a Llama of 26 M parameters under every technique, small models of other \
               families under a few plans.",
        columns: &["family", "model", "plan", "phase of the peak", "predicted, MiB", "counted, MiB", "off, %"],
        rows: figures,
    }
    .write();
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
