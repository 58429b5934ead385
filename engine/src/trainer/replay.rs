//! Replay of a run's step from the checkpoint before it, and the comparison with the files of the run.

use super::Trainer;
use crate::checkpoint::{RunDir, trainer_state};
use crate::config::{Logger, Loggers, RunConfig, mode_of};
use crate::metrics::{GLOBAL_STEP, Phase, is_of_a_machine};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::collective::Collective;
use firebrick_backends::host::MappedFile;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const METRICS: &str = "metrics.jsonl";
const SAMPLES: &str = "samples.jsonl";

/// A line of these files.
type Line = Map<String, Value>;

/// Characters of a value in a message.
const SHOWN: usize = 80;

/// A replayed step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Step of the checkpoint that it started from; 0: the beginning of the run.
    pub from: u64,
    /// Compared metrics.
    pub metrics: usize,
    /// Compared samples.
    pub samples: usize,
    /// Compared tensors of the step's checkpoint; 0 without one.
    pub tensors: usize,
    /// The first difference.
    pub difference: Option<Difference>,
}

/// A value that differs between a run and its replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Training step.
    pub step: u64,
    /// Phase that computes the value.
    pub phase: Phase,
    /// The metric, the sample's field, or the tensor.
    pub what: String,
    /// Value in the run.
    pub recorded: String,
    /// Value in the replay.
    pub replayed: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, phase, what, recorded, replayed } = self;
        write!(f, "step {step}, phase {phase}: {what} is {recorded} in the run and {replayed} in the replay")
    }
}

/// Runs a step of a run again, with the steps between it and the checkpoint before it, in a temporary folder beside the
/// run's, and compares metrics, samples and, if the step has a checkpoint, weights and optimizer state. `config` is the
/// run's. The run folder stays as it is. Every rank of a run calls it; rank 0 compares.
///
/// # Errors
/// `Error::Report` if the run has not recorded the step, its checkpoint is damaged, or its inputs have changed; those
/// of [`Trainer::run`].
pub fn replay(mut config: RunConfig, run: &Path, step: u64, ranks: Arc<dyn Collective>) -> Result<Replay> {
    let refused = |detail: String| Error::Report { path: run.to_owned(), detail };
    let recorded = lines(run, METRICS, |line| line.get(GLOBAL_STEP)?.as_u64())?;
    if step == 0 || !recorded.contains_key(&step) {
        let last = recorded.keys().next_back().copied().unwrap_or(0);
        return Err(refused(format!("metrics.jsonl has no step {step}; its last step is {last}")));
    }
    let world = World::new(Arc::clone(&ranks));
    let parent = std::path::absolute(run).ok().and_then(|run| run.parent().map(Path::to_owned)).unwrap_or_default();
    let folder =
        || tempfile::Builder::new().prefix("replay-").tempdir_in(&parent).map_err(Error::io("create", &parent));
    let folder = world.writes().then(folder).transpose()?;
    let again = world.broadcast(folder.as_ref().map(|folder| folder.path().join("run")))?.unwrap_or_default();
    let checkpoints = RunDir::read_only(run).checkpoints()?;
    let is_saved = checkpoints.iter().any(|(saved, _)| *saved == step);
    let mode = match checkpoints.first() {
        Some((_, folder)) => trainer_state::load_state(&folder.join("trainer"))?.mode,
        None => mode_of(&config),
    };
    config.output.clone_from(&again);
    let plan = run.join("plan.json");
    config.memory.plan = plan.exists().then(|| std::path::absolute(&plan).unwrap_or(plan));
    config.memory.snapshot = 0;
    config.trainer.logger = Loggers::new([Logger::File]);
    // of the steps after the checkpoint only the last is a multiple of itself
    config.trainer.save_freq = if is_saved { i64::try_from(step).unwrap_or(-1) } else { -1 };
    config.trainer.keep_best = None;
    let mut trainer = Trainer::builder(config).mode(mode).world(ranks).replaying(run, step).build()?;
    let from = trainer.finished_steps();
    while trainer.finished_steps() < step {
        trainer.step()?;
    }
    drop(trainer);
    let mut replay = Replay { from, metrics: 0, samples: 0, tensors: 0, difference: None };
    if world.writes() {
        replay.compare([run, &again], from + 1..=step)?;
        if is_saved && replay.difference.is_none() {
            replay.compare_tensors([run, &again], step)?;
        }
    }
    Ok(replay)
}

