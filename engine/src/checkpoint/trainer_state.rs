//! What a checkpoint keeps beside the model: where the run stands, and the optimizer's moments.

use super::json;
use super::saved_tensors::SavedTensors;
use super::sharded::{self, EARLIER, Own};
use crate::config::Mode;
use crate::objective::AdaptiveCoefficients;
use crate::optim::{AdamW, Scaler};
use crate::plan::Partition;
use crate::task::RunningStats;
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::host::write_synced;
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
use firebrick_models::checkpoint::WholeModel;
use firebrick_models::checkpoint::stream::{LazyTensor, write_tensors};
use firebrick_models::decoder::{Block, Param};
use firebrick_models::unit::ParamSpec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer";
const MASTERS: &str = "masters";
const VALUE_HEAD: &str = "value_head.safetensors";

/// Where a run stands.
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
    /// Coefficients of the objective that follow a measurement.
    #[serde(default, rename = "controls")]
    pub coefficients: AdaptiveCoefficients,
    /// The policy's loss scale.
    #[serde(default)]
    pub loss_scale: Option<Scaler>,
    /// The critic's.
    #[serde(default)]
    pub critic_loss_scale: Option<Scaler>,
    /// Running statistics of rewards that are normalised, by name.
    #[serde(default)]
    pub rewards: BTreeMap<String, RunningStats>,
}

impl TrainerState {
    /// The start of a run.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Records a validation.
    pub fn validated(&mut self, values: &BTreeMap<String, f64>) {
        for (name, &value) in values {
            self.first_validation.entry(name.clone()).or_insert(value);
            self.last_validation.insert(name.clone(), value);
        }
    }
}

/// Writes where the run stands, and the value head of a policy that has one.
///
/// # Errors
/// `Error::Io` where a file cannot be written; `Error::Model` where the value head cannot be read from the device or
/// written.
pub fn save(dir: &Path, state: &TrainerState, model: &dyn WholeModel) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let path = dir.join(STATE);
    let text = json(state).map_err(Error::io("write", &path))?;
    write_synced(&path, text.as_bytes()).map_err(Error::io("write", &path))?;
    match model.decoder().value_index() {
        Some(index) => save_value_head(dir, model, index),
        None => Ok(()),
    }
}

/// Writes the value head that stands beside a policy's projection: its exported folder is a plain language model.
fn save_value_head(dir: &Path, model: &dyn WholeModel, index: usize) -> Result<()> {
    let spec = model.decoder().specs_of_whole().nth(index);
    let tensor = spec.map(|spec| {
        let [rows, _] = spec.rows_cols();
        let read = move || Ok(model.rows(index, 0..rows)?.download()?.to_f32());
        (spec.name.clone(), LazyTensor::f32(&spec.rows_cols(), read))
    });
    Ok(write_tensors(&dir.join(VALUE_HEAD), tensor.into_iter().collect(), &[])?)
}

/// Reads it back into a decoder that has one: the part that its optimizer has, where ranks share weights out.
///
/// # Errors
/// `Error::Io` where the file cannot be read; `Error::Resume` where it has no value head, or one of another shape.
pub fn load_value_head(dir: &Path, decoder: &mut Decoder, optimizer: &AdamW) -> Result<()> {
    let Some(own) = decoder.value_index() else {
        return Ok(());
    };
    let path = dir.join(VALUE_HEAD);
    let file = SavedTensors::open(&path)?;
    file.with(|tensors| {
        let (device, precision) = (decoder.device().clone(), decoder.arch().precision);
        let sharded = is_sharded(decoder, own);
        decoder.update(|index, spec, value| {
            if index != own {
                return Ok(value);
            }
            let Some(values) = tensors.read(&spec.name, spec)? else {
                return Err(tensors.damaged("the value head is missing"));
            };
            let values = own_values(values, spec, sharded.then(|| optimizer.part(index, spec)));
            let values = values.rounded(precision);
            Ok(match value {
                Param::Device(_) => Param::Device(values.into_device(&device)),
                Param::Host(_) => Param::Host(values),
            })
        })
    })
}

