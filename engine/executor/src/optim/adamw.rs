//! `AdamW` over a decoder's parameters, each updated where the plan says.

use super::config::{OptimConfig, UpdateAt};
use super::reserve::{Reservation, Reserved};
use super::scale::Scaler;
use super::state::{ParamState, Update};
use crate::{Boundary, BoundaryKind, Gradient, GradientHook, Gradients, Runtime, local_part};
use burn::tensor::{DType, Device};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Accounts, Home};
use firebrick_backends::kernels::AdamWBatch;
use firebrick_backends::transfer::{HostTensor, Pending, check_computed};
use firebrick_core::{Error, Result};
use firebrick_models::Decoder;
use firebrick_models::unit::{ParamSpec, Slot};
use firebrick_plan::{OptimizerPlan, Partition};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Statistics of an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Global norm before clipping.
    pub grad_norm: f64,
    /// False if the norm or the loss was not finite and nothing was applied.
    pub applied: bool,
    /// The loss scale, if any.
    pub loss_scale: Option<f64>,
    /// Not applied because gradients overflowed under a scale that is smaller from now on.
    pub rescaled: bool,
}

impl StepOutcome {
    /// Gradients of this norm were applied.
    pub fn applied(grad_norm: f64) -> Self {
        Self { grad_norm, applied: true, loss_scale: None, rescaled: false }
    }
}

/// `AdamW` over a decoder's parameters. Arithmetic is f32 (f64 where the device computes in f64), on masters where the
/// parameters are in half precision; moments are stored as the plan says. Gradients come multiplied by the loss scale.
#[derive(Debug)]
pub struct AdamW {
    pub(super) config: OptimConfig,
    pub(super) states: Vec<ParamState>,
    pub(super) steps: u64,
    scaler: Option<Scaler>,
    pub(super) accounts: Arc<Accounts>,
    /// The value head's learning rate over everything else's.
    pub(super) value_rate: f64,
    /// This optimizer's part of each parameter's state.
    partition: Partition,
}

impl AdamW {
    /// An optimizer without history for a decoder's parameters, on the device.
    pub fn new(config: OptimConfig, decoder: &Decoder) -> Self {
        Self::planned(config, decoder, OptimizerPlan::default(), &Accounts::new())
    }

    /// An optimizer without history that works where a plan says.
    pub fn planned(config: OptimConfig, decoder: &Decoder, plan: OptimizerPlan, accounts: &Arc<Accounts>) -> Self {
        Self::sharded(config, decoder, plan, accounts, Partition::WHOLE)
    }

    /// An optimizer without history that has the shards of one rank: it updates these, and gathers the others' (`ZeRO`,
    /// arXiv:1910.02054).
    pub fn sharded(
        config: OptimConfig,
        decoder: &Decoder,
        plan: OptimizerPlan,
        accounts: &Arc<Accounts>,
        partition: Partition,
    ) -> Self {
        let total = decoder.num_trainable() as f64;
        let mut before = 0;
        let specs = decoder.units().iter().enumerate().flat_map(|(unit, layout)| {
            let elsewhere = decoder.is_on_other_stage(unit);
            layout.specs.iter().map(move |spec| (spec, elsewhere))
        });
        let states = specs
            .map(|(spec, elsewhere)| {
                let on_host = plan.home == Home::Host && (before as f64) < plan.offload_fraction * total;
                before += if spec.trainable { spec.numel() } else { 0 };
                let home = if on_host { Home::Host } else { Home::Device };
                let shape = if elsewhere {
                    Partition::shape(0)
                } else if partition.is_whole() {
                    spec.rows_cols()
                } else {
                    Partition::shape(partition.range(spec.numel()).len())
                };
                ParamState::new(home, plan.idle, plan.moments, shape)
            })
            .collect();
        Self {
            scaler: config.scaler(decoder.arch().precision),
            config,
            states,
            steps: 0,
            accounts: Arc::clone(accounts),
            value_rate: 1.0,
            partition,
        }
    }

