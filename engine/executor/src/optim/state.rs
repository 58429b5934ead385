//! Optimizer state of one parameter, and the place of its update.

mod master;
mod waiting;

use super::config::{Moments, OptimConfig, UpdateAt};
use super::host::{self, HostMoments};
use super::moments::DeviceMoment;
use crate::Gradient;
use burn::tensor::{DType, Device, Tensor, TensorData};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::kernels::{self, AdamWBatch, AdamWSlice};
use firebrick_backends::precision::{stored_as, widened};
use firebrick_backends::transfer::{HostTensor, HostValues};
use firebrick_core::Result;
use firebrick_models::decoder::Param;
use firebrick_plan::MomentKind;
use master::Master;
use std::ops::Range;
use std::sync::Arc;

/// Elements of a parameter that the device updates at a time, so that what an update holds beside the state stays
/// bounded.
const SLICE: usize = 1 << 21;

/// Inputs of an update besides the parameter.
#[derive(Clone, Copy)]
pub(super) struct Update<'a> {
    pub config: &'a OptimConfig,
    pub at: UpdateAt,
    /// Factor of the gradient.
    pub clip: f64,
    pub device: &'a Device,
    pub accounts: &'a Arc<Accounts>,
}

/// Moments, after the first update.
#[derive(Debug)]
enum Stored {
    /// First and second, by slices of rows.
    Device(Vec<[DeviceMoment; 2]>),
    Host(HostMoments),
}

/// State of one parameter.
#[derive(Debug)]
pub(super) struct ParamState {
    home: Home,
    /// Location of device moments between updates.
    idle: Home,
    kind: MomentKind,
    shape: [usize; 2],
    stored: Option<(Stored, MemoryGuard)>,
    /// The weights that are updated, where the parameter itself is something else: in half precision, or on the device
    /// while the host updates.
    master: Option<(Master, MemoryGuard)>,
}

/// Result of an update.
struct Stepped {
    value: Tensor<2>,
    /// The value in half precision, where a kernel has written it.
    stored: Option<Tensor<2>>,
    moments: Vec<[DeviceMoment; 2]>,
}

impl ParamState {
    pub fn new(home: Home, idle: Home, kind: MomentKind, shape: [usize; 2]) -> Self {
        Self { home, idle, kind, shape, stored: None, master: None }
    }

    /// True if there is nothing to update: a rank whose shard of the parameter is empty, or another stage has it.
    pub fn is_empty(&self) -> bool {
        self.shape[0] == 0
    }

    /// Place of the update.
    pub fn home(&self) -> Home {
        self.home
    }

    /// One step. The parameter comes back in the home it came from.
    ///
    /// On the device it may hold only once `batch` is launched.
    pub fn update(
        &mut self,
        update: Update<'_>,
        value: Param,
        gradient: Gradient,
        batch: &mut AdamWBatch,
    ) -> Result<Param> {
        match self.home {
            Home::Device => self.on_device(update, value, gradient, batch),
            Home::Host => self.on_host(update, value, gradient),
        }
    }

    /// Stores moments of zeros if there are none: what the first update would add to the memory that is in use. That
    /// update's result is the same with them. `wide` is whether the parameter is updated in f64.
    pub fn reserve(&mut self, wide: bool, device: &Device, accounts: &Arc<Accounts>) -> Result<()> {
        if self.stored.is_some() {
            return Ok(());
        }
        if self.home == Home::Host {
            let numel = self.shape[0] * self.shape[1];
            let moments = if wide { HostMoments::zeros_f64(numel) } else { HostMoments::zeros(self.kind, numel) };
            let hold = accounts.hold(Category::Moments, Home::Host, moments.bytes());
            self.stored = Some((Stored::Host(moments), hold));
            return Ok(());
        }
        let dtype = if wide { DType::F64 } else { DType::F32 };
        let cols = self.shape[1];
        let zeros = |rows: &Range<usize>| {
            [true, false].map(|signed| {
                let zeros = Tensor::zeros([rows.len(), cols], (device, dtype));
                DeviceMoment::store(self.kind, zeros, signed)
            })
        };
        let slices = self.slices().iter().map(zeros).collect();
        self.keep(slices, accounts);
        if self.idle == Home::Host {
            self.park(accounts)?;
        }
        Ok(())
    }

