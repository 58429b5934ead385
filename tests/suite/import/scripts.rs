//! Users' launch scripts: what bash passes beside what the import reads. `tests/campaigns/import_scripts.py` runs all of
//! them, and any other folder.

use crate::support::fixtures;
use std::process::Command;

/// Scripts of every kind: probed branches, strings of settings, options of a script, functions, files that are sourced.
const SAMPLE: [&str; 6] =
    ["gpu_npu_branches", "settings_string", "flag_loop", "functions", "sources_absent", "torchrun_flags"];

#[test]
fn no_setting_of_a_script_differs_from_bash_without_being_listed_as_open() {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|own| own.status.success());
    if !(has("bash") && has("python3")) {
        return;
    }
    let bed = fixtures().join("../campaigns/import_scripts.py");
    let program = crate::program::program_path();
    let output = Command::new("python3").arg(bed).arg("--program").arg(program).arg("--only").args(SAMPLE).output();
    let output = output.expect("python3");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("'same':") && said.contains("'open':") && said.contains("apart: {}"), "{said}");
}