    /// An optimizer with the same state, which it shares with this one until one of the two is updated. `None` if some
    /// of the state is not on the device, where it is updated in place.
    pub fn shared(&self) -> Option<Self> {
        let accounts = Accounts::new();
        let states = self.states.iter().map(|state| state.shared(&accounts)).collect::<Option<_>>()?;
        let config = self.config.clone();
        Some(Self { config, states, accounts, ..*self })
    }

    /// Which shards of the state this optimizer has.
    pub fn partition(&self) -> Partition {
        self.partition
    }

    /// The elements of a parameter that this optimizer has: none of those that another stage has.
    pub fn part(&self, index: usize, spec: &ParamSpec) -> Range<usize> {
        part(self.partition, spec, &self.states[index])
    }

    /// Sets the learning-rate factor of a value head beside the policy's projection.
    pub fn set_value_rate(&mut self, rate: f64) {
        self.value_rate = rate;
    }

    /// Goes on after `steps` applied steps: `read` gives a parameter's saved moments, first and second, by flat index:
    /// of the elements that this optimizer has, counted in row-major order.
    ///
    /// # Errors
    /// The first that `read` gives; `Error::Device` and `Error::Model` where the device fails.
    pub fn restore(
        &mut self,
        steps: u64,
        decoder: &Decoder,
        mut read: impl FnMut(usize, Range<usize>) -> Result<Option<[Vec<f32>; 2]>>,
    ) -> Result<()> {
        self.steps = steps;
        let partition = self.partition;
        for ((index, spec), state) in decoder.specs().enumerate().zip(&mut self.states) {
            let range = part(partition, spec, state);
            if range.is_empty() {
                continue;
            }
            if let Some(moments) = read(index, range)? {
                state.restore(moments, decoder.device(), &self.accounts)?;
            }
        }
        Ok(())
    }

