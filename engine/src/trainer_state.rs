//! What a checkpoint keeps beside the model: where the run stands, and the optimizer's moments.

use crate::gradients::device_error;
use crate::optim::adamw::Moments;
use crate::optim::{AdamW, OptimConfig};
use crate::{Error, Result};
use burn::tensor::{Tensor, TensorData};
use firebrick_backends::host::MappedFile;
use firebrick_models::Decoder;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const MASTERS: &str = "masters.safetensors";

/// What to do about a checkpoint that is damaged.
const EARLIER: &str =
    "remove its step folder and resume: the run goes on from the checkpoint before it";

/// Which of the two kinds of training a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// `firebrick train`.
    Rl,
    /// `firebrick sft`.
    Sft,
}

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
            skipped_steps: 0,
            tokens: 0,
            seconds: 0.0,
            peak_bytes: 0,
            first_validation: BTreeMap::new(),
            last_validation: BTreeMap::new(),
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
        source: e.into(),
    })?;
    write_synced(&dir.join(STATE), text.as_bytes())?;

    let mut tensors = Vec::new();
    for ((spec, _), moments) in decoder.params().zip(optimizer.moments()) {
        if let Some(m) = moments {
            tensors.push((format!("{}.exp_avg", spec.name), m.first.clone()));
            tensors.push((format!("{}.exp_avg_sq", spec.name), m.second.clone()));
        }
    }
    write_tensors(&dir.join(OPTIMIZER), tensors)?;
    if masters {
        let params = decoder
            .params()
            .map(|(spec, value)| (spec.name.clone(), value.clone()));
        write_tensors(&dir.join(MASTERS), params.collect())?;
    }
    Ok(())
}

/// Reads a trainer folder back; masters, where there are any, go into the decoder.
pub fn load(
    dir: &Path,
    config: &OptimConfig,
    decoder: &mut Decoder,
) -> Result<(TrainerState, AdamW)> {
    let path = dir.join(STATE);
    let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let state: TrainerState = serde_json::from_str(&text).map_err(|e| Error::Resume {
        path: path.clone(),
        detail: format!("{e}; {EARLIER}"),
    })?;

    let mut tensors = read_tensors(&dir.join(OPTIMIZER), decoder)?;
    let damaged = |what: String| Error::Resume {
        path: dir.to_owned(),
        detail: format!("{what}; {EARLIER}"),
    };
    let mut moments = Vec::new();
    for spec in decoder.specs() {
        let first = tensors.remove(&format!("{}.exp_avg", spec.name));
        let second = tensors.remove(&format!("{}.exp_avg_sq", spec.name));
        moments.push(match (first, second) {
            (Some(first), Some(second)) => Some(Moments { first, second }),
            (None, None) => None,
            _ => return Err(damaged(format!("one moment of {} is missing", spec.name))),
        });
    }
    if dir.join(MASTERS).is_file() {
        let mut masters = read_tensors(&dir.join(MASTERS), decoder)?;
        if let Some(spec) = decoder
            .specs()
            .find(|spec| !masters.contains_key(&spec.name))
        {
            return Err(damaged(format!(
                "the f32 master of {} is missing",
                spec.name
            )));
        }
        decoder.update(|_, spec, value| masters.remove(&spec.name).unwrap_or(value));
    }
    let optimizer = AdamW::restore(config.clone(), moments, state.optimizer_steps);
    Ok((state, optimizer))
}

fn write_tensors(path: &Path, tensors: Vec<(String, Tensor<2>)>) -> Result<()> {
    let host: Vec<(String, [usize; 2], Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, tensor)| {
            let shape = tensor.dims();
            let values: Vec<f32> = tensor
                .try_into_vec_as()
                .map_err(|e| device_error("reading the optimizer state", &e))?;
            Ok((
                name,
                shape,
                values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            ))
        })
        .collect::<Result<_>>()?;
    let bad = |e: safetensors::SafeTensorError| Error::Io {
        action: "write",
        path: path.to_owned(),
        source: std::io::Error::other(e.to_string()),
    };
    let views = host
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.to_vec(), bytes)?)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(bad)?;
    write_synced(path, &safetensors::serialize(views, None).map_err(bad)?)
}

fn read_tensors(path: &Path, decoder: &Decoder) -> Result<BTreeMap<String, Tensor<2>>> {
    let file = MappedFile::open(path).map_err(Error::io("read", path))?;
    let bad = |detail: String| Error::Resume {
        path: path.to_owned(),
        detail,
    };
    let tensors =
        SafeTensors::deserialize(file.bytes()).map_err(|e| bad(format!("{e}; {EARLIER}")))?;
    tensors
        .iter()
        .map(|(name, view)| {
            let &[rows, cols] = view.shape() else {
                return Err(bad(format!(
                    "tensor {name} has shape {:?}, a matrix was expected",
                    view.shape()
                )));
            };
            let values: Vec<f32> = view
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            Ok((
                name.to_owned(),
                Tensor::from_data(TensorData::new(values, [rows, cols]), decoder.device()),
            ))
        })
        .collect()
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        use std::io::Write;
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(Error::io("write", path))
}
