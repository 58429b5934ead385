//! Memory for a first update, which is allocated before it.

use super::state::ParamState;

/// The state of a parameter, by its flat index, for which memory is being allocated.
pub(super) struct Reservation<'a> {
    pub index: usize,
    pub state: &'a mut ParamState,
    /// True if it had a master before.
    had_master: bool,
}

impl<'a> Reservation<'a> {
    pub fn new((index, state): (usize, &'a mut ParamState)) -> Self {
        let had_master = state.has_master();
        Self { index, state, had_master }
    }
}

/// Allocations before a first update. Where that fails, no state keeps any of it, since a device may have refused it
/// without saying so yet.
pub(super) struct Reserved<'a>(pub Vec<Reservation<'a>>);

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        for made in &mut self.0 {
            made.state.forget_moments();
            if !made.had_master {
                made.state.forget_master();
            }
        }
    }
}
