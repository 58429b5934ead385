//! The states of linear attention in a cache: bytes, room, and one sequence's.

use super::{BlockTable, KvCache};
use crate::delta_net::LayerStates;
use burn::tensor::Tensor;

impl KvCache {
    /// Bytes of the states that there are slots for.
    pub(super) fn states_held(&self) -> usize {
        self.slots
            .as_ref()
            .map_or(0, |slots| slots.len() * self.state_bytes)
    }

    /// Makes room for the states of so many sequences, where the architecture has any.
    pub fn grow_states(&mut self, sequences: usize) {
        let Some(slots) = self.slots.as_mut() else {
            return;
        };
        if slots.len() < sequences {
            slots.grow(sequences);
            for own in &mut self.states {
                own.grow(sequences);
            }
        }
    }

    /// A slot for a sequence's states, where the architecture has any. Callers make [room](Self::grow_states) for as many sequences as
    /// there will be; a sequence more doubles it.
    pub(super) fn allocate_state(&mut self) -> Option<u32> {
        let slots = self.slots.as_mut()?;
        if let Some(slot) = slots.allocate() {
            return Some(slot);
        }
        let wanted = (2 * slots.len()).max(1);
        self.grow_states(wanted);
        self.slots.as_mut()?.allocate()
    }

    /// The states of a sequence in a layer of linear attention: of the delta rule, `[value heads · key_dim · value_dim]`, and the last
    /// inputs of the convolution, `[(taps − 1) · channels]`, oldest first. `None` for other layers.
    #[must_use]
    pub fn states_of(&self, table: &BlockTable, layer: usize) -> Option<[Tensor<1>; 2]> {
        let own = self.states.get(self.places[layer])?;
        Some(own.values(table.state? as usize))
    }

    /// The states of a layer of linear attention.
    pub(crate) fn states(&mut self, index: usize) -> &mut LayerStates {
        &mut self.states[self.places[index]]
    }
}
