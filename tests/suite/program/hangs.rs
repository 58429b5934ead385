//! Samples of two nightly tests: runs that hang (`tests/campaigns/hangs.py`), and long ones (`soak.py`). Without Python,
//! these tests say so.

use super::program_path;
use crate::support::{project, report};
use std::process::Command;

/// The sample of a nightly test, which must pass.
fn sample(script: &str) {
    if Command::new("python3").arg("--version").output().is_err() {
        report("skipped: there is no python3 on this machine");
        return;
    }
    let script = project().join("tests/campaigns").join(script);
    let output = Command::new("python3").arg(script).arg("--sample").arg("--firebrick").arg(program_path()).output();
    let output = output.expect("python3");
    let [said, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success() && said.contains(" passed, 0 failed"), "{said}\n{errors}");
}

#[test]
fn a_run_that_hangs_ends_in_time_names_phase_and_cause_and_continues() {
    sample("hangs.py");
}

#[test]
fn file_handles_and_threads_of_a_long_run_stay() {
    sample("soak.py");
}
