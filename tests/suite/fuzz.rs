//! Inputs of the fuzz targets, under the targets' functions: examples, and what the nightly test `fuzz` found.

#[path = "../../fuzz/src/targets.rs"]
mod targets;

use crate::support::{checked, project};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use targets::TARGETS;

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn parsers_survive_the_inputs_of_their_fuzz_targets() {
    let (mut failures, mut inputs) = (Vec::new(), 0);
    for (name, parse) in TARGETS {
        for path in files(&project().join("fuzz/seeds").join(name)) {
            let bytes = fs::read(&path).unwrap();
            inputs += 1;
            if catch_unwind(|| parse(&bytes)).is_err() {
                failures.push(path);
            }
        }
    }
    checked("inputs of fuzz targets", inputs);
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn every_fuzz_target_is_a_program_with_inputs() {
    let names: BTreeSet<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    let named = |folder: &str| -> BTreeSet<String> {
        let paths = files(&project().join("fuzz").join(folder)).into_iter();
        paths.filter_map(|path| path.file_stem().and_then(OsStr::to_str).map(str::to_owned)).collect()
    };
    let manifest = fs::read_to_string(project().join("fuzz/Cargo.toml")).unwrap();
    let programs =
        manifest.lines().filter_map(|line| line.strip_prefix("path = \"fuzz_targets/")?.strip_suffix(".rs\""));
    for found in [named("fuzz_targets"), named("seeds"), programs.map(str::to_owned).collect()] {
        assert_eq!(found.iter().map(String::as_str).collect::<BTreeSet<_>>(), names);
    }
}