/// Lines of a file of a run folder by key; later ones count. Without the file there are none.
fn lines<K: Ord>(run: &Path, name: &str, key: impl Fn(&Line) -> Option<K>) -> Result<BTreeMap<K, Line>> {
    let path = run.join(name);
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let file = std::fs::File::open(&path).map_err(Error::io("read", &path))?;
    let mut lines = BTreeMap::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(Error::io("read", &path))?;
        // a killed process leaves a truncated line
        let line = serde_json::from_str::<Line>(&line).ok();
        lines.extend(line.and_then(|line| Some((key(&line)?, line))));
    }
    Ok(lines)
}

impl Replay {
    /// Compares samples and metrics of steps, in the order of their phases.
    fn compare(&mut self, runs: [&Path; 2], steps: RangeInclusive<u64>) -> Result<()> {
        let sample = |line: &Line| {
            let number = |key: &str| line.get(key)?.as_u64();
            Some((number("step")?, number("draw")?, number("sample")?)).filter(|(step, ..)| steps.contains(step))
        };
        let step = |line: &Line| line.get(GLOBAL_STEP)?.as_u64().filter(|step| steps.contains(step));
        let [recorded, replayed] = [lines(runs[0], SAMPLES, sample)?, lines(runs[1], SAMPLES, sample)?];
        let mut differences = Vec::new();
        self.samples = recorded.len();
        for key in union(&recorded, &replayed) {
            let (step, draw, sample) = key;
            let of = format!(" of draw {draw}, sample {sample}");
            let phase = |name: &str| Some(phase_of_field(name));
            differences.extend(first(step, [recorded.get(&key), replayed.get(&key)], &of, phase));
        }
        let [recorded, replayed] = [lines(runs[0], METRICS, step)?, lines(runs[1], METRICS, step)?];
        for step in union(&recorded, &replayed) {
            let [recorded, replayed] = [recorded.get(&step), replayed.get(&step)];
            let validated =
                |line: Option<&Line>| line.is_some_and(|line| line.keys().any(|name| is_of_validation(name)));
            // the last step of a session is validated
            let compares_validation = validated(recorded) && validated(replayed);
            let compared = |name: &str| !is_of_a_machine(name) && (compares_validation || !is_of_validation(name));
            self.metrics += recorded.into_iter().flat_map(Map::keys).filter(|name| compared(name)).count();
            let phase = |name: &str| compared(name).then(|| phase_of_metric(name));
            differences.extend(first(step, [recorded, replayed], "", phase));
        }
        // samples are before the metrics that are computed from them
        differences.sort_by_key(|difference| (difference.step, difference.phase));
        self.difference = differences.into_iter().next();
        Ok(())
    }

    /// Compares the tensors of a step's checkpoint.
    fn compare_tensors(&mut self, runs: [&Path; 2], step: u64) -> Result<()> {
        let folders = runs.map(|run| run.join(RunDir::checkpoint_name(step)));
        let files: BTreeSet<PathBuf> = folders
            .iter()
            .map(|folder| tensor_files(folder))
            .collect::<Result<Vec<_>>>()?
            .concat()
            .into_iter()
            .collect();
        for file in files {
            let [recorded, replayed] = [Tensors::open(&folders[0], &file)?, Tensors::open(&folders[1], &file)?];
            let [recorded, replayed] = [recorded.parsed()?, replayed.parsed()?];
            let names: BTreeSet<&str> = recorded.names().into_iter().chain(replayed.names()).collect();
            self.tensors += names.len();
            let mut differences = names.into_iter().filter_map(|name| {
                let pair = [&recorded, &replayed].map(|tensors| tensors.tensor(name).ok());
                let (what, [recorded, replayed]) = different_values(pair)?;
                let what = format!("{what} of {name} in {}", file.display());
                Some(Difference { step, phase: Phase::SaveCheckpoint, what, recorded, replayed })
            });
            self.difference = differences.next();
            if self.difference.is_some() {
                break;
            }
        }
        Ok(())
    }
}

/// Keys of both.
fn union<K: Ord + Copy, V>(one: &BTreeMap<K, V>, other: &BTreeMap<K, V>) -> BTreeSet<K> {
    one.keys().chain(other.keys()).copied().collect()
}

/// The first difference of two lines by phase, of the fields that have a phase.
fn first(step: u64, lines: [Option<&Line>; 2], of: &str, phase: impl Fn(&str) -> Option<Phase>) -> Option<Difference> {
    let names: BTreeSet<&String> = lines.iter().flatten().flat_map(|line| line.keys()).collect();
    let different = names.into_iter().filter_map(|name| {
        let [recorded, replayed] = lines.map(|line| line.and_then(|line| line.get(name)));
        let phase = phase(name).filter(|_| recorded != replayed)?;
        let [recorded, replayed] = shown([recorded, replayed]);
        Some(Difference { step, phase, what: format!("{name}{of}"), recorded, replayed })
    });
    different.min_by_key(|difference| difference.phase)
}

