//! Trainer part of a checkpoint: state of the run, and the optimizer's masters and moments.

use super::json;
use super::saved_tensors::SavedTensors;
use super::sharded::{self, DAMAGED_ADVICE, PendingShard};
use crate::config::Mode;
use crate::objective::AdaptiveCoefficients;
use crate::optim::{AdamW, Scaler};
use crate::plan::Partition;
use crate::task::RunningStats;
use crate::world::World;
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::host::{create_folder, write_synced};
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
use firebrick_models::checkpoint::WholeModel;
use firebrick_models::checkpoint::stream::{LazyTensor, write_tensors};
use firebrick_models::decoder::{Param, ShardSlice};
use firebrick_models::unit::ParamSpec;
use firebrick_spec::file::{MAX_TEXT_BYTES, inside, read_text};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer";
const MASTERS: &str = "masters";
const VALUE_HEAD: &str = "value_head.safetensors";

/// State of a run.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct TrainerState {
    /// Kind of training.
    pub mode: Mode,
    /// Finished steps.
    pub step: u64,
    /// Prompts drawn.
    pub draws: u64,
    /// Applied optimizer steps.
    pub optimizer_steps: u64,
    /// Applied optimizer steps of the critic.
    #[serde(default)]
    pub critic_steps: u64,
    /// Optimizer steps skipped for a non-finite gradient norm.
    pub skipped_steps: u64,
    /// Tokens sampled and trained on.
    pub tokens: u64,
    /// Seconds of training, earlier sessions included.
    pub seconds: f64,
    /// Largest device bytes measured, earlier sessions included.
    pub peak_bytes: u64,
    /// First validation value by metric.
    pub first_validation: BTreeMap<String, f64>,
    /// Latest validation value by metric.
    pub last_validation: BTreeMap<String, f64>,
    /// Adaptive coefficients of the objective.
    #[serde(default, rename = "controls")]
    pub coefficients: AdaptiveCoefficients,
    /// Loss scale of the policy.
    #[serde(default)]
    pub loss_scale: Option<Scaler>,
    /// Loss scale of the critic.
    #[serde(default)]
    pub critic_loss_scale: Option<Scaler>,
    /// Running statistics of normalized rewards, by name.
    #[serde(default)]
    pub rewards: BTreeMap<String, RunningStats>,
    /// Best validation by `trainer.keep_best`, whose step has a checkpoint.
    #[serde(default)]
    pub best: Option<BestValidation>,
    /// True if the checkpoint has an index of checksums, which earlier versions did not write.
    #[serde(default)]
    pub checksums: bool,
}

/// Value of a metric in a validation.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct BestValidation {
    /// Finished steps.
    pub step: u64,
    /// Name of the metric.
    pub metric: String,
    /// Its value.
    pub value: f64,
}

impl TrainerState {
    /// State at the start of a run.
    pub fn new(mode: Mode) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Records a validation.
    pub fn add_validation(&mut self, values: &BTreeMap<String, f64>) {
        for (name, &value) in values {
            self.first_validation.entry(name.clone()).or_insert(value);
            self.last_validation.insert(name.clone(), value);
        }
    }
}

/// Writes the state of the run, and the value head of a policy that has one.
///
/// # Errors
/// `Error::Io` if a file cannot be written; `Error::Model` if the value head cannot be read from the device or written.
pub fn save(dir: &Path, state: &TrainerState, model: &dyn WholeModel) -> Result<()> {
    create_folder(dir).map_err(Error::io("create", dir))?;
    let path = dir.join(STATE);
    let text = json(&TrainerState { checksums: true, ..state.clone() }).map_err(Error::io("write", &path))?;
    write_synced(&path, text.as_bytes()).map_err(Error::io("write", &path))?;
    match model.decoder().value_index() {
        Some(index) => save_value_head(dir, model, index),
        None => Ok(()),
    }
}

/// Writes the value head of a policy, whose exported folder is a plain language model.
fn save_value_head(dir: &Path, model: &dyn WholeModel, index: usize) -> Result<()> {
    let spec = model.decoder().whole_model_specs().nth(index);
    let tensor = spec.map(|spec| {
        let [rows, _] = spec.rows_cols();
        let read = move || Ok(model.rows(index, 0..rows)?.download()?.to_f32());
        (spec.name.clone(), LazyTensor::f32(&spec.rows_cols(), read))
    });
    Ok(write_tensors(&dir.join(VALUE_HEAD), tensor.into_iter().collect(), &[])?)
}

