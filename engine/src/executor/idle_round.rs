//! A pass through the model of a rank that has no micro-batch left, beside others that have one: it takes part in what they sum.

use super::gradients::Gradients;
use super::segment_executor::Executor;
use crate::Result;
use firebrick_models::Decoder;

impl Executor<'_> {
    /// Completes the units in the order in which a training pass does, with nothing to add.
    pub(super) fn idle_round(&self, decoder: &Decoder, gradients: &mut Gradients) -> Result<()> {
        let (plan, runtime, units) = (self.plan(), self.runtime(), decoder.units());
        let mut complete =
            |unit: usize| gradients.complete(decoder, units[unit].range.clone(), runtime);
        complete(units.len() - 1)?;
        if decoder.arch().tied {
            complete(0)?;
        }
        for segment in plan.segments.iter().rev() {
            segment.units.clone().rev().try_for_each(&mut complete)?;
        }
        if units[0].trains() {
            complete(0)?;
        }
        Ok(())
    }
}
