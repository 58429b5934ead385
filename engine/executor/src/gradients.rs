//! Accumulated gradients of a decoder's parameters, in its flat order and at least in f32: on the device, or leaving it
//! as they are complete.

use super::gradient::{Gradient, squares};
use super::gradient_shards::GradientShards;
use super::runtime::Runtime;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::kernels::{self, RowsByToken};
use firebrick_backends::precision::widened;
use firebrick_backends::transfer::{HostTensor, Pending};
use firebrick_core::Result;
use firebrick_core::error::device_error;
use firebrick_core::world::World;
use firebrick_models::Decoder;
use firebrick_plan::{ModelPlan, Role};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// An accumulator on the host; copies in flight add to it.
type HostSlot = Arc<Mutex<Option<(HostTensor, MemoryGuard)>>>;

/// Rows of a matrix by the token ids that they stand for, and those in sorted order where a kernel adds them.
#[derive(Clone, Copy)]
pub(crate) struct TokenRows<'a> {
    pub ids: &'a Tensor<1, Int>,
    pub sorted: Option<&'a RowsByToken>,
}

/// Type of a decoder's gradients: at least f32.
pub(super) fn gradient_dtype(decoder: &Decoder) -> DType {
    match decoder.arch().precision.dtype(decoder.device()) {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// One accumulator per parameter; empty until its first contribution.
#[derive(Debug)]
pub struct Gradients {
    slots: Vec<Option<(Tensor<2>, MemoryGuard)>>,
    /// Accounts of sums that are lent, with their parameters.
    lent: Vec<(usize, MemoryGuard)>,
    host: Vec<HostSlot>,
    /// Location of accumulated gradients.
    pub(super) home: Home,
    in_flight: VecDeque<Pending<()>>,
    prefetch: usize,
    pub(super) accounts: Arc<Accounts>,
    /// The norm over all parameters, once it was computed and until something is added.
    norm: Option<f64>,
    /// This rank's shards of reduced gradients, if the plan shards them. What is not summed yet lies in `slots` and
    /// `host`.
    pub(super) reduced: Option<GradientShards>,
    /// Parameters of which an earlier rank has the same part, where ranks share matrices or have stages.
    copies: Option<Vec<bool>>,
}

impl Gradients {
    /// Accumulators on the device for `params` parameters.
    pub fn new(params: usize) -> Self {
        Self::build(params, Home::Device, 0, Accounts::new())
    }

    /// Accumulators where a plan wants them.
    pub fn planned(params: usize, plan: &ModelPlan, runtime: &Runtime) -> Self {
        let accounts = Arc::clone(&runtime.accounts);
        Self {
            reduced: GradientShards::planned(params, plan.zero, &runtime.world().replicas()),
            ..Self::build(params, plan.grads, plan.prefetch, accounts)
        }
    }

    pub(super) fn reduced_mut(&mut self) -> Option<&mut GradientShards> {
        self.norm = None;
        self.reduced.as_mut()
    }

    /// True if the ranks share these gradients out, and any of them had one of this parameter: the same answer on every
    /// rank.
    pub fn is_reduced(&self, index: usize) -> bool {
        self.reduced.as_ref().is_some_and(|reduced| reduced.contributed[index])
    }

    /// Gradients accounted as a model's.
    #[must_use]
    pub fn for_role(mut self, role: Role) -> Self {
        self.accounts = self.accounts.for_model(role);
        self
    }

    /// Gradients of a decoder, which may be a shard or a stage: its norm counts parameters of several ranks once.
    #[must_use]
    pub fn for_decoder(mut self, decoder: &Decoder) -> Self {
        let copies = (0..self.slots.len()).map(|index| decoder.is_copy(index));
        self.copies = decoder.is_part().then(|| copies.collect());
        self
    }

    /// True if the norm counts this rank's gradient of a parameter.
    fn counts(&self, index: usize) -> bool {
        self.copies.as_ref().is_none_or(|copies| !copies[index])
    }

    fn build(params: usize, home: Home, prefetch: usize, accounts: Arc<Accounts>) -> Self {
        Self {
            slots: (0..params).map(|_| None).collect(),
            lent: Vec::new(),
            host: (0..params).map(|_| HostSlot::default()).collect(),
            home,
            in_flight: VecDeque::new(),
            prefetch,
            accounts,
            norm: None,
            reduced: None,
            copies: None,
        }
    }

    fn hold(&self, [rows, cols]: [usize; 2], width: usize) -> MemoryGuard {
        self.accounts.hold(Category::Gradients, Home::Device, rows * cols * width)
    }

    /// Adds a contribution. It is `[rows, columns]`, as the parameter at the index.
    pub fn add(&mut self, index: usize, gradient: Tensor<2>) {
        self.norm = None;
        let sum = match self.slots[index].take() {
            Some((sum, hold)) => (kernels::accumulate(sum, &gradient), hold),
            None => {
                let gradient = widened(gradient);
                let hold = self.hold(gradient.dims(), gradient.dtype().size());
                (gradient, hold)
            }
        };
        self.slots[index] = Some(sum);
    }

    /// Takes out the sum of a parameter's gradients on the device, for something to be added to it. It has to be
    /// [put back](Self::put_back) before anything else is done with the parameter.
    pub(super) fn lend(&mut self, index: usize) -> Option<Tensor<2>> {
        self.slots[index].take().map(|(sum, hold)| {
            self.lent.push((index, hold));
            sum
        })
    }

    /// Puts back the sum of a parameter's gradients with what was added to it: none was lent where it was empty.
    pub(super) fn put_back(&mut self, index: usize, sum: Option<Tensor<2>>) {
        self.norm = None;
        let lent = self.lent.iter().position(|(lent, _)| *lent == index).map(|place| self.lent.swap_remove(place).1);
        self.slots[index] = sum.map(|sum| {
            let hold = lent.unwrap_or_else(|| self.hold(sum.dims(), sum.dtype().size()));
            (sum, hold)
        });
    }

    /// Adds rows of a gradient at the given row indices, `[n, columns]`, into a matrix of `rows` rows: by the kernel
    /// that takes sorted rows if there is one, in an order of its own. On the host only the rows are copied: the whole
    /// matrix never exists on the device.
    pub(crate) fn add_rows(
        &mut self,
        index: usize,
        rows: usize,
        at: TokenRows<'_>,
        gradient: Tensor<2>,
        runtime: &Runtime,
    ) -> Result<()> {
        self.norm = None;
        let TokenRows { ids: at, sorted } = at;
        let gradient = widened(gradient);
        let shape = [rows, gradient.dims()[1]];
        if self.home == Home::Host {
            let copier = &runtime.copier;
            let at = copier.download_indices(at.clone());
            let values = copier.download(gradient);
            let slot = Arc::clone(&self.host[index]);
            let accounts = Arc::clone(&self.accounts);
            return self.submit(runtime, move || {
                let at: Vec<usize> = at.finish()?.iter::<i64>().map(|row| row as usize).collect();
                let values = values.finish_matrix()?;
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                let (sum, _) = slot.get_or_insert_with(|| {
                    let sum = values.zeros(shape);
                    let hold = accounts.hold(Category::Gradients, Home::Host, sum.bytes());
                    (sum, hold)
                });
                sum.add_rows(&at, values);
                Ok(())
            });
        }
        let (sum, hold) = self.slots[index].take().unwrap_or_else(|| {
            let hold = self.hold(shape, gradient.dtype().size());
            (Tensor::zeros(shape, &gradient.device()), hold)
        });
        let sum = match sorted.filter(|_| runtime.is_deterministic()) {
            Some(sorted) => kernels::scatter_add_rows(sum, sorted, &gradient),
            None => sum.select_assign(0, at.clone(), gradient, IndexingUpdateOp::Add),
        };
        self.slots[index] = Some((sum, hold));
        Ok(())
    }

    /// Says that nothing more will be added to these parameters by the current micro-batches: where gradients live on
    /// the host, they leave the device now.
    pub(crate) fn offload(&mut self, params: Range<usize>, runtime: &Runtime) -> Result<()> {
        if self.home == Home::Device {
            return Ok(());
        }
        for index in params {
            let Some((tensor, on_device)) = self.slots[index].take() else {
                continue;
            };
            let slot = Arc::clone(&self.host[index]);
            let accounts = Arc::clone(&self.accounts);
            let values = runtime.copier.download(tensor);
            self.submit(runtime, move || {
                let values = values.finish_matrix()?;
                drop(on_device);
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                match slot.as_mut() {
                    Some((sum, _)) => sum.add(values),
                    None => {
                        let bytes = values.bytes();
                        let hold = accounts.hold(Category::Gradients, Home::Host, bytes);
                        *slot = Some((values, hold));
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn submit(
        &mut self,
        runtime: &Runtime,
        work: impl FnOnce() -> firebrick_backends::Result<()> + Send + 'static,
    ) -> Result<()> {
        self.in_flight.push_back(runtime.copier.run(work));
        self.wait(self.prefetch)
    }

    /// Waits until no more than `left` copies are in flight.
    fn wait(&mut self, left: usize) -> Result<()> {
        while self.in_flight.len() > left {
            if let Some(oldest) = self.in_flight.pop_front() {
                oldest.wait()?;
            }
        }
        Ok(())
    }

    /// Waits for all copies: after it, gradients can be read.
    ///
    /// # Errors
    /// `Error::Device` where a copy fails.
    pub fn finish(&mut self) -> Result<()> {
        self.wait(0)
    }

    /// Takes a gradient out, if anything contributed to it: this rank's shard where ranks shard them.
    pub fn take(&mut self, index: usize) -> Option<Gradient> {
        match &mut self.reduced {
            Some(reduced) => reduced.take(index),
            None => self.take_own(index),
        }
    }

    /// Takes out what this rank has accumulated of a gradient.
    pub(super) fn take_own(&mut self, index: usize) -> Option<Gradient> {
        if let Some((tensor, _)) = self.slots[index].take() {
            return Some(Gradient::Device(tensor));
        }
        let mut slot = self.host[index].lock().unwrap_or_else(PoisonError::into_inner);
        slot.take().map(|(values, _)| Gradient::Host(values))
    }

    /// True if anything contributed to a gradient. Copies have to be finished.
    pub(super) fn has(&self, index: usize) -> bool {
        let on_host = || self.host[index].lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.slots[index].is_some() || on_host()
    }

    /// Puts a gradient in the place of one that was taken, where this plan keeps gradients.
    pub(super) fn put(&mut self, index: usize, gradient: Gradient, device: &Device) {
        self.norm = None;
        match (self.home, gradient) {
            (Home::Host, Gradient::Host(values)) => {
                let hold = self.accounts.hold(Category::Gradients, Home::Host, values.bytes());
                let mut slot = self.host[index].lock().unwrap_or_else(PoisonError::into_inner);
                *slot = Some((values, hold));
            }
            (_, gradient) => {
                let tensor = gradient.into_device(device);
                let hold = self.hold(tensor.dims(), tensor.dtype().size());
                self.slots[index] = Some((tensor, hold));
            }
        }
    }

    /// Sum of squares over some parameters, or over this rank's shards of them. Non-finite where any element is.
    ///
    /// # Errors
    /// `Error::Device` and `Error::Model` where a copy or a reading of the device fails.
    pub fn sum_of_squares(&mut self, params: Range<usize>) -> Result<f64> {
        self.finish()?;
        let mut sum = 0.0;
        let mut on_device: Vec<Tensor<2>> = Vec::new();
        let shards = self.reduced.iter().flat_map(|r| r.shards(params.clone()));
        for (_, shard) in shards.filter(|(index, _)| self.counts(*index)) {
            match shard {
                Gradient::Device(g) => on_device.push(g.clone()),
                Gradient::Host(values) => sum += values.sum_of_squares(),
            }
        }
        for index in params.filter(|&index| self.counts(index)) {
            if let Some((g, _)) = &self.slots[index] {
                on_device.push(g.clone());
            }
            let slot = self.host[index].lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((values, _)) = slot.as_ref() {
                sum += values.sum_of_squares();
            }
        }
        if !on_device.is_empty() {
            let parts = kernels::sums_of_squares(&on_device)
                .unwrap_or_else(|| Tensor::cat(on_device.iter().flat_map(squares).collect(), 0));
            let parts: Vec<f64> = parts.try_into_vec_as().map_err(|e| device_error("reading the gradient norm", &e))?;
            sum += parts.iter().sum::<f64>();
        }
        Ok(sum)
    }

    /// The norm, if it was computed.
    pub(crate) fn known_norm(&self) -> Option<f64> {
        self.norm
    }

    /// L2 norm over all parameters, computed once. Non-finite where any element is. Where ranks shard gradients, or
    /// matrices, or have stages, it is the root of the ranks' sums of squares, added in f64 and in their order; what
    /// several have is counted once.
    ///
    /// # Errors
    /// If memory runs out, the device fails, or a rank has failed or is gone. It may be asked for again.
    pub fn global_norm(&mut self, world: &World) -> Result<f64> {
        if let Some(norm) = self.norm {
            return Ok(norm);
        }
        let squares = self.sum_of_squares(0..self.slots.len())?;
        let sum = match &self.reduced {
            None if self.copies.is_none() => squares,
            None => world.part_ranks().gather::<f64>(&squares)?.into_iter().sum(),
            Some(_) => world.gather::<f64>(&squares)?.into_iter().sum(),
        };
        let norm = f64::sqrt(sum);
        self.norm = Some(norm);
        Ok(norm)
    }
}

/// Hook for units with complete gradients, called while others' are still being computed.
pub trait GradientHook {
    /// Called once for each unit on an optimizer step's last micro-batches, in the order in which gradients are
    /// complete.
    ///
    /// # Errors
    /// Those of the work that the hook does; an error ends the backward pass.
    fn complete(&mut self, decoder: &mut Decoder, gradients: &mut Gradients, unit: usize) -> Result<()>;
}
