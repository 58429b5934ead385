//! An optimizer under another plan.

use super::AdamW;
use firebrick_backends::accounts::Home;
use firebrick_backends::transfer::check_computed;
use firebrick_core::Result;
use firebrick_models::Decoder;
use firebrick_plan::OptimizerPlan;

impl AdamW {
    /// Moves to another plan with what it has learnt. One parameter after the other, so that no state is held twice. A
    /// parameter's state is replaced once its new place holds it: where memory runs out on the way nothing is lost, and
    /// another plan can be taken. State that the plan only lets wait on the host leaves without any memory of the
    /// device.
    ///
    /// # Errors
    /// `Error::Device` and `Error::Model` where a copy fails.
    pub fn replan(&mut self, plan: OptimizerPlan, decoder: &Decoder) -> Result<()> {
        let config = self.config.clone();
        let next = Self::sharded(config, decoder, plan, &self.accounts, self.partition());
        let device = decoder.device();
        let half = decoder.arch().precision.is_half();
        for (state, mut fresh) in self.states.iter_mut().zip(next.states) {
            if state.is_placed_like(&fresh) {
                continue;
            }
            if state.differs_in_waiting(&fresh) && fresh.idle_home() == Home::Host {
                state.wait_on_host(&self.accounts)?;
                continue;
            }
            if let Some(moments) = state.moments()? {
                fresh.restore(moments, device, &self.accounts)?;
            }
            if half && let Some(master) = state.master()? {
                fresh.set_master(master, device, &self.accounts)?;
            }
            check_computed(fresh.tensors_on_device())?;
            *state = fresh;
        }
        Ok(())
    }
}
