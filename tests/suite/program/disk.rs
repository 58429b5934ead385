//! Disks that are full, read-only folders and folders that vanish: the run ends with the file, the reason and a remedy,
//! and continues from its newest checkpoint to the same weights.
//!
//! The nightly test `disk` fills a file system at more places. A file system of memory in a mount namespace of the
//! program has room for a number of pages or files; a limit of the process refuses to extend a file.

use super::corruptions::{files, learnt};
use super::{Bench, program_path, stderr, succeeded};
use crate::support::{campaign_points, is_campaign, report};
use rayon::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Steps of a run. Of each step there is a checkpoint.
const STEPS: u64 = 3;

/// Points of a test that is not nightly.
const POINTS: u64 = 9;

/// Bytes of a page of a file system of memory.
const PAGE: u64 = 4096;

/// Settings of all runs.
const SETTINGS: [&str; 9] = [
    "trainer.steps=3",
    "trainer.train_batch_size=2",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    "trainer.val_max_samples=2",
    "trainer.keep_best=val-core/arithmetic/reward",
    "trainer.log_tokens=1",
    "trainer.max_ckpt_to_keep=2",
    "rollout.n=2",
];

/// Mounts a file system of memory at `$1` with the options `$2`, runs the other arguments and copies the run to `$3`.
const FULL: &str = r#"mount -t tmpfs -o "$2" none "$1" || exit 97
run="$1/run" copy="$3"; shift 3
"$@"; code=$?
if [ -d "$run" ]; then cp -a "$run" "$copy" || exit 98; fi
exit $code"#;

/// Mounts the folder `$1` read-only and runs the other arguments.
const READ_ONLY: &str = r#"mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 97
shift; exec "$@""#;

/// Runs the other arguments with at most `$1` blocks in a file.
const SHORT_FILES: &str = r#"trap "" XFSZ; ulimit -f "$1"; shift; exec "$@""#;

/// A limit of a file system or of a process.
#[derive(Clone, Copy, Debug)]
enum Limit {
    Pages(u64),
    Files(u64),
    /// Blocks of 512 bytes of one file.
    Blocks(u64),
}

/// Arguments of `unshare` for a mount namespace, if this user may have one.
fn namespace() -> Option<&'static str> {
    ["-Urm", "-m"].into_iter().find(|args| {
        let probe = Command::new("unshare").args([args, "mount", "-t", "tmpfs", "none", "/mnt"]).output();
        probe.is_ok_and(|output| output.status.success())
    })
}

/// A shell's script with its arguments, in a mount namespace.
fn in_namespace(script: &str, args: &[&str]) -> Option<Command> {
    let mut command = Command::new("unshare");
    command.args([namespace()?, "sh", "-c", script, "sh"]).args(args);
    Some(command)
}

/// Arguments of the program that train in the folder `run`.
fn train(bench: &Bench, run: &Path) -> Vec<String> {
    let mut args = vec![program_path().display().to_string(), "train".into()];
    args.push(bench.path("config.yaml").display().to_string());
    args.push(format!("output={}", run.display()));
    args.extend(SETTINGS.map(String::from));
    args
}

/// Runs a command whose program uses one thread of arithmetic.
fn output(mut command: Command) -> Output {
    command.env_remove("FIREBRICK_LOG").env("RAYON_NUM_THREADS", "1").output().unwrap()
}

fn resume(bench: &Bench, run: &Path) -> Output {
    let args = train(bench, run);
    let mut command = Command::new(&args[0]);
    command.args(&args[1..]).arg("--resume");
    output(command)
}

/// Steps of the lines of `metrics.jsonl` that are whole, without validations before the first step.
fn steps(run: &Path) -> Vec<u64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| line["training/global_step"].as_u64()).filter(|step| *step > 0).collect()
}