    /// The loss scale.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.map_or(1.0, |scaler| scaler.scale)
    }

    /// State of the loss scale.
    pub fn scaler(&self) -> Option<Scaler> {
        self.scaler
    }

    /// Goes on with a loss scale that was saved.
    pub fn set_scaler(&mut self, saved: Option<Scaler>) {
        if self.scaler.is_some_and(|scaler| scaler.dynamic) && saved.is_some() {
            self.scaler = saved;
        }
    }

    /// The weights of a parameter that updates work on, in f32, where the parameter itself is stored in half precision
    /// and was updated before: this optimizer's shard of them.
    ///
    /// # Errors
    /// `Error::Device` and `Error::Model` where the copy to the host fails.
    pub fn master(&self, index: usize) -> Result<Option<Vec<f32>>> {
        self.states[index].master()
    }

    /// Weights that the updates of a parameter continue with: this optimizer's shard of them, which is not empty.
    ///
    /// # Errors
    /// `Error::Device` and `Error::Model` where the device fails.
    pub fn set_master(&mut self, index: usize, values: Vec<f32>, device: &Device) -> Result<()> {
        self.states[index].set_master(values, device, &self.accounts)
    }

    /// Takes over the masters of an optimizer that updated the same decoder before.
    pub fn adopt_masters(&mut self, other: &mut Self) {
        for (state, other) in self.states.iter_mut().zip(&mut other.states) {
            state.adopt_master(other);
        }
    }

    /// Applied steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// True if a parameter has moments: it had a gradient before.
    pub fn has_moments(&self, index: usize) -> bool {
        !self.states[index].is_fresh()
    }

    /// First and second moment of a parameter in f32: this optimizer's shard of them.
    ///
    /// # Errors
    /// `Error::Device` and `Error::Model` where the copy to the host fails.
    pub fn moments(&self, index: usize) -> Result<Option<[Vec<f32>; 2]>> {
        self.states[index].moments()
    }

    /// Makes the first update, which cannot be run again, add nothing to the memory in use: every trainable parameter
    /// without moments gets moments of zeros and, in half precision, its f32 master; weights that are shared with
    /// another model get buffers of their own, in which they are updated. May be run again after an error; it changes
    /// no result.
    ///
    /// # Errors
    /// If memory runs out, or the device fails.
    pub fn reserve(&mut self, decoder: &mut Decoder) -> Result<()> {
        let trainable: Vec<bool> = decoder.specs().map(|spec| spec.trainable).collect();
        let states = self.states.iter_mut().enumerate();
        let fresh = states.filter(|(index, state)| trainable[*index] && state.is_fresh() && !state.is_empty());
        let mut reserved = Reserved(fresh.map(Reservation::new).collect());
        if reserved.0.is_empty() {
            return Ok(());
        }
        if self.partition.is_whole() {
            decoder.own_trained_weights()?;
        }
        let device = decoder.device();
        let precision = decoder.arch().precision;
        let (wide, half) = (precision.dtype(device) == DType::F64, precision.is_half());
        for Reservation { index, state, .. } in &mut reserved.0 {
            state.reserve(wide, device, &self.accounts)?;
            if half {
                let value = local_part(decoder, *index, self.partition);
                state.reserve_master(value, device, &self.accounts)?;
            }
        }
        let made = reserved.0.iter().map(|made| &made.state);
        check_computed(made.flat_map(|state| state.tensors_on_device()))?;
        reserved.0.clear();
        Ok(())
    }

    /// Waits until all that it keeps on the device is where it was restored to.
    ///
    /// # Errors
    /// If something is not, since memory ran out or the device failed.
    pub fn check_computed(&self) -> Result<()> {
        let kept = self.states.iter().flat_map(ParamState::tensors_on_device);
        Ok(check_computed(kept)?)
    }

    /// Clips, then updates every parameter that has a gradient, at learning rate `lr`. A non-finite norm applies
    /// nothing.
    ///
    /// # Errors
    /// `Error::Device` and `Error::Model` where the device, a copy or another rank fails: weights may then be updated
    /// in part.
    pub fn step(
        &mut self,
        decoder: &mut Decoder,
        mut gradients: Gradients,
        lr: f64,
        runtime: &Runtime,
    ) -> Result<StepOutcome> {
        let scale = self.loss_scale();
        let loss_scale = self.scaler.map(|scaler| scaler.scale);
        let grad_norm = gradients.global_norm(runtime.world())? / scale;
        if !grad_norm.is_finite() {
            return Ok(StepOutcome {
                grad_norm,
                applied: false,
                loss_scale,
                rescaled: self.scaler.as_mut().is_some_and(Scaler::overflowed),
            });
        }
        let clip = self.config.clip_coefficient(grad_norm) / scale;
        if let Some(scaler) = &mut self.scaler {
            scaler.applied();
        }
        self.steps += 1;
        let mut ahead = Ahead::default();
        for unit in 0..decoder.units().len() {
            ahead.fetch(self, decoder, &mut gradients, unit, runtime);
            ahead.fetch(self, decoder, &mut gradients, unit + 1, runtime);
            // the gradients of this unit and the next, and of all others that stay on the device
            runtime.raise_peak();
            if self.partition.is_whole() {
                self.update_unit(decoder, unit, clip, lr, |index| ahead.take(index, &mut gradients))?;
            } else {
                let shared = decoder.units()[unit].range.clone().filter(|index| gradients.is_reduced(*index));
                let shared: Vec<usize> = shared.collect();
                self.update_shards(decoder, unit, &shared, (clip, lr), runtime, |index| {
                    ahead.take(index, &mut gradients)
                })?;
            }
            runtime.record(Boundary::at(BoundaryKind::Update, unit));
        }
        Ok(StepOutcome { loss_scale, ..StepOutcome::applied(grad_norm) })
    }

    /// The outcome of a step that another number than its gradient norm forbids.
    pub(crate) fn skipped(&self, gradients: &Gradients) -> StepOutcome {
        let grad_norm = gradients.known_norm().unwrap_or(f64::NAN) / self.loss_scale();
        let loss_scale = self.scaler.map(|scaler| scaler.scale);
        StepOutcome { grad_norm, applied: false, loss_scale, rescaled: false }
    }

    fn update_unit(
        &mut self,
        decoder: &mut Decoder,
        unit: usize,
        clip: f64,
        lr: f64,
        mut gradient: impl FnMut(usize) -> Result<Option<Gradient>>,
    ) -> Result<()> {
        let device = decoder.device().clone();
        let Self { config, states, steps, accounts, value_rate, .. } = self;
        let mut batch = AdamWBatch::default();
        decoder.update_unit(unit, |index, spec, value| {
            let Some(gradient) = gradient(index)? else {
                return Ok(value);
            };
            let update = Update {
                config,
                at: update_at(config, spec, *steps, lr, *value_rate),
                clip,
                device: &device,
                accounts,
            };
            states[index].update(update, value, gradient, &mut batch)
        })?;
        batch.launch();
        Ok(())
    }

    /// An optimizer step that happens during the backward pass, unit by unit. The step is counted at once.
    pub fn in_backward(&mut self, lr: f64) -> StepInBackward<'_> {
        self.steps += 1;
        StepInBackward { optimizer: self, lr, squares: 0.0 }
    }
}

