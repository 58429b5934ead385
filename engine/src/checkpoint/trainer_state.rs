//! What a checkpoint keeps beside the model: where the run stands, and the optimizer's moments.

use crate::config::Mode;
use crate::objective::AdaptiveCoefficients;
use crate::optim::{AdamW, Scaler};
use crate::task::Running;
use crate::{Error, Result};
use firebrick_backends::host::{MappedFile, write_synced};
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
use firebrick_models::checkpoint::stream::{LazyTensor, write_tensors};
use firebrick_models::decoder::Param;
use firebrick_models::unit::ParamSpec;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const MASTERS: &str = "masters.safetensors";
const VALUE_HEAD: &str = "value_head.safetensors";

/// What to do about a checkpoint that is damaged.
const EARLIER: &str = "delete its step folder and resume from the checkpoint before it";

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
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
    pub rewards: BTreeMap<String, Running>,
}

impl TrainerState {
    /// The start of a run.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self {
            mode,
            step: 0,
            draws: 0,
            optimizer_steps: 0,
            critic_steps: 0,
            skipped_steps: 0,
            tokens: 0,
            seconds: 0.0,
            peak_bytes: 0,
            first_validation: BTreeMap::new(),
            last_validation: BTreeMap::new(),
            coefficients: AdaptiveCoefficients::default(),
            loss_scale: None,
            critic_loss_scale: None,
            rewards: BTreeMap::new(),
        }
    }

    /// Records a validation.
    pub fn validated(&mut self, values: &BTreeMap<String, f64>) {
        for (name, &value) in values {
            self.first_validation.entry(name.clone()).or_insert(value);
            self.last_validation.insert(name.clone(), value);
        }
    }
}

/// Writes state, moments, and the f32 masters of weights that the model folder stores in fewer bits.
pub fn save(
    dir: &Path,
    state: &TrainerState,
    optimizer: &AdamW,
    decoder: &Decoder,
    masters: bool,
) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let text = serde_json::to_string_pretty(state).map_err(|e| Error::Io {
        action: "write",
        path: dir.join(STATE),
        error: e.into(),
    })?;
    let path = dir.join(STATE);
    write_synced(&path, text.as_bytes()).map_err(Error::io("write", &path))?;
    save_optimizer(dir, optimizer, decoder)?;
    if let Some(index) = decoder.value_index() {
        save_value_head(dir, decoder, index)?;
    }
    if masters {
        save_masters(dir, optimizer, decoder)?;
    }
    Ok(())
}

/// Writes the value head that stands beside a policy's projection: its exported folder is a plain language model.
fn save_value_head(dir: &Path, decoder: &Decoder, index: usize) -> Result<()> {
    let spec = decoder.specs().nth(index);
    let tensor = spec.map(|spec| {
        let read = move || Ok(decoder.param(index).download()?.to_f32());
        (spec.name.clone(), LazyTensor::f32(&spec.rows_cols(), read))
    });
    Ok(write_tensors(
        &dir.join(VALUE_HEAD),
        tensor.into_iter().collect(),
        &[],
    )?)
}

/// Reads it back into a decoder that has one.
pub fn load_value_head(dir: &Path, decoder: &mut Decoder) -> Result<()> {
    let Some(own) = decoder.value_index() else {
        return Ok(());
    };
    let path = dir.join(VALUE_HEAD);
    let file = SavedTensors::open(&path)?;
    file.with(|tensors| {
        let (device, precision) = (decoder.device().clone(), decoder.arch().precision);
        decoder.update(|index, spec, value| {
            if index != own {
                return Ok(value);
            }
            let Some(values) = tensors.read(&spec.name, spec)? else {
                return Err(tensors.damaged("the value head is missing"));
            };
            let values = HostTensor::from_values(values, spec.rows_cols()).rounded(precision);
            Ok(match value {
                Param::Device(_) => Param::Device(values.into_device(&device)),
                Param::Host(_) => Param::Host(values),
            })
        })
    })
}

/// Writes the weights that updates work on, in f32, into a folder that exists. Frozen weights are left out: nothing changes them.
pub fn save_masters(dir: &Path, optimizer: &AdamW, decoder: &Decoder) -> Result<()> {
    let trained = decoder
        .specs()
        .enumerate()
        .filter(|(_, spec)| spec.trainable);
    let params = trained.map(|(index, spec)| {
        let read = move || match optimizer.master(index).map_err(into_model)? {
            Some(master) => Ok(master),
            None => Ok(decoder.param(index).download()?.to_f32()),
        };
        (spec.name.clone(), LazyTensor::f32(&spec.rows_cols(), read))
    });
    Ok(write_tensors(&dir.join(MASTERS), params.collect(), &[])?)
}

