//! Which checkpoints a run has written, and which of them are known to work.

use crate::Result;
use crate::checkpoint::{RunDir, TrainerState};
use crate::world::World;

/// The newest checkpoints of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Saved {
    /// The step of the newest.
    pub newest: Option<u64>,
    /// Applied optimizer steps in it, of the policy and of the critic.
    pub updates: [u64; 2],
    /// The step of the newest one before it that was continued from, so that its weights are known to work.
    pub good: Option<u64>,
    /// Whether that one may be beyond the number of those to keep.
    pub spares: bool,
}

impl Saved {
    /// The checkpoints that a session finds which continues from a state, as rank 0 sees them.
    pub fn at_start(run: &RunDir, world: &World, resumed: Option<&TrainerState>) -> Result<Self> {
        let Some(state) = resumed else {
            return Ok(Self::default());
        };
        let found = run.checkpoints()?;
        let earlier = found.iter().rev().map(|(step, _)| *step).find(|step| *step < state.step);
        let good = world.of_main(earlier)?;
        let updates = [state.optimizer_steps, state.critic_steps];
        Ok(Self { newest: Some(state.step), updates, good, spares: false })
    }
}