/// Reads the value head into a decoder that has one, or the optimizer's shard of it.
///
/// # Errors
/// `Error::Io` if the file cannot be read; `Error::Resume` if it has no value head, or one of another shape.
pub fn load_value_head(dir: &Path, decoder: &mut Decoder, optimizer: &AdamW) -> Result<()> {
    let Some(head) = decoder.value_index() else {
        return Ok(());
    };
    SavedTensors::open(dir, VALUE_HEAD)?.with(|tensors| {
        let (device, precision) = (decoder.device().clone(), decoder.arch().precision);
        let sharded = is_sharded(decoder, head);
        decoder.update(|index, spec, value| {
            if index != head {
                return Ok(value);
            }
            let Some(values) = tensors.read(&spec.name, spec, None, 0..spec.numel())? else {
                return Err(tensors.damaged("the value head is missing"));
            };
            let values = shard(values, spec, sharded.then(|| optimizer.part(index, spec)));
            Ok(placed_like(&value, values.rounded(precision), &device))
        })
    })
}

/// Values in the place of a parameter.
fn placed_like(param: &Param, values: HostTensor, device: &Device) -> Param {
    match param {
        Param::Device(_) => Param::Device(values.into_device(device)),
        Param::Host(_) => Param::Host(values),
    }
}

/// Writes the state of an optimizer into an existing folder: its moments and, with `masters`, the f32 master weights.
/// With sharded state, every rank writes its own file.
///
/// # Errors
/// If a file cannot be written, or a rank has failed or is gone.
pub fn save_optimizer(dir: &Path, optimizer: &AdamW, decoder: &Decoder, masters: bool, world: &World) -> Result<()> {
    let mut parts = vec![(OPTIMIZER, moments(optimizer, decoder))];
    if masters {
        parts.push((MASTERS, master_weights(optimizer, decoder)));
    }
    // the first of the ranks with the same whole share writes it
    let writes = !optimizer.partition().is_whole() || world.replicas().writes();
    for (stem, tensors) in parts {
        if optimizer.partition().is_whole() && !decoder.is_part() {
            let write = || {
                let tensors = tensors.into_iter().map(PendingShard::whole).collect();
                Ok(write_tensors(&dir.join(format!("{stem}.safetensors")), tensors, &[])?)
            };
            world.agree(if world.writes() { write() } else { Ok(()) })?;
            continue;
        }
        let ranks = (world.rank(), world.size());
        let tensors = if writes { tensors } else { Vec::new() };
        let shards = world.agree(sharded::write(dir, stem, ranks, tensors))?;
        world.agree(sharded::write_index(dir, stem, &shards, world))?;
    }
    Ok(())
}

/// Master weights, without frozen ones.
fn master_weights<'a>(optimizer: &'a AdamW, decoder: &'a Decoder) -> Vec<PendingShard<'a>> {
    let trained = owned(optimizer, decoder).filter(|(_, spec, _)| spec.trainable);
    let masters = trained.map(|(index, spec, range)| {
        let part = range.clone();
        let read = move || match optimizer.master(index).map_err(Error::into_model)? {
            Some(master) => Ok(master),
            // with sharded weights, the parameter is the shard
            None if is_sharded(decoder, index) => Ok(decoder.param(index).download()?.to_f32()),
            None => {
                let values = decoder.param(index).part(part.clone(), [1, part.len()]);
                Ok(values.download()?.to_f32())
            }
        };
        PendingShard::new(spec.name.clone(), spec, decoder.shard_slice(index), range, read)
    });
    masters.collect()
}

/// A parameter's values, or a rank's range of them.
fn shard(values: Vec<f32>, spec: &ParamSpec, range: Option<Range<usize>>) -> HostTensor {
    match range {
        Some(range) => HostTensor::from_values(values[range.clone()].to_vec(), Partition::shape(range.len())),
        None => HostTensor::from_values(values, spec.rows_cols()),
    }
}

/// Returns true if a rank has only a shard of the parameter at a flat index.
fn is_sharded(decoder: &Decoder, index: usize) -> bool {
    let mut units = decoder.units().iter();
    units.any(|unit| unit.is_sharded() && unit.range.contains(&index))
}

