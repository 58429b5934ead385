//! Settings of criterion benches that criterion's command line does not know, from the environment:
//! `FIREBRICK_BENCH_DEVICE` (`cpu` if unset), `FIREBRICK_BENCH_SMALL=1`, shapes for a processor or a software driver,
//! and `FIREBRICK_BENCH_REAL=1`, cases with a model of 0.5 billion parameters.

use burn::tensor::Device;
use criterion::Criterion;
use firebrick::backends::device::open;
use firebrick::backends::{DeviceInfo, DeviceSpec};
use std::time::Duration;

/// Criterion with ten samples of each case, 0.5 s of warm-up and 3 s of measurement; its command line overrides them.
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args()
}

/// The device of `FIREBRICK_BENCH_DEVICE`, as in `--device` of the program. Ends the program if it cannot be opened.
pub fn device() -> (Device, DeviceInfo) {
    let name = std::env::var("FIREBRICK_BENCH_DEVICE").unwrap_or_else(|_| "cpu".to_owned());
    let spec: DeviceSpec = name.parse().unwrap_or_else(|error| fail(&error));
    open(spec).unwrap_or_else(|error| fail(&error))
}

/// Whether `FIREBRICK_BENCH_SMALL` is set and not 0.
pub fn small() -> bool {
    is_set("FIREBRICK_BENCH_SMALL")
}

/// Whether `FIREBRICK_BENCH_REAL` is set and not 0.
pub fn real() -> bool {
    is_set("FIREBRICK_BENCH_REAL")
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value != "0")
}

#[allow(clippy::print_stderr, reason = "a bench says why it ends")]
fn fail(error: &dyn std::fmt::Display) -> ! {
    eprintln!("FIREBRICK_BENCH_DEVICE: {error}");
    std::process::exit(2);
}
