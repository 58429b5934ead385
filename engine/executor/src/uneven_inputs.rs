//! Passes of a rank that has no micro-batch left while others have one: it takes part in their collectives.

use super::gradients::Gradients;
use super::segment_executor::Executor;
use firebrick_core::Result;
use firebrick_models::Decoder;
use firebrick_plan::{ModelPlan, Order, Zero};

/// Passes through the model that every rank makes of a batch that was dealt out, where what they exchange in each needs
/// all of them, as it does from a stage of `ZeRO` on: those of the rank with most micro-batches. 0 where it does not.
pub fn rounds(plan: &ModelPlan, dealt: &[Vec<usize>], from: Zero) -> usize {
    match (plan.zero >= from, plan.order) {
        (false, _) => 0,
        (true, Order::MicroMajor) => dealt.iter().map(Vec::len).max().unwrap_or(0),
        (true, Order::SegmentMajor) => 1,
    }
}

impl Executor<'_> {
    /// Visits all units of a pass without a graph, for the ranks that gather them.
    pub(super) fn idle_forward(&self, decoder: &Decoder) -> Result<()> {
        let visits = self.forward_visits(decoder);
        let count = visits.len();
        let mut fetch = self.fetcher(visits);
        (0..count).try_for_each(|_| fetch.next(decoder).map(drop))
    }

    /// Visits and completes the units in the order in which a training pass does, with nothing to add.
    pub(super) fn idle_round(&self, decoder: &Decoder, gradients: &mut Gradients) -> Result<()> {
        let (plan, runtime, units) = (self.plan, self.runtime(), decoder.units());
        let mut fetch = self.fetcher(self.training_visits(decoder));
        let forward = self.forward_visits(decoder).len();
        (0..forward).try_for_each(|_| fetch.next(decoder).map(drop))?;
        let mut complete = |unit: usize| gradients.complete(decoder, units[unit].range.clone(), runtime);
        complete(units.len() - 1)?;
        if decoder.arch().tied {
            complete(0)?;
        }
        for segment in plan.segments.iter().rev() {
            drop(fetch.next(decoder)?);
            segment.units.clone().rev().try_for_each(&mut complete)?;
        }
        if units[0].trains() {
            complete(0)?;
        }
        Ok(())
    }
}
