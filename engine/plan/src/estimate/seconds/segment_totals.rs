//! Sums over the segments of a plan: the same for all sizes of micro-batches, so that a search counts it once for each
//! plan.

use crate::ActivationPolicy;
use crate::estimate::{Context, TrainingMessages};
use firebrick_spec::Home;

/// Sums over the segments of a model that is trained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentTotals {
    /// Units that run forward once more in the backward pass.
    pub recomputed_units: u64,
    /// Segments whose inputs wait on the host.
    pub offloaded_inputs: u64,
    /// Bytes of weights that are streamed in one pass over the body.
    pub streamed: u64,
    /// Messages about weights and gradients.
    pub messages: TrainingMessages,
}

impl SegmentTotals {
    /// Of the model at hand.
    pub fn new(ctx: &Context<'_>) -> Self {
        let plan = ctx.model();
        let (mut recomputed_units, mut offloaded_inputs) = (0, 0);
        for segment in &plan.segments {
            if let ActivationPolicy::Input(home) = segment.keep {
                recomputed_units += segment.units.len() as u64;
                offloaded_inputs += u64::from(home == Home::Host);
            }
        }
        Self {
            recomputed_units,
            offloaded_inputs,
            streamed: plan.streamed(&ctx.sizes),
            messages: ctx.weights_of(plan).training(),
        }
    }
}