/// Steps of the checkpoints that are complete.
fn checkpoints(run: &Path) -> Vec<u64> {
    let entries = fs::read_dir(run.join("checkpoints")).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

fn last(run: &Path) -> BTreeMap<String, Vec<u8>> {
    learnt(&run.join(format!("checkpoints/step-{STEPS:06}")))
}

/// The file that an error's message names, without its folders and its step.
fn named(message: &str) -> Option<String> {
    let path = message.lines().find(|line| line.starts_with("error: "))?.split(": ").nth(1)?;
    let name = path.rsplit(['/', ' ']).next()?.trim_end_matches(".tmp");
    Some(if name.starts_with("step-") { "step".into() } else { name.to_owned() })
}

/// Verifies a run that was refused space, and continues it where there is some. The file that it named.
fn continued(bench: &Bench, run: &Path, refused: &Output, whole: &Path) -> Result<String, String> {
    let message = stderr(refused);
    let wrong = |what: &str| Err(format!("{what}\n{message}"));
    let is_done = refused.status.success();
    if !matches!(refused.status.code(), Some(0 | 2)) || message.contains("panicked") {
        return wrong("neither an end nor an error of files");
    }
    let file = if is_done { "(none)".into() } else { named(&message).unwrap_or_default() };
    if !is_done && !message.contains("continues with --resume") {
        return wrong("no remedy");
    }
    let (saved, before) = (checkpoints(run), steps(run));
    let newest = saved.last().copied().unwrap_or(0);
    if !before.iter().copied().eq(1..=before.len() as u64) || (before.len() as u64) < newest {
        return wrong(&format!("steps {before:?}, checkpoints {saved:?}"));
    }
    let again = resume(bench, run);
    let said = stderr(&again);
    if !again.status.success() || said.contains("damaged") || said.contains("panicked") {
        return Err(format!("it does not continue from step {newest}: {said}\n{message}"));
    }
    if !steps(run).into_iter().eq(1..=STEPS) || last(run) != last(whole) {
        return wrong("another run");
    }
    Ok(file)
}

/// Runs on a full disk and continues elsewhere.
fn outcome(bench: &Bench, limit: Limit, whole: &Path) -> Result<String, String> {
    let temp = tempfile::tempdir_in(bench.path("")).unwrap();
    let (mount, copy) = (temp.path().join("disk"), temp.path().join("run"));
    fs::create_dir(&mount).unwrap();
    let refused = match limit {
        Limit::Blocks(blocks) => {
            let mut command = Command::new("sh");
            command.args(["-c", SHORT_FILES, "sh", &blocks.to_string()]).args(train(bench, &copy));
            output(command)
        }
        Limit::Pages(_) | Limit::Files(_) => {
            let room = match limit {
                Limit::Pages(pages) => format!("size={}", pages * PAGE),
                Limit::Files(files) | Limit::Blocks(files) => format!("size=64m,nr_inodes={files}"),
            };
            let script = [mount.to_str().unwrap(), &room, copy.to_str().unwrap()];
            let mut command = in_namespace(FULL, &script).expect("probed before");
            command.args(train(bench, &mount.join("run")));
            output(command)
        }
    };
    continued(bench, &copy, &refused, whole).map_err(|what| format!("{limit:?}: {what}"))
}

/// Limits from almost nothing to what a whole run needs, spread over all points of a kind.
fn limits(whole: &Path, count: u64) -> Vec<Limit> {
    let kept = files(whole);
    let sizes: Vec<u64> = kept.iter().map(|path| fs::metadata(path).unwrap().len()).collect();
    let folders: BTreeSet<&Path> = kept.iter().filter_map(|path| path.parent()).collect();
    // the next checkpoint is written beside those that are kept
    let in_checkpoints = kept.iter().filter(|path| path.starts_with(whole.join("checkpoints"))).count() as u64;
    let pages: u64 = sizes.iter().map(|size| size.div_ceil(PAGE)).sum();
    let most = [
        (Limit::Pages as fn(u64) -> Limit, 1, pages * 3 / 2),
        (Limit::Files, 2, (kept.len() + folders.len()) as u64 + in_checkpoints),
        (Limit::Blocks, 1, sizes.iter().max().unwrap().div_ceil(512)),
    ];
    let kinds = if namespace().is_some() { &most[..] } else { &most[2..] };
    let of = kinds.len() as u64;
    let limit = |point: u64| {
        let (kind, least, most) = kinds[(point % of) as usize];
        kind(least + (most - least) * (point / of) / count.div_ceil(of))
    };
    (0..count).map(limit).collect()
}

#[test]
fn a_full_disk_ends_a_run_with_a_remedy_and_loses_nothing() {
    let bench = Bench::new();
    let whole = bench.path("whole");
    succeeded(&resume(&bench, &whole));
    let count = campaign_points().filter(|_| is_campaign("disk")).map_or(POINTS, |points| points.end);
    let limits = limits(&whole, count);
    let outcomes: Vec<_> = limits.into_par_iter().map(|limit| outcome(&bench, limit, &whole)).collect();
    let mut by_file: BTreeMap<&str, u64> = BTreeMap::new();
    for file in outcomes.iter().flatten() {
        *by_file.entry(file).or_default() += 1;
    }
    let failures: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).cloned().collect();
    let (passed, failed) = (count - failures.len() as u64, failures.len());
    let summary = format!("files that met a full disk: {by_file:?}\n{passed} passed, {failed} failed\n");
    std::io::stderr().write_all(summary.as_bytes()).unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn a_read_only_folder_ends_a_run_with_a_remedy_and_loses_nothing() {
    if namespace().is_none() {
        return report("no mount namespace: read-only folders are not tested");
    }
    let bench = Bench::new();
    let (whole, run) = (bench.path("whole"), bench.path("run"));
    succeeded(&resume(&bench, &whole));
    for folder in ["", "checkpoints"] {
        let first = train(&bench, &run);
        let mut command = Command::new(&first[0]);
        command.args(&first[1..]).args(["trainer.steps=1", "--resume"]);
        succeeded(&output(command));
        let folder = run.join(folder);
        let mut command = in_namespace(READ_ONLY, &[folder.to_str().unwrap()]).unwrap();
        command.args(train(&bench, &run)).arg("--resume");
        let refused = output(command);
        assert!(stderr(&refused).contains("make its folder writable"), "{}", stderr(&refused));
        assert_eq!(checkpoints(&run), [1]);
        continued(&bench, &run, &refused, &whole).unwrap_or_else(|what| panic!("{}: {what}", folder.display()));
        fs::remove_dir_all(&run).unwrap();
    }
}

#[test]
fn a_run_whose_folder_is_moved_ends_writes_no_second_folder_and_continues_in_the_moved_one() {
    let bench = Bench::new();
    let [run, moved] = ["run", "moved"].map(|name| bench.path(name));
    let args = train(&bench, &run);
    let mut command = Command::new(&args[0]);
    command.args(&args[1..]).args(["trainer.steps=4000", "trainer.test_freq=0"]);
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while steps(&run).len() < 3 || checkpoints(&run).is_empty() {
        assert!(started.elapsed() < Duration::from_mins(1), "no steps");
        std::thread::sleep(Duration::from_millis(3));
    }
    fs::rename(&run, &moved).unwrap();
    while process.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_mins(2), "it continues without its folder");
        std::thread::sleep(Duration::from_millis(3));
    }
    let ended = process.wait_with_output().unwrap();
    let message = stderr(&ended);
    assert_eq!(ended.status.code(), Some(2), "{message}");
    assert!(message.contains("its folder is gone") && message.contains("`output` set to"), "{message}");
    assert!(!run.exists(), "a folder of no run: {:?}", files(&run));
    let newest = *checkpoints(&moved).last().unwrap();
    let args = train(&bench, &moved);
    let mut command = Command::new(&args[0]);
    let more = newest + 2;
    command.args(&args[1..]).args([&format!("trainer.steps={more}"), "trainer.test_freq=0", "--resume"]);
    succeeded(&output(command));
    assert!(steps(&moved).into_iter().eq(1..=more));
}
