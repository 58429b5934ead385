//! What an estimate asks techniques about: moments of a pass over a model's segments, a training pass, an update.

use crate::estimate::{Context, MemoryUsage, ModelState, SegmentTotals};
use crate::{ModelPlan, TECHNIQUES};
use firebrick_spec::{Category, Home};
use std::iter::Sum;

/// A moment of a pass over the segments of a model.
#[derive(Clone, Copy)]
pub struct Moment<'a> {
    pub(crate) ctx: &'a Context<'a>,
    pub(crate) plan: &'a ModelPlan,
    /// The category of the model's weights.
    pub(crate) category: Category,
    /// True if a backward pass follows.
    pub(crate) trains: bool,
    /// Bytes of an input that a micro-batch keeps, and micro-batches that keep theirs.
    pub(crate) row: u64,
    pub(crate) copies: u64,
    /// Inputs that each keeps: on the device, and on the host.
    pub(crate) inputs: [u64; 2],
    /// Numbers of gradients that are no longer in a graph and not yet in their sum.
    pub(crate) fresh: u64,
    /// The visit under way, where weights come and go.
    pub(crate) visit: Option<Visit>,
}

/// A visit of weights to the device.
#[derive(Clone, Copy)]
pub(crate) struct Visit {
    /// Its place in the pass: embedding, segments, head, and in the backward pass the segments from the last on.
    pub place: usize,
    /// The segment, and how many before it are on their way.
    pub segment: usize,
    pub ahead: usize,
}

impl<'a> Moment<'a> {
    /// A moment of a pass that scores.
    pub(crate) fn of_scoring(ctx: &'a Context<'a>, plan: &'a ModelPlan, category: Category) -> Self {
        Self { ctx, plan, category, trains: false, row: 0, copies: 0, inputs: [0; 2], fresh: 0, visit: None }
    }

    /// The moment with the weights of a visit.
    pub(crate) fn visits(self, place: usize, segment: usize, ahead: usize) -> Self {
        Self { visit: Some(Visit { place, segment, ahead }), ..self }
    }

    pub(crate) fn state(&self) -> ModelState<'a> {
        self.ctx.state(self.plan)
    }

    /// Bytes that are there because of all techniques.
    pub(crate) fn held(&self) -> MemoryUsage {
        let mut held = MemoryUsage::default();
        for technique in TECHNIQUES {
            technique.hold(self, &mut held);
        }
        held
    }
}

/// A micro-batch of a training step: the average one.
pub struct TrainingPass<'a> {
    pub(crate) ctx: &'a Context<'a>,
    pub(crate) totals: &'a SegmentTotals,
    /// Bytes of an input.
    pub(crate) row: f64,
    /// Micro-batches for which weights are fetched once.
    pub(crate) per_fetch: f64,
    /// Bytes of gradients.
    pub(crate) gradients: f64,
}

/// Seconds of copies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Transfers {
    /// Of those that may run beside the computation.
    pub beside: f64,
    /// Of those that the computation waits for.
    pub waited: f64,
}

impl Sum for Transfers {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self { beside: a.beside + b.beside, waited: a.waited + b.waited })
    }
}

/// An update of a model.
pub struct Update<'a> {
    pub(crate) ctx: &'a Context<'a>,
    pub(crate) plan: &'a ModelPlan,
    /// Numbers that a device updates, and those that its host does.
    pub(crate) on_device: f64,
    pub(crate) on_host: f64,
}

impl<'a> Update<'a> {
    /// Of the model at hand.
    pub(crate) fn new(ctx: &'a Context<'a>) -> Self {
        let plan = ctx.model();
        let total = ctx.parallel.optimizer(ctx.sizes.trained()) as f64;
        let on_host = match plan.optimizer.home {
            Home::Host => total * plan.optimizer.offload_fraction,
            Home::Device => 0.0,
        };
        Self { ctx, plan, on_device: total - on_host, on_host }
    }
}
