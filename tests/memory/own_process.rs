//! Tests that read what is counted for the whole process: the allocator's bytes, page faults, resident memory.
//!
//! The test runner's own process only starts them: it executes this binary again with the one test by its exact name,
//! so that no other test allocates or frees while it counts.

use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// Names the test that this process was started for.
const VARIABLE: &str = "FIREBRICK_TEST_PROCESS";

/// Makes a test of each function; it runs in a process of its own.
macro_rules! in_own_process {
    ($($test:ident),* $(,)?) => {
        mod alone {
            $(
                #[test]
                fn $test() {
                    crate::own_process::run(concat!(module_path!(), "::", stringify!($test)), super::$test);
                }
            )*
        }
    };
}
pub(crate) use in_own_process;

/// Runs `test` here if this process was started for it, and starts that process otherwise. `path` is the test's path,
/// the crate's name in front.
#[track_caller]
pub(crate) fn run(path: &str, test: fn()) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let (_, name) = path.split_once("::").expect("a test of this crate");
    if std::env::var_os(VARIABLE).is_some_and(|own| own == name) {
        return test();
    }
    // each wants gigabytes and all cores
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let program = std::env::current_exe().expect("the path of this test binary");
    let output = Command::new(program)
        .args([name, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, name)
        .stderr(Stdio::inherit())
        .output()
        .expect("a process for the test");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name} failed in its process, {}: {said}", output.status);
    assert!(said.contains("1 passed"), "{name} is not a test of this binary: {said}");
}
