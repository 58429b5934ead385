//! Commands of the documents that need no network and no GPU, run page by page in the order of the page.

use super::{documents, read};
use crate::program::program;
use crate::support::project;
use std::path::Path;

/// The lines of a page's `sh` blocks, continued lines joined and comments removed.
fn shell_lines(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let (mut inside, mut continued) = (false, false);
    for line in text.lines() {
        if let Some(fence) = line.trim_start().strip_prefix("```") {
            inside = !inside && fence.trim() == "sh";
            continued = false;
            continue;
        }
        if !inside {
            continue;
        }
        let bare = line.split(" #").next().unwrap_or_default().trim();
        if bare.is_empty() || bare.starts_with('#') {
            continue;
        }
        let (bare, continues) = bare.strip_suffix('\\').map_or((bare, false), |bare| (bare.trim_end(), true));
        match found.last_mut().filter(|_| continued) {
            Some(last) => {
                last.push(' ');
                last.push_str(bare);
            }
            None => found.push(bare.to_owned()),
        }
        continued = continues;
    }
    found
}

/// Words of a command as a shell splits it, for quotes without escapes.
fn split(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut any) = (Vec::new(), String::new(), None, false);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (None, '"' | '\'') => (quote, any) = (Some(c), true),
            (None, ' ') => {
                if any || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            (_, c) => word.push(c),
        }
    }
    if any || !word.is_empty() {
        words.push(word);
    }
    words
}

/// The program's arguments of a line, `firebrick …` or `cargo run … -- …`; none for commands of other programs.
fn arguments(line: &str) -> Option<Vec<String>> {
    let by_cargo = line.strip_prefix("cargo run ").and_then(|rest| Some(rest.split_once("-- ")?.1));
    let rest = by_cargo.or_else(|| line.strip_prefix("firebrick "))?;
    Some(split(rest))
}

/// The command as a test runs it: a few steps in place of a whole run, no browser, no live screen.
fn shortened(mut args: Vec<String>) -> Vec<String> {
    args.retain(|arg| arg != "--open");
    let has_overrides = ["train", "sft"].contains(&args[0].as_str());
    if has_overrides {
        args.extend(["trainer.steps=2", "trainer.test_freq=0", "trainer.save_freq=1"].map(str::to_owned));
        if args[0] == "train" {
            args.push("warmup={sft: {steps: 2}}".to_owned());
        }
    }
    if args[0] == "watch" && !args.iter().any(|arg| arg == "--once") {
        args.push("--once".to_owned());
    }
    args
}

/// What a page may use of the repository.
fn workplace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["examples", "tests", "docs"] {
        #[cfg(unix)]
        std::os::unix::fs::symlink(project().join(name), folder.path().join(name)).expect("a link");
    }
    folder
}

fn run(page: &Path, folder: &Path, line: &str) -> Option<String> {
    let args = shortened(arguments(line)?);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = program(&args).current_dir(folder).env("HF_HUB_OFFLINE", "1").output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then(|| format!("{}: {line}\n{:?}: {said}", page.display(), output.status))
}

#[cfg(unix)]
#[test]
fn every_command_of_the_documents_that_needs_no_network_and_no_gpu_runs() {
    let (mut failed, mut ran) = (Vec::new(), 0);
    for page in documents() {
        let lines = shell_lines(&read(&page));
        let commands: Vec<&String> = lines.iter().filter(|line| arguments(line).is_some()).collect();
        if commands.is_empty() {
            continue;
        }
        let folder = workplace();
        for line in commands {
            ran += 1;
            failed.extend(run(&page, folder.path(), line));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    assert!(ran >= 10, "only {ran} commands were found");
}

#[test]
fn commands_are_read_as_a_shell_reads_them() {
    let page = "```sh\ncargo run --release -- train a.yaml   # comment\nfirebrick plan a.yaml \\\n    --budget 1GiB 'x={a: 1}'\n```\n\
                ```console\nfirebrick train b.yaml\n```\n";
    let lines = shell_lines(page);
    assert_eq!(lines, ["cargo run --release -- train a.yaml", "firebrick plan a.yaml --budget 1GiB 'x={a: 1}'"]);
    assert_eq!(arguments(&lines[0]).unwrap(), ["train", "a.yaml"]);
    assert_eq!(arguments(&lines[1]).unwrap(), ["plan", "a.yaml", "--budget", "1GiB", "x={a: 1}"]);
    assert_eq!(arguments("cargo test --release"), None);
    assert_eq!(arguments("apt-get install x"), None);
}