    /// Stores the f32 master of a parameter in half precision that the device updates, if there is none: what the first
    /// update would add. That update's result is the same with it.
    pub fn reserve_master(&mut self, value: Param, device: &Device, accounts: &Arc<Accounts>) -> Result<()> {
        if self.home == Home::Host || self.has_master() {
            return Ok(());
        }
        let value = match value {
            Param::Device(tensor) => widened(tensor),
            Param::Host(weight) => weight.widened().into_device(device),
        };
        self.keep_master(value, accounts)
    }

    fn on_host(&mut self, update: Update<'_>, value: Param, gradient: Gradient) -> Result<Param> {
        let Update { config, at, clip, device, accounts } = update;
        let mut gradient = gradient.into_host()?;
        let (home, precision) = (value.home(), value.precision());
        let is_its_own = home == Home::Host && !precision.is_half();
        let mut weights = match (value, self.master.take()) {
            (_, Some((master, _))) => master.into_host()?,
            (Param::Host(weight), None) => weight.widened(),
            (Param::Device(tensor), None) => HostTensor::download(tensor)?.widened(),
        };
        let wide = matches!(weights.values(), HostValues::F64(_));
        self.reserve(wide, device, accounts)?;
        let Some((Stored::Host(mut moments), held)) = self.stored.take() else {
            unreachable!("what is updated on the host has its moments there")
        };
        match (weights.values(), gradient.values()) {
            (HostValues::F32(w), HostValues::F32(g)) => {
                host::update(config, at, clip, w, g, &mut moments);
            }
            (HostValues::F64(w), HostValues::F64(g)) => {
                host::update(config, at, clip, w, g, &mut moments);
            }
            _ => unreachable!("a parameter and its gradient have one type"),
        }
        self.stored = Some((Stored::Host(moments), held));
        if is_its_own {
            return Ok(Param::Host(weights));
        }
        let fresh = weights.rounded(precision);
        self.master = Some(Master::new(weights, accounts));
        Ok(match home {
            Home::Host => Param::Host(fresh),
            Home::Device => Param::Device(fresh.into_device(device)),
        })
    }

    fn on_device(
        &mut self,
        update: Update<'_>,
        value: Param,
        gradient: Gradient,
        batch: &mut AdamWBatch,
    ) -> Result<Param> {
        let Update { device, accounts, .. } = update;
        self.wake(device, accounts);
        let (home, precision) = (value.home(), value.precision());
        let stored = precision.dtype(device);
        let mut value = match (value, self.master.take()) {
            (_, Some((Master::Device(master), _))) => master,
            (_, Some((Master::Host(master), _))) => master.into_device(device),
            (Param::Device(tensor), None) => widened(tensor),
            (Param::Host(host), None) => host.widened().into_device(device),
        };
        let gradient = gradient.into_device(device);
        let before = match self.stored.take() {
            Some((Stored::Device(slices), _)) => slices,
            _ => Vec::new(),
        };
        let half = precision.is_half().then_some(stored);
        let stepped = self.stepped(update, value, &gradient, before, half, batch);
        value = stepped.value;
        if self.idle == Home::Host || home == Home::Host {
            // copies follow
            batch.launch();
        }
        self.keep(stepped.moments, accounts);
        if self.idle == Home::Host {
            self.park(accounts)?;
        }
        let fresh = if precision.is_half() {
            let fresh = stepped.stored.unwrap_or_else(|| stored_as(value.clone(), stored));
            self.keep_master(value, accounts)?;
            fresh
        } else {
            value
        };
        Ok(match home {
            Home::Host => Param::Host(HostTensor::download(fresh)?),
            Home::Device => Param::Device(fresh),
        })
    }