/// Writes what an optimizer keeps beside the weights into a folder that exists: its moments and, with `masters`, the
/// weights that updates work on, in f32. Where ranks share it out every rank writes a file of its own.
///
/// # Errors
/// Where a file cannot be written, or a rank has failed or is gone.
pub fn save_optimizer(dir: &Path, optimizer: &AdamW, decoder: &Decoder, masters: bool, world: &World) -> Result<()> {
    let mut parts = vec![(OPTIMIZER, moments(optimizer, decoder))];
    if masters {
        parts.push((MASTERS, master_weights(optimizer, decoder)));
    }
    // of ranks that have all of the same share, the first writes it
    let writes = !optimizer.partition().is_whole() || world.replicas().writes();
    for (stem, tensors) in parts {
        if optimizer.partition().is_whole() && !decoder.is_part() {
            if world.writes() {
                let tensors = tensors.into_iter().map(Own::whole).collect();
                write_tensors(&dir.join(format!("{stem}.safetensors")), tensors, &[])?;
            }
            continue;
        }
        let ranks = (world.rank(), world.size());
        let tensors = if writes { tensors } else { Vec::new() };
        let own = world.together(sharded::write(dir, stem, ranks, tensors))?;
        world.together(sharded::write_index(dir, stem, &own, world))?;
    }
    Ok(())
}

/// The weights that updates work on. Frozen weights are left out: nothing changes them.
fn master_weights<'a>(optimizer: &'a AdamW, decoder: &'a Decoder) -> Vec<Own<'a>> {
    let trained = owned(optimizer, decoder).filter(|(_, spec, _)| spec.trainable);
    let own = trained.map(|(index, spec, range)| {
        let part = range.clone();
        let read = move || match optimizer.master(index).map_err(Error::into_model)? {
            Some(master) => Ok(master),
            // on ranks that share weights out its shard is all that there is
            None if is_sharded(decoder, index) => Ok(decoder.param(index).download()?.to_f32()),
            None => {
                let values = decoder.param(index).part(part.clone(), [1, part.len()]);
                Ok(values.download()?.to_f32())
            }
        };
        Own::new(spec.name.clone(), spec, decoder.block(index), range, read)
    });
    own.collect()
}

/// A parameter's values, or the shard of them that a rank has.
fn own_values(values: Vec<f32>, spec: &ParamSpec, shard: Option<Range<usize>>) -> HostTensor {
    match shard {
        Some(own) => {
            let shape = Partition::shape(own.len());
            HostTensor::from_values(values[own].to_vec(), shape)
        }
        None => HostTensor::from_values(values, spec.rows_cols()),
    }
}

/// Whether a rank has a part of the parameter at a flat index alone.
fn is_sharded(decoder: &Decoder, index: usize) -> bool {
    let mut units = decoder.units().iter();
    units.any(|unit| unit.is_sharded() && unit.range.contains(&index))
}

/// The moments.
fn moments<'a>(optimizer: &'a AdamW, decoder: &'a Decoder) -> Vec<Own<'a>> {
    let has_moments = |(index, ..): &(usize, &ParamSpec, Range<usize>)| optimizer.has_moments(*index);
    let both = |(index, spec, range): (usize, &'a ParamSpec, Range<usize>)| {
        let named = MOMENTS.into_iter().enumerate();
        named.map(move |(which, name)| {
            let read = move || {
                let moments = optimizer.moments(index).map_err(Error::into_model)?;
                Ok(moments.map_or_else(Vec::new, |both| both.into_iter().nth(which).unwrap_or_default()))
            };
            let name = format!("{}.{name}", spec.name);
            Own::new(name, spec, decoder.block(index), range.clone(), read)
        })
    };
    owned(optimizer, decoder).filter(has_moments).flat_map(both).collect()
}

