//! A unit with its weights, on the device or on the host.

use crate::Result;
use crate::unit::{ParamSpec, UnitKind};
use crate::weights::{WeightKey, Weights};
use burn::tensor::{Device, Tensor};
use firebrick_backends::accounts::Home;
use firebrick_backends::device::is_cpu;
use firebrick_backends::kernels;
use firebrick_backends::transfer::HostTensor;
use firebrick_backends::{Precision, PrecisionExt};
use firebrick_spec::QuantizedLayout;
use std::ops::Range;
use std::sync::Arc;

/// A unit of the chain with its weights.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Kind of unit.
    pub kind: UnitKind,
    /// Its parameters, in the order of [`unit_specs`](crate::unit::unit_specs), those of adapters last.
    pub specs: Vec<ParamSpec>,
    /// Their values, in the same order.
    pub store: Store,
    /// Flat indices of its parameters among those of the decoder.
    pub range: Range<usize>,
    /// True if their values are parts: see [`Decoder::shard_unit`](super::Decoder::shard_unit).
    pub(super) sharded: bool,
}

/// The weights of a unit in host memory.
pub type HostWeights = Vec<(WeightKey, HostTensor)>;

/// The weights of a unit, on the device or on the host.
#[derive(Clone, Debug)]
pub enum Store {
    /// On the device.
    Device(Weights),
    /// In host memory; copied to the device while the unit runs.
    Host(Arc<HostWeights>),
}

impl Store {
    /// The home of the weights.
    pub fn home(&self) -> Home {
        match self {
            Self::Device(_) => Home::Device,
            Self::Host(_) => Home::Host,
        }
    }

    /// The layout of the parameter at an index, where it is a frozen quantized matrix.
    pub(super) fn layout(&self, index: usize) -> Option<QuantizedLayout> {
        match self {
            Self::Device(weights) => weights.key(index).layout,
            Self::Host(host) => host[index].0.layout,
        }
    }

    /// The weights on the device: shared with this unit, or uploaded from the host.
    pub fn fetch(&self, device: &Device) -> Weights {
        match self {
            Self::Device(weights) => weights.clone(),
            Self::Host(host) => Weights::new(host.iter().map(|(key, value)| (*key, value.upload(device))).collect()),
        }
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Device(weights) => weights.tensors().map(|t| t.shape().num_elements() * t.dtype().size()).sum(),
            Self::Host(host) => host.iter().map(|(_, value)| value.bytes()).sum(),
        }
    }
}

/// A parameter that a decoder is built with: numbers, or the buffer of a frozen quantized matrix.
#[derive(Clone, Debug)]
pub struct NewParam {
    /// Layout of codes and scales; `None` for numbers.
    pub layout: Option<QuantizedLayout>,
    /// The numbers, or the buffer, `[1, words]`; of experts one for each, `[experts, words]`.
    pub tensor: Tensor<2>,
}

impl From<Tensor<2>> for NewParam {
    fn from(tensor: Tensor<2>) -> Self {
        Self { layout: None, tensor }
    }
}

/// The value of one parameter, on the device or on the host.
#[derive(Clone, Debug)]
pub enum Param {
    /// On the device.
    Device(Tensor<2>),
    /// On the host.
    Host(HostTensor),
}

impl Param {
    /// The home of the value.
    pub fn home(&self) -> Home {
        match self {
            Self::Device(_) => Home::Device,
            Self::Host(_) => Home::Host,
        }
    }

    /// The precision in which it is stored.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Device(tensor) => Precision::of(tensor.dtype()),
            Self::Host(host) => host.precision(),
        }
    }

    /// A copy of its values on the host.
    ///
    /// # Errors
    /// `Error::Device` or `Error::OutOfMemory` where the device fails.
    pub fn download(&self) -> Result<HostTensor> {
        match self {
            Self::Device(tensor) => Ok(HostTensor::download(tensor.clone())?),
            Self::Host(host) => Ok(host.clone()),
        }
    }

    /// The values of some of its rows.
    ///
    /// # Errors
    /// `Error::Device` or `Error::OutOfMemory` where the device fails.
    pub fn rows(&self, rows: Range<usize>) -> Result<Vec<f32>> {
        Ok(match self {
            Self::Device(tensor) => {
                let some = tensor.clone().narrow(0, rows.start, rows.len());
                HostTensor::download(some)?.to_f32()
            }
            Self::Host(host) => host.rows_to_f32(rows),
        })
    }

    /// Some of its values, counted in row-major order, as a matrix where the whole lies. On the device it may be a
    /// view, which keeps the memory of the whole.
    #[must_use]
    pub fn part(&self, values: Range<usize>, shape: [usize; 2]) -> Self {
        match self {
            Self::Device(tensor) => {
                if values.is_empty() {
                    return Self::Device(Tensor::empty(shape, (&tensor.device(), tensor.dtype())));
                }
                let [rows, cols] = tensor.dims();
                let flat = tensor.clone().reshape([rows * cols]);
                Self::Device(flat.slice(values).reshape(shape))
            }
            Self::Host(host) => Self::Host(host.part(values, shape)),
        }
    }

    /// Copies the values out of a larger buffer. A slice is a view on the CPU, and on GPUs where it begins at an
    /// aligned address.
    ///
    /// # Errors
    /// If memory runs out, or the device fails.
    pub(super) fn detached(self) -> Result<Self> {
        match self {
            Self::Device(view) if view.dims()[0] == 0 => Ok(Self::Device(view)),
            Self::Device(view) if is_cpu(&view.device()) => {
                let device = view.device();
                let copy = HostTensor::download(view)?;
                Ok(Self::Device(copy.into_device(&device)))
            }
            Self::Device(view) => Ok(Self::Device(kernels::duplicate(&view))),
            // parts are copies there
            Self::Host(host) => Ok(Self::Host(host)),
        }
    }

    /// Its values as a tensor on the device; consumes the host's copy. It is `[rows, columns]`.
    pub fn into_device(self, device: &Device) -> Tensor<2> {
        match self {
            Self::Device(tensor) => tensor,
            Self::Host(host) => host.into_device(device),
        }
    }

    /// Its values as a tensor on the device. It is `[rows, columns]`.
    pub fn upload(&self, device: &Device) -> Tensor<2> {
        match self {
            Self::Device(tensor) => tensor.clone(),
            Self::Host(host) => host.upload(device),
        }
    }
}

impl Unit {
    /// True if it has parts of its parameters, and the others are on other ranks.
    pub fn is_sharded(&self) -> bool {
        self.sharded
    }

    /// True if any of its parameters is trained.
    pub fn trains(&self) -> bool {
        self.specs.iter().any(|spec| spec.trainable)
    }

    /// Leaves of an autodiff graph with the values `weights`, this unit's on the device: parameters that are trained
    /// require a gradient, the others do not.
    pub fn leaves(&self, weights: &Weights) -> Weights {
        let leaf = |((key, weight), spec): ((WeightKey, Tensor<2>), &ParamSpec)| {
            let leaf = if spec.trainable { weight.autodiff().require_grad() } else { weight };
            (key, leaf)
        };
        let entries = weights.clone().into_entries().zip(&self.specs);
        Weights::new(entries.map(leaf).collect())
    }
}
