//! Files of a checkpoint that are damaged: the run continues from the checkpoint before it, or ends with the file's
//! name, and never learns anything else than the undisturbed run.
//!
//! The nightly test `corruptions` damages files at random places. Here, each file of each run is damaged once.

use super::{Bench, program, stderr, succeeded};
use crate::support::{campaign_points, is_campaign};
use firebrick_backends::collective::{Settings, Threads};
use firebrick_engine::config::load;
use firebrick_engine::trainer::Trainer;
use rayon::prelude::*;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Settings of all runs. Of each step there is a checkpoint.
const SHORT: [&str; 6] = [
    "trainer.train_batch_size=2",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.val_max_samples=1",
    "rollout.n=2",
];

/// Step after which the runs are damaged; they are resumed to the next one.
const NEWEST: u64 = 2;

/// Seed of places and changes.
const SEED: u64 = 23;

/// A run of [`NEWEST`] steps and what it learns from there.
struct Case {
    name: &'static str,
    settings: Vec<String>,
    folder: PathBuf,
    /// Files of the last step, after a resumption from the newest checkpoint, and from the one before it.
    learnt: [BTreeMap<String, Vec<u8>>; 2],
}

/// A change of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Byte,
    Truncation,
    Removal,
}

/// How a damaged run went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    FellBack,
    Refused,
    Harmless,
}

pub fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step-{step:06}"))
}

/// Files of a folder and its folders, by sorted path.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

pub(super) fn copy_folder(from: &Path, to: &Path) {
    for path in files(from) {
        let copy = to.join(path.strip_prefix(from).unwrap());
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(&path, copy).unwrap();
    }
}

/// A checkpoint's files, except times, memory readings and checksums of these.
pub fn learnt(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let content = |path: PathBuf| {
        let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
        let mut bytes = fs::read(&path).unwrap();
        if name == "trainer/state.json" {
            let mut state: Value = serde_json::from_slice(&bytes).unwrap();
            for key in ["seconds", "peak_bytes"] {
                state[key].take();
            }
            bytes = state.to_string().into_bytes();
        }
        (name, bytes)
    };
    files(folder).into_iter().map(content).filter(|(name, _)| name != "checksums.json").collect()
}

impl Case {
    /// A run by this process' program, or by `ranks` threads of this process.
    fn new(bench: &Bench, name: &'static str, settings: &[&str], ranks: usize) -> Self {
        let settings: Vec<String> = SHORT.iter().chain(settings).map(|s| (*s).to_owned()).collect();
        let folder = bench.path(name);
        let mut case = Self { name, settings, folder, learnt: Default::default() };
        if ranks == 1 {
            succeeded(&case.train(bench, &case.folder, &[&format!("trainer.steps={NEWEST}")]));
        } else {
            let steps = [format!("trainer.steps={NEWEST}"), format!("output={}", case.folder.display())];
            let config = load(&bench.path("config.yaml"), &[&case.settings[..], &steps].concat()).unwrap();
            let done = Threads::run(ranks, Settings::default(), |rank| {
                Trainer::builder(config.clone()).world(rank).run().map(drop).map_err(|error| error.to_string())
            });
            assert!(done.iter().all(|rank| *rank == Ok(Ok(()))), "{done:?}");
        }
        for back in [0, 1] {
            let run = bench.path(&format!("{name}-{back}"));
            copy_folder(&case.folder, &run);
            if back == 1 {
                fs::remove_dir_all(checkpoint(&run, NEWEST)).unwrap();
            }
            succeeded(&case.resume(bench, &run));
            case.learnt[back] = learnt(&checkpoint(&run, NEWEST + 1));
        }
        case
    }

    fn train(&self, bench: &Bench, run: &Path, more: &[&str]) -> std::process::Output {
        let output = format!("output={}", run.display());
        let config = bench.path("config.yaml");
        let mut args = vec!["train", config.to_str().unwrap(), &output];
        args.extend(self.settings.iter().map(String::as_str).chain(more.iter().copied()));
        program(&args).env("RAYON_NUM_THREADS", "1").output().unwrap()
    }

    fn resume(&self, bench: &Bench, run: &Path) -> std::process::Output {
        self.train(bench, run, &["--resume", &format!("trainer.steps={}", NEWEST + 1)])
    }

    /// Files that are damaged: those of the newest checkpoint, and of the reference policy.
    fn targets(&self) -> Vec<PathBuf> {
        let reference = Some(self.folder.join("reference")).filter(|folder| folder.is_dir());
        let folders = std::iter::once(checkpoint(&self.folder, NEWEST)).chain(reference);
        folders.flat_map(|folder| files(&folder)).collect()
    }