/// Two values in a message, from shortly before the first character that differs.
fn shown(values: [Option<&Value>; 2]) -> [String; 2] {
    let [a, b] = values.map(|value| value.map_or_else(|| "missing".to_owned(), Value::to_string));
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    let start = if a.chars().count().max(b.chars().count()) > SHOWN { same.saturating_sub(SHOWN / 4) } else { 0 };
    [a, b].map(|text| {
        let part: String = text.chars().skip(start).take(SHOWN).collect();
        let [before, after] = [start > 0, text.chars().count() > start + SHOWN].map(|cut| if cut { "…" } else { "" });
        format!("{before}{part}{after}")
    })
}

/// Phase that computes a field of a sample.
fn phase_of_field(name: &str) -> Phase {
    match name {
        "advantage" => Phase::Advantages,
        _ if name.starts_with("reward") || name == "readings" => Phase::Reward,
        _ => Phase::Generate,
    }
}

/// Phases by the first characters of their metrics; the longest that fit count. Others are of sampling.
const PHASES: [(&str, Phase); 16] = [
    ("frac_reward", Phase::Reward),
    ("reward/", Phase::Reward),
    ("critic/score", Phase::Reward),
    ("training/rollout_probs", Phase::OldLogProbs),
    ("rollout_corr/", Phase::OldLogProbs),
    ("critic/values", Phase::Values),
    ("critic/rewards", Phase::Advantages),
    ("critic/advantages", Phase::Advantages),
    ("critic/returns", Phase::Advantages),
    ("critic/", Phase::UpdateCritic),
    ("actor/", Phase::UpdateActor),
    ("clip_ratio/", Phase::UpdateActor),
    ("batch/", Phase::UpdateActor),
    ("train/", Phase::UpdateActor),
    ("val-", Phase::Validation),
    ("val/", Phase::ValidationLoss),
];

fn phase_of_metric(name: &str) -> Phase {
    let fitting = PHASES.iter().filter(|(prefix, _)| name.starts_with(prefix));
    fitting.max_by_key(|(prefix, _)| prefix.len()).map_or(Phase::Generate, |(_, phase)| *phase)
}

fn is_of_validation(name: &str) -> bool {
    name.starts_with("val-") || name.starts_with("val/")
}

/// Paths of safetensors files in a folder, relative to it.
fn tensor_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(inside) = folders.pop() {
        for entry in std::fs::read_dir(&inside).map_err(Error::io("read", &inside))? {
            let path = entry.map_err(Error::io("read", &inside))?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "safetensors") {
                files.push(path.strip_prefix(folder).unwrap_or(&path).to_owned());
            }
        }
    }
    Ok(files)
}

/// A file of tensors, which may be missing.
struct Tensors {
    path: PathBuf,
    map: Option<MappedFile>,
}

impl Tensors {
    fn open(folder: &Path, file: &Path) -> Result<Self> {
        let path = folder.join(file);
        let map = path.exists().then(|| MappedFile::open(&path)).transpose().map_err(Error::io("read", &path))?;
        Ok(Self { path, map })
    }

    fn parsed(&self) -> Result<SafeTensors<'_>> {
        /// An empty file of tensors.
        const NONE: &[u8] = b"\x02\0\0\0\0\0\0\0{}";
        SafeTensors::deserialize(self.map.as_ref().map_or(NONE, MappedFile::bytes))
            .map_err(|error| Error::Report { path: self.path.clone(), detail: error.to_string() })
    }
}

/// The number of values that differ and the index of the first one, with both of its values.
fn different_values(pair: [Option<TensorView<'_>>; 2]) -> Option<(String, [String; 2])> {
    let [Some(a), Some(b)] = &pair else {
        return Some(("the tensor".to_owned(), pair.map(|t| if t.is_some() { "there" } else { "missing" }.to_owned())));
    };
    if (a.dtype(), a.shape()) != (b.dtype(), b.shape()) {
        return Some(("type and shape".to_owned(), [a, b].map(|t| format!("{:?} {:?}", t.dtype(), t.shape()))));
    }
    let count = a.shape().iter().product::<usize>().max(1);
    let width = (a.data().len() / count).max(1);
    let [x, y] = [a, b].map(|tensor| tensor.data().chunks(width));
    let different: Vec<_> = x.zip(y).enumerate().filter(|(_, (x, y))| x != y).collect();
    let (at, (x, y)) = *different.first()?;
    let number = |bytes: &[u8]| match (a.dtype(), bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).to_string(),
        (Dtype::BF16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]).to_string(),
        (_, bytes) => format!("{bytes:02x?}"),
    };
    Some((format!("value {at} (the first of {} of {count} that differ)", different.len()), [number(x), number(y)]))
}