/// Flat index and spec of the parameters of which an optimizer has a part that no earlier rank has too, and that part.
fn owned<'a>(optimizer: &'a AdamW, decoder: &'a Decoder) -> impl Iterator<Item = (usize, &'a ParamSpec, Range<usize>)> {
    let specs = decoder.specs().enumerate();
    specs
        .map(|(index, spec)| (index, spec, optimizer.part(index, spec)))
        .filter(|(index, _, range)| !range.is_empty() && !decoder.is_copy(*index))
}

/// Names of the two moments in the optimizer file, torch's own.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// Where the run in a trainer folder stands.
///
/// # Errors
/// `Error::Io` where the file cannot be read, `Error::Resume` where it is not what this version writes.
pub fn load_state(dir: &Path) -> Result<TrainerState> {
    let path = dir.join(STATE);
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text).map_err(|e| Error::Resume { path: path.clone(), detail: format!("{e}; {EARLIER}") })
}

/// Reads the f32 masters of a trainer folder, where there are any, into the decoder; where that is in half precision it
/// gets them rounded, and the optimizer its part of them as they are.
///
/// # Errors
/// `Error::Io` where a file cannot be read, `Error::Resume` where a master is missing or has another shape,
/// `Error::Device` and `Error::Model` where the device fails.
pub fn load_masters(dir: &Path, decoder: &mut Decoder, optimizer: &mut AdamW) -> Result<()> {
    let Some(file) = SavedTensors::find(dir, MASTERS)? else {
        return Ok(());
    };
    file.with(|tensors| {
        let device = decoder.device().clone();
        let precision = decoder.arch().precision;
        let blocks: Vec<Option<Block>> = (0..decoder.specs().count()).map(|index| decoder.block(index)).collect();
        let sharded: Vec<bool> = (0..blocks.len()).map(|index| is_sharded(decoder, index)).collect();
        decoder.update(|index, spec, value| {
            if !spec.trainable {
                return Ok(value);
            }
            let block = blocks[index].as_ref();
            let Some(values) = tensors.read_own(&spec.name, spec, block, 0..spec.numel())? else {
                return Err(tensors.damaged(&format!("the f32 master of {} is missing", spec.name)));
            };
            let own = optimizer.part(index, spec);
            if precision.is_half() && !own.is_empty() {
                optimizer.set_master(index, values[own.clone()].to_vec(), &device)?;
            }
            let mut values = own_values(values, spec, sharded[index].then_some(own));
            if precision.is_half() {
                values = values.rounded(precision);
            }
            Ok(match value {
                Param::Device(_) => Param::Device(values.into_device(&device)),
                Param::Host(_) => Param::Host(values),
            })
        })
    })
}

/// Reads an optimizer's part of the moments of a trainer folder; it continues after `steps` applied steps.
///
/// # Errors
/// `Error::Io` where a file is missing or cannot be read, `Error::Resume` where a moment is missing or has another
/// shape, `Error::Device` and `Error::Model` where the device fails.
pub fn load_optimizer(dir: &Path, steps: u64, decoder: &Decoder, optimizer: &mut AdamW) -> Result<()> {
    let Some(file) = SavedTensors::find(dir, OPTIMIZER)? else {
        let path = dir.join(format!("{OPTIMIZER}.safetensors"));
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(Error::io("read", path)(missing));
    };
    file.with(|tensors| {
        let specs: Vec<&ParamSpec> = decoder.specs().collect();
        optimizer.restore(steps, decoder, |index, own| {
            let spec = specs[index];
            let block = decoder.block(index);
            let read = |name| {
                let name = format!("{}.{name}", spec.name);
                tensors.read_own(&name, spec, block.as_ref(), own.clone())
            };
            match (read(MOMENTS[0])?, read(MOMENTS[1])?) {
                (Some(first), Some(second)) => Ok(Some([first, second])),
                (None, None) => Ok(None),
                _ => Err(tensors.damaged(&format!("one moment of {} is missing", spec.name))),
            }
        })
    })
}