    /// Damages a file of a copy of the run, which is then resumed.
    fn outcome(&self, bench: &Bench, target: &Path, damage: Damage, point: u64) -> Result<Outcome, String> {
        let temp = tempfile::tempdir_in(bench.path("")).unwrap();
        let run = temp.path().join("run");
        copy_folder(&self.folder, &run);
        let has_earlier = random(4 * point, 2) == 0;
        if !has_earlier {
            fs::remove_dir_all(checkpoint(&run, NEWEST - 1)).unwrap();
        }
        let relative = target.strip_prefix(&self.folder).unwrap();
        let is_reference = relative.starts_with("reference");
        let change = apply(&run.join(relative), damage, point);
        let output = self.resume(bench, &run);
        let message = stderr(&output);
        let place = format!("{}, {}, {change}, earlier checkpoint: {has_earlier}", self.name, relative.display());
        let wrong = |what: &str| Err(format!("{place}: {what}\n{message}"));
        let name = relative.file_name().unwrap().to_str().unwrap();
        if message.contains("panicked") {
            return wrong("a panic");
        }
        match output.status.code() {
            Some(2) if !message.contains(name) => wrong("the file is not named"),
            Some(2) if !message.contains("restore the") => wrong("no advice"),
            Some(2) if has_earlier && !is_reference => wrong("no fallback"),
            Some(2) => Ok(Outcome::Refused),
            Some(0) if message.contains("damaged checkpoint") => {
                if !message.contains(name) {
                    return wrong("the file is not named");
                }
                let kept = checkpoint(&run, NEWEST).with_extension("damaged").is_dir();
                let log = fs::read_to_string(run.join("run.log")).unwrap_or_default();
                match learnt(&checkpoint(&run, NEWEST + 1)) == self.learnt[1] {
                    false => wrong("another run"),
                    true if !kept || !log.contains("damaged checkpoint") => wrong("no trace of the damage"),
                    true => Ok(Outcome::FellBack),
                }
            }
            Some(0) if learnt(&checkpoint(&run, NEWEST + 1)) == self.learnt[0] => Ok(Outcome::Harmless),
            Some(0) => wrong("silently another run"),
            code => wrong(&format!("exit code {code:?}")),
        }
    }
}

/// Changes a file; the description of the change.
fn apply(path: &Path, damage: Damage, point: u64) -> String {
    let mut bytes = fs::read(path).unwrap();
    let len = bytes.len() as u64;
    // headers are a small part of large files
    let below = if random(4 * point + 1, 2) == 0 { len.min(1024) } else { len };
    let at = usize::try_from(random(4 * point + 2, below)).unwrap();
    match damage {
        Damage::Byte => {
            let change = u8::try_from(1 + random(4 * point + 3, 255)).unwrap();
            bytes[at] ^= change;
            fs::write(path, bytes).unwrap();
            format!("byte {at} xor {change:#04x}")
        }
        Damage::Truncation => {
            fs::write(path, &bytes[..at]).unwrap();
            format!("{at} of {len} bytes")
        }
        Damage::Removal => {
            fs::remove_file(path).unwrap();
            "removed".to_owned()
        }
    }
}

/// A number below `below`, by splitmix64.
pub fn random(index: u64, below: u64) -> u64 {
    let mut x = (SEED + index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) % below
}

/// A critic, a reference policy and masters; adapters with a merged model; state of two ranks.
fn cases(bench: &Bench) -> Vec<Case> {
    let (_, base) = super::adapters::base(bench);
    let critic =
        ["precision=bf16", "objective={name: ppo, kl_loss_coef: 0.05}", "critic={optim: {lr: 0.01}}", "rollout.n=1"];
    let adapters = ["model.arch=null", &base, "model.lora.rank=2", "model.lora.merge=true"];
    let shards = ["precision=bf16", "memory.zero_stage=2", "update.ppo_mini_batch_size=2"];
    vec![
        Case::new(bench, "critic", &critic, 1),
        Case::new(bench, "adapters", &adapters, 1),
        Case::new(bench, "shards", &shards, 2),
    ]
}

/// Kinds of damage by point: every sixth is a truncation in a nightly test, every third here, where some files are
/// missing too.
fn damage(point: u64) -> Damage {
    match (is_campaign("corruptions"), point % 6) {
        (true, 5) | (false, 1 | 4) => Damage::Truncation,
        (false, 2) => Damage::Removal,
        _ => Damage::Byte,
    }
}

#[test]
fn damage_of_any_file_of_a_checkpoint_is_named_and_never_another_run() {
    let bench = Bench::new();
    let cases = cases(&bench);
    let targets: Vec<(&Case, PathBuf)> =
        cases.iter().flat_map(|case| case.targets().into_iter().map(move |target| (case, target))).collect();
    let points = campaign_points().filter(|_| is_campaign("corruptions")).unwrap_or(0..targets.len() as u64);
    let outcomes: Vec<(Damage, Result<Outcome, String>)> = points
        .into_par_iter()
        .map(|point| {
            let (case, target) = &targets[usize::try_from(point).unwrap() % targets.len()];
            let damage = damage(point);
            (damage, case.outcome(&bench, target, damage, point))
        })
        .collect();
    let mut counts: BTreeMap<Outcome, u64> = BTreeMap::new();
    let mut failures = BTreeSet::new();
    for (_, outcome) in &outcomes {
        match outcome {
            Ok(outcome) => *counts.entry(*outcome).or_default() += 1,
            Err(failure) => drop(failures.insert(failure)),
        }
    }
    let truncations = outcomes.iter().filter(|(damage, _)| *damage == Damage::Truncation).count();
    let mut summary = format!("corruptions of {} files, {truncations} truncations: ", targets.len());
    for (outcome, count) in &counts {
        write!(summary, "{count} {outcome:?}, ").unwrap();
    }
    let summary = format!("{summary}\n{} passed, {} failed\n", counts.values().sum::<u64>(), failures.len());
    std::io::stderr().write_all(summary.as_bytes()).unwrap();
    assert!(failures.is_empty(), "{}", failures.into_iter().cloned().collect::<Vec<_>>().join("\n\n"));
}
