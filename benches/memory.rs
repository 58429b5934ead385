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

use cases::cases;
use firebrick::backends::allocator::CountingAllocator;
use measure::{error, rows};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() {
    println!("| model | plan | the peak, as predicted | predicted, MiB | counted, MiB | off by |");
    println!("|---|---|---|---:|---:|---:|");
    rows(cases(), |row| {
        let worst = row.phases.iter().max_by_key(|p| p.predicted);
        let worst = worst.map_or(String::new(), |p| format!("{}: {}", p.name, p.moment));
        println!(
            "| {} | {} | {worst} | {:.1} | {:.1} | {:+.1} % |",
            row.case,
            row.plan,
            mib(row.predicted()),
            mib(row.measured()),
            100.0 * error(row.predicted(), row.measured())
        );
    });
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