/// Writes an optimizer's moments into a folder that exists.
pub fn save_optimizer(dir: &Path, optimizer: &AdamW, decoder: &Decoder) -> Result<()> {
    let mut tensors = Vec::new();
    for (index, spec) in decoder.specs().enumerate() {
        if !optimizer.has_moments(index) {
            continue;
        }
        for (which, name) in MOMENTS.into_iter().enumerate() {
            let read = move || {
                let moments = optimizer.moments(index).map_err(into_model)?;
                Ok(moments.map_or_else(Vec::new, |both| {
                    both.into_iter().nth(which).unwrap_or_default()
                }))
            };
            let tensor = LazyTensor::f32(&spec.rows_cols(), read);
            tensors.push((format!("{}.{name}", spec.name), tensor));
        }
    }
    Ok(write_tensors(&dir.join(OPTIMIZER), tensors, &[])?)
}

/// Names of the two moments in the optimizer file, torch's own.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

fn into_model(e: Error) -> firebrick_models::Error {
    match e {
        Error::Model(e) => e,
        Error::Device(e) => e.into(),
        e => firebrick_models::Error::Device {
            doing: "reading the optimizer state",
            detail: e.to_string(),
        },
    }
}

/// Where the run in a trainer folder stands.
pub fn load_state(dir: &Path) -> Result<TrainerState> {
    let path = dir.join(STATE);
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    serde_json::from_str(&text).map_err(|e| Error::Resume {
        path: path.clone(),
        detail: format!("{e}; {EARLIER}"),
    })
}

/// Reads the f32 masters of a trainer folder, where there are any, into the decoder; where that is in half precision it gets them
/// rounded, and the optimizer as they are.
pub fn load_masters(dir: &Path, decoder: &mut Decoder, optimizer: &mut AdamW) -> Result<()> {
    let path = dir.join(MASTERS);
    if !path.is_file() {
        return Ok(());
    }
    let file = SavedTensors::open(&path)?;
    file.with(|tensors| {
        let device = decoder.device().clone();
        let precision = decoder.arch().precision;
        decoder.update(|index, spec, value| {
            if !spec.trainable {
                return Ok(value);
            }
            let Some(values) = tensors.read(&spec.name, spec)? else {
                return Err(tensors.damaged(&format!("the f32 master of {} is missing", spec.name)));
            };
            let mut own = HostTensor::from_values(values, spec.rows_cols());
            if precision.is_half() {
                let rounded = own.rounded(precision);
                optimizer.set_master(index, own.to_f32(), &device)?;
                own = rounded;
            }
            Ok(match value {
                Param::Device(_) => Param::Device(own.into_device(&device)),
                Param::Host(_) => Param::Host(own),
            })
        })
    })
}

/// Reads the moments of a trainer folder into an optimizer, which goes on after `steps` applied steps.
pub fn load_optimizer(
    dir: &Path,
    steps: u64,
    decoder: &Decoder,
    optimizer: &mut AdamW,
) -> Result<()> {
    let path = dir.join(OPTIMIZER);
    let file = SavedTensors::open(&path)?;
    file.with(|tensors| {
        let specs: Vec<&ParamSpec> = decoder.specs().collect();
        optimizer.restore(steps, decoder, |index| {
            let spec = specs[index];
            let read = |name| tensors.read(&format!("{}.{name}", spec.name), spec);
            match (read(MOMENTS[0])?, read(MOMENTS[1])?) {
                (Some(first), Some(second)) => Ok(Some([first, second])),
                (None, None) => Ok(None),
                _ => Err(tensors.damaged(&format!("one moment of {} is missing", spec.name))),
            }
        })
    })
}

/// A safetensors file of f32 matrices, mapped.
struct SavedTensors<'a> {
    path: &'a Path,
    file: MappedFile,
}

/// Its tensors, read one at a time.
struct Reader<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl<'a> SavedTensors<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let file = MappedFile::open(path).map_err(Error::io("read", path))?;
        Ok(Self { path, file })
    }

    fn with<T>(&self, work: impl FnOnce(&Reader<'_>) -> Result<T>) -> Result<T> {
        let path = self.path;
        let tensors = SafeTensors::deserialize(self.file.bytes()).map_err(|e| Error::Resume {
            path: path.to_owned(),
            detail: format!("{e}; {EARLIER}"),
        })?;
        work(&Reader { path, tensors })
    }
}

impl Reader<'_> {
    fn damaged(&self, what: &str) -> Error {
        Error::Resume {
            path: self.path.to_owned(),
            detail: format!("{what}; {EARLIER}"),
        }
    }

    /// A tensor's values, `None` where the file has no such tensor.
    fn read(&self, name: &str, spec: &ParamSpec) -> Result<Option<Vec<f32>>> {
        let Ok(view) = self.tensors.tensor(name) else {
            return Ok(None);
        };
        let expected = spec.rows_cols();
        if view.shape() != expected || view.dtype() != Dtype::F32 {
            return Err(self.damaged(&format!(
                "tensor {name} is {:?} of shape {:?}, expected F32 of shape {expected:?}",
                view.dtype(),
                view.shape()
            )));
        }
        let values = view.data().chunks_exact(4);
        Ok(Some(
            values
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        ))
    }
}
