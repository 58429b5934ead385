//! Tests that run again in processes of their own, where a device is opened anew.

use crate::support::report;
use std::process::Command;

/// Says that a process is a test's own.
const INNER: &str = "FIREBRICK_TEST_OF_DEVICES";

/// Whether this process is a test's own.
pub fn is_inner() -> bool {
    std::env::var_os(INNER).is_some()
}

/// Runs one test of the suite in a process of its own, with these variables. Those of the stand-in for a CUDA card that
/// are not among them are unset.
pub fn again(test: &str, variables: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("this test's program");
    let mut command = Command::new(program);
    command.args([test, "--exact"]);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("STAND_IN_") {
            command.env_remove(name);
        }
    }
    command.env(INNER, "1").envs(variables.iter().copied());
    let output = command.output().expect("the test's program runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(passed, "{test}, {variables:?}:\n{said}\n{errors}");
    report(errors.trim());
}