    /// New value and moments, from those before and the gradient: a slice of rows at a time. Where the value is stored
    /// in half precision, a kernel writes that too.
    fn stepped(
        &self,
        update: Update<'_>,
        mut value: Tensor<2>,
        gradient: &Tensor<2>,
        before: Vec<[DeviceMoment; 2]>,
        half: Option<DType>,
        batch: &mut AdamWBatch,
    ) -> Stepped {
        let Update { config, at, clip, device, .. } = update;
        let dtype = value.dtype();
        let mut before = before.into_iter();
        let slices = self.slices();
        if kernels::has_adamw(&value) {
            // in one pass and in place: slices bound nothing but what moments in fewer bits take
            // Burn pads rows of an empty matrix on CUDA, and the kernel would copy them
            let [rows, columns] = self.shape;
            let flat = |dtype| Tensor::<1>::empty([rows * columns], (device, dtype));
            let mut stored = half.map(|dtype| flat(dtype).reshape(self.shape));
            let mut moments = Vec::with_capacity(slices.len());
            // moments in fewer bits are widened for a slice at a time
            let keeps = self.kind == MomentKind::F32;
            for slices in slices.chunks(if keeps { slices.len().max(1) } else { 1 }) {
                let slice = |rows: &Range<usize>| AdamWSlice {
                    rows: rows.clone(),
                    moments: before.next().map(|pair| pair.map(|moment| moment.take(device))),
                };
                let slices = slices.iter().map(slice).collect();
                let new = kernels::adamw(value, slices, gradient, stored, &config.step(at, clip), batch);
                (value, stored) = (new.value, new.stored);
                if !keeps {
                    batch.launch();
                }
                moments.extend(new.moments.into_iter().map(|pair| self.store(pair)));
            }
            return Stepped { value, stored, moments };
        }
        let mut after = Vec::new();
        for rows in &slices {
            let cut = |t: &Tensor<2>| match slices.len() {
                1 => t.clone(),
                _ => t.clone().narrow(0, rows.start, rows.len()),
            };
            let moments = before.next().map(|[first, second]| Moments {
                first: first.load(dtype, device),
                second: second.load(dtype, device),
            });
            let slice = cut(&value);
            if slices.len() == 1 {
                value = Tensor::empty([0, 0], device);
            }
            let (new, moments) = config.update(at, slice, cut(gradient) * clip, moments);
            value = if slices.len() == 1 { new } else { value.slice_assign([rows.clone(), 0..self.shape[1]], new) };
            after.push(self.store([moments.first, moments.second]));
        }
        Stepped { value, stored: None, moments: after }
    }

    fn store(&self, [first, second]: [Tensor<2>; 2]) -> [DeviceMoment; 2] {
        [DeviceMoment::store(self.kind, first, true), DeviceMoment::store(self.kind, second, false)]
    }

    /// A master waits where the moments of its parameter do.
    fn keep_master(&mut self, value: Tensor<2>, accounts: &Arc<Accounts>) -> Result<()> {
        self.master = Some(match self.idle {
            Home::Device => Master::on_device(value, accounts),
            Home::Host => Master::new(HostTensor::download(value)?, accounts),
        });
        Ok(())
    }

    /// The weights that updates work on, in f32, where the parameter itself is stored in half precision.
    pub fn master(&self) -> Result<Option<Vec<f32>>> {
        Ok(match &self.master {
            None => None,
            Some((Master::Host(master), _)) => Some(master.to_f32()),
            Some((Master::Device(master), _)) => Some(HostTensor::download(master.clone())?.to_f32()),
        })
    }

    /// Weights that updates continue with.
    pub fn set_master(&mut self, values: Vec<f32>, device: &Device, accounts: &Arc<Accounts>) -> Result<()> {
        let master = HostTensor::from_values(values, self.shape);
        match self.home {
            Home::Host => self.master = Some(Master::new(master, accounts)),
            Home::Device => self.keep_master(master.into_device(device), accounts)?,
        }
        Ok(())
    }

