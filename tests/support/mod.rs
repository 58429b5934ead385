//! What the test binaries share: where fixtures are, how goldens are read and compared, what is not built yet.

pub mod golden;
pub mod meshes;
pub mod model;
pub mod techniques;
pub mod tolerance;
pub mod zero;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use burn::tensor::{Device, FloatDType, Tensor};
use firebrick_backends::device::{DeviceSpec, open};
use firebrick_backends::kernels;
use firebrick_models::{Checkpoint, Error};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Names a folder of reference numbers to use instead of the project's own.
const ELSEWHERE: &str = "FIREBRICK_FIXTURES";

/// The reference numbers: `FIREBRICK_FIXTURES`, or the project's own.
pub fn fixtures() -> PathBuf {
    std::env::var_os(ELSEWHERE).map_or_else(|| project().join("tests/fixtures"), PathBuf::from)
}

/// The project's folder as cargo says it at run time: a target folder shared by two checkouts may hold the other's
/// binary.
pub fn project() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// Whether the reference numbers are not the project's own, so that what this project added to them may be missing.
pub fn is_foreign() -> bool {
    std::env::var_os(ELSEWHERE).is_some()
}

/// Says how many cases a test checked, past the runner's capture. None at all is a failure.
pub fn checked(what: &str, cases: usize) {
    assert!(cases > 0, "no case of {what}");
    report(&format!("{cases} {what} checked"));
}

/// Whether this is the nightly test of that name, which takes all cases of a table in place of a sample.
pub fn is_campaign(name: &str) -> bool {
    std::env::var("FIREBRICK_CAMPAIGN").is_ok_and(|set| set == name)
}

/// Points of a campaign: `FIREBRICK_CAMPAIGN_POINTS`, so many (`200`) or some of them (`50..100`), where it is set.
pub fn campaign_points() -> Option<std::ops::Range<u64>> {
    let set = std::env::var("FIREBRICK_CAMPAIGN_POINTS").ok()?;
    let number = |text: &str| text.parse().expect("a number of points");
    Some(match set.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => 0..number(&set),
    })
}

/// Writes a line past the runner's capture.
pub fn report(line: &str) {
    writeln!(std::io::stderr(), "parity: {line}").expect("writing to stderr");
}

/// The CPU, computing in this binary's precision.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let open = || {
        let (mut device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
        kernels::set_enabled(crate::KERNELS);
        if crate::PRECISION == FloatDType::F64 {
            device.configure(crate::PRECISION).expect("no tensor exists yet");
        }
        device
    };
    DEVICE.get_or_init(open).clone()
}

/// The folders of a kind of fixture, in order; at least one. Of models also those in `models-2026`, where newer
/// families may be kept apart; those that are not implemented are left out, and named.
pub fn folders(kind: &str) -> Vec<PathBuf> {
    let mut found = entries(kind, Path::is_dir);
    let newer = format!("{kind}-2026");
    if fixtures().join(&newer).is_dir() {
        found.extend(entries(&newer, Path::is_dir).into_iter().filter(|dir| is_known(dir)));
    }
    found
}

/// Whether a checkpoint is of an architecture that is implemented.
fn is_known(dir: &Path) -> bool {
    use firebrick_spec::Error::UnknownArchitecture;
    match Checkpoint::architecture(dir) {
        Err(Error::Architecture(UnknownArchitecture { found, .. })) => {
            report(&format!("{} is left out: no {found} yet", dir.display()));
            false
        }
        Err(error) => panic!("{error}"),
        Ok(_) => true,
    }
}

/// The JSON files of a kind of fixture, in order; at least one.
pub fn json_files(kind: &str) -> Vec<PathBuf> {
    entries(kind, |path| path.extension().is_some_and(|e| e == "json"))
}

fn entries(kind: &str, wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let root = fixtures().join(kind);
    let mut found: Vec<PathBuf> = root
        .read_dir()
        .unwrap_or_else(|error| panic!("{}: {error}", root.display()))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| wanted(path))
        .collect();
    assert!(!found.is_empty(), "{} holds none", root.display());
    found.sort();
    found
}

/// A JSON file as a type.
pub fn read<T: DeserializeOwned>(path: &Path) -> T {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A part of a JSON file as a type.
pub fn parse<T: DeserializeOwned>(label: &str, value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{label}: {error}: {value}"))
}

/// A tensor's elements.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as().expect("reading a tensor")
}

/// ‖found − expected‖ / ‖expected‖.
pub fn relative_l2(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(f, e)| f - e));
    difference / norm(&mut expected.iter().copied()).max(f64::MIN_POSITIVE)
}

/// Within `tolerance`, absolutely or, above one, relatively.
#[track_caller]
pub fn assert_close(label: &str, found: f64, expected: f64, tolerance: f64) {
    let difference = (found - expected).abs();
    assert!(
        difference <= tolerance * expected.abs().max(1.0),
        "{label}: expected {expected}, found {found}: {difference:e} apart, {tolerance:e} allowed"
    );
}

/// The same of every element.
#[track_caller]
pub fn assert_all_close(label: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{label}: number of elements");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert_close(&format!("{label}[{i}]"), found, expected, tolerance);
    }
}

/// A gradient tensor within `tolerance` relative L2.
#[track_caller]
pub fn assert_gradient(label: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let apart = relative_l2(found, expected);
    assert!(apart <= tolerance, "{label}: {apart:e} relative L2 apart, {tolerance:e} allowed");
}