/// Moments.
fn moments<'a>(optimizer: &'a AdamW, decoder: &'a Decoder) -> Vec<PendingShard<'a>> {
    let with_moments = owned(optimizer, decoder).filter(|(index, ..)| optimizer.has_moments(*index));
    let shards = with_moments.flat_map(|(index, spec, range)| {
        MOMENTS.into_iter().enumerate().map(move |(moment, name)| {
            let read = move || {
                let moments = optimizer.moments(index).map_err(Error::into_model)?;
                Ok(moments.map_or_else(Vec::new, |moments| moments.into_iter().nth(moment).unwrap_or_default()))
            };
            let name = format!("{}.{name}", spec.name);
            PendingShard::new(name, spec, decoder.shard_slice(index), range.clone(), read)
        })
    });
    shards.collect()
}

/// Flat index, spec and range of the parameters that an optimizer has, without copies of other ranks.
fn owned<'a>(optimizer: &'a AdamW, decoder: &'a Decoder) -> impl Iterator<Item = (usize, &'a ParamSpec, Range<usize>)> {
    let specs = decoder.specs().enumerate();
    specs
        .map(|(index, spec)| (index, spec, optimizer.part(index, spec)))
        .filter(|(index, _, range)| !range.is_empty() && !decoder.is_copy(*index))
}

/// Names of the two moments in the optimizer file, as in `PyTorch`.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// Reads the state of the run from a trainer folder.
///
/// # Errors
/// `Error::Io` if the file cannot be read, `Error::Resume` if it is invalid.
pub fn load_state(dir: &Path) -> Result<TrainerState> {
    let path = dir.join(STATE);
    let text =
        inside(dir, STATE).and_then(|path| read_text(&path, MAX_TEXT_BYTES)).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text)
        .map_err(|e| Error::Resume { path: path.clone(), detail: format!("{e}; {DAMAGED_ADVICE}") })
}

/// Reads the f32 masters of a trainer folder, if there are any, into the decoder. A decoder in half precision gets
/// rounded values, and the optimizer its part of the masters.
///
/// # Errors
/// `Error::Io` if a file cannot be read, `Error::Resume` if a master is missing or has another shape, `Error::Device`
/// and `Error::Model` if the device fails.
pub fn load_masters(dir: &Path, decoder: &mut Decoder, optimizer: &mut AdamW) -> Result<()> {
    let Some(file) = SavedTensors::find(dir, MASTERS)? else {
        return Ok(());
    };
    file.with(|tensors| {
        let device = decoder.device().clone();
        let precision = decoder.arch().precision;
        let blocks: Vec<Option<ShardSlice>> =
            (0..decoder.specs().count()).map(|index| decoder.shard_slice(index)).collect();
        let sharded: Vec<bool> = (0..blocks.len()).map(|index| is_sharded(decoder, index)).collect();
        decoder.update(|index, spec, value| {
            if !spec.trainable {
                return Ok(value);
            }
            let block = blocks[index].as_ref();
            let Some(values) = tensors.read(&spec.name, spec, block, 0..spec.numel())? else {
                return Err(tensors.damaged(&format!("the f32 master of {} is missing", spec.name)));
            };
            let part = optimizer.part(index, spec);
            if precision.is_half() && !part.is_empty() {
                optimizer.set_master(index, values[part.clone()].to_vec(), &device)?;
            }
            let mut values = shard(values, spec, sharded[index].then_some(part));
            if precision.is_half() {
                values = values.rounded(precision);
            }
            Ok(placed_like(&value, values, &device))
        })
    })
}

/// Reads an optimizer's part of the moments of a trainer folder, after `steps` applied steps.
///
/// # Errors
/// `Error::Io` if a file is missing or cannot be read, `Error::Resume` if a moment is missing or has another shape,
/// `Error::Device` and `Error::Model` if the device fails.
pub fn load_optimizer(dir: &Path, steps: u64, decoder: &Decoder, optimizer: &mut AdamW) -> Result<()> {
    let Some(file) = SavedTensors::find(dir, OPTIMIZER)? else {
        let path = dir.join(format!("{OPTIMIZER}.safetensors"));
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(Error::io("read", path)(missing));
    };
    file.with(|tensors| {
        let specs: Vec<&ParamSpec> = decoder.specs().collect();
        optimizer.restore(steps, decoder, |index, range| {
            let spec = specs[index];
            let block = decoder.shard_slice(index);
            let read = |name| tensors.read(&format!("{}.{name}", spec.name), spec, block.as_ref(), range.clone());
            match (read(MOMENTS[0])?, read(MOMENTS[1])?) {
                (Some(first), Some(second)) => Ok(Some([first, second])),
                (None, None) => Ok(None),
                _ => Err(tensors.damaged(&format!("one moment of {} is missing", spec.name))),
            }
        })
    })
}