    /// Takes over the master of another optimizer's state of the same parameter.
    pub fn adopt_master(&mut self, other: &mut Self) {
        self.master = other.master.take();
    }

    /// Rows that are updated together.
    fn slices(&self) -> Vec<Range<usize>> {
        let [rows, cols] = self.shape;
        let size = (SLICE / cols.max(1)).max(1);
        (0..rows).step_by(size).map(|start| start..(start + size).min(rows)).collect()
    }

    /// First and second moment in f32, row-major; `None` before the first update.
    pub fn moments(&self) -> Result<Option<[Vec<f32>; 2]>> {
        match &self.stored {
            None => Ok(None),
            Some((Stored::Host(moments), _)) => Ok(Some(moments.to_f32())),
            Some((Stored::Device(slices), _)) => {
                let mut moments = [Vec::new(), Vec::new()];
                for pair in slices {
                    for (values, moment) in moments.iter_mut().zip(pair) {
                        values.extend(moment.to_f32()?);
                    }
                }
                Ok(Some(moments))
            }
        }
    }

    /// Moments and master on the device, or what follows from them.
    pub fn tensors_on_device(&self) -> Vec<Tensor<2>> {
        let mut tensors = Vec::new();
        if let Some((Stored::Device(slices), _)) = &self.stored {
            tensors.extend(slices.iter().flatten().filter_map(DeviceMoment::on_device));
        }
        if let Some((Master::Device(master), _)) = &self.master {
            tensors.push(master.clone());
        }
        tensors
    }

    /// The same state, without bytes in accounts; `None` if some of it is not on the device.
    pub fn shared(&self, accounts: &Arc<Accounts>) -> Option<Self> {
        let hold = |category| accounts.hold(category, Home::Device, 0);
        let stored = match &self.stored {
            None => None,
            Some((Stored::Device(slices), _)) => {
                let moment = |[first, second]: &[DeviceMoment; 2]| Some([first.shared()?, second.shared()?]);
                let slices = slices.iter().map(moment).collect::<Option<_>>()?;
                Some((Stored::Device(slices), hold(Category::Moments)))
            }
            Some((Stored::Host(_), _)) => return None,
        };
        let master = match &self.master {
            None => None,
            Some((Master::Device(master), _)) => Some((Master::Device(master.clone()), hold(Category::MasterWeights))),
            Some((Master::Host(_), _)) => return None,
        };
        Some(Self { stored, master, ..*self })
    }

    /// Drops the moments.
    pub fn forget_moments(&mut self) {
        self.stored = None;
    }

    /// Drops the master.
    pub fn forget_master(&mut self) {
        self.master = None;
    }

    /// True if updates work on weights of their own.
    pub fn has_master(&self) -> bool {
        self.master.is_some()
    }

    /// True if there are moments.
    pub fn is_fresh(&self) -> bool {
        self.stored.is_none()
    }

    /// Moments that were saved in f32.
    pub fn restore(&mut self, [first, second]: [Vec<f32>; 2], device: &Device, accounts: &Arc<Accounts>) -> Result<()> {
        if self.home == Home::Host {
            let moments = HostMoments::from_f32(self.kind, [first, second]);
            let hold = accounts.hold(Category::Moments, Home::Host, moments.bytes());
            self.stored = Some((Stored::Host(moments), hold));
            return Ok(());
        }
        let cols = self.shape[1];
        let slices = self.slices();
        let cut = |values: &[f32], rows: &Range<usize>, signed| {
            let elements = values[rows.start * cols..rows.end * cols].to_vec();
            let data = TensorData::new(elements, [rows.len(), cols]);
            DeviceMoment::store(self.kind, Tensor::from_data(data, device), signed)
        };
        let slices = slices.iter().map(|rows| [cut(&first, rows, true), cut(&second, rows, false)]).collect();
        self.keep(slices, accounts);
        if self.idle == Home::Host {
            self.park(accounts)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