/// The elements of a parameter that a state is of.
fn part(partition: Partition, spec: &ParamSpec, state: &ParamState) -> Range<usize> {
    if state.is_empty() {
        return 0..0;
    }
    partition.range(spec.numel())
}

/// When and how a parameter is updated, at a learning rate and a value head's over it.
pub(super) fn update_at(config: &OptimConfig, spec: &ParamSpec, step: u64, lr: f64, value_rate: f64) -> UpdateAt {
    UpdateAt {
        step,
        lr: match spec.slot {
            Slot::Value => lr * value_rate,
            _ => lr,
        },
        decays: config.decay_norms_and_biases || !spec.slot.is_norm_or_bias(),
    }
}

/// Gradients on their way to a host that updates, one unit ahead of the update.
#[derive(Default)]
struct Ahead {
    copies: BTreeMap<usize, Pending<HostTensor>>,
    /// The first unit whose copies have not started.
    next: usize,
}

impl Ahead {
    fn fetch(
        &mut self,
        optimizer: &AdamW,
        decoder: &Decoder,
        gradients: &mut Gradients,
        unit: usize,
        runtime: &Runtime,
    ) {
        if unit < self.next || unit >= decoder.units().len() || !runtime.copier.is_asynchronous() {
            return;
        }
        self.next = unit + 1;
        for index in decoder.units()[unit].range.clone() {
            if optimizer.states[index].home() == Home::Device {
                continue;
            }
            let copy = match gradients.take(index) {
                None => continue,
                Some(Gradient::Host(host)) => Pending::Done(Ok(host)),
                Some(Gradient::Device(tensor)) => {
                    let values = runtime.copier.download(tensor);
                    runtime.copier.run(move || values.finish_matrix())
                }
            };
            self.copies.insert(index, copy);
        }
    }

    fn take(&mut self, index: usize, gradients: &mut Gradients) -> Result<Option<Gradient>> {
        match self.copies.remove(&index) {
            Some(copy) => Ok(Some(Gradient::Host(copy.wait()?))),
            None => Ok(gradients.take(index)),
        }
    }
}

/// Updates each unit as soon as its gradient is complete.
#[derive(Debug)]
pub struct StepInBackward<'a> {
    optimizer: &'a mut AdamW,
    lr: f64,
    squares: f64,
}

impl StepInBackward<'_> {
    /// Global norm of the gradient that was applied.
    pub fn grad_norm(&self) -> f64 {
        self.squares.sqrt()
    }
}

impl GradientHook for StepInBackward<'_> {
    fn complete(&mut self, decoder: &mut Decoder, gradients: &mut Gradients, unit: usize) -> Result<()> {
        let range = decoder.units()[unit].range.clone();
        let squares = gradients.sum_of_squares(range)?;
        if !squares.is_finite() {
            return Err(Error::PartlyApplied { way_back: "resume from the last checkpoint".into() });
        }
        self.squares += squares;
        self.optimizer.update_unit(decoder, unit, 1.0, self.lr, |index| Ok(gradients.take(index)))
    }
}
