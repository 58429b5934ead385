//! The states of linear attention in a cache: bytes, room, one sequence's, and those that are kept for sequences to
//! come.

use super::block_pool::ContentId;
use super::states::{Boundary, StateSlots};
use super::{BLOCK_SIZE, BlockTable, KvCache};
use crate::delta_net::LayerStates;
use burn::tensor::Tensor;

impl KvCache {
    /// Bytes of the states that there are slots for.
    pub(super) fn states_held(&self) -> usize {
        self.slots.as_ref().map_or(0, |slots| slots.len() * self.state_bytes)
    }

    /// Makes room for the states of `sequences` sequences, where the architecture has any.
    pub fn grow_states(&mut self, sequences: usize) {
        let Some(slots) = self.slots.as_mut() else {
            return;
        };
        if slots.len() < sequences {
            slots.grow(sequences);
            for states in &mut self.states {
                states.grow(sequences);
            }
        }
    }

    /// A slot for a sequence's states, where the architecture has any: a free one, or that of kept states that go
    /// first. Callers make [room](Self::grow_states) for as many sequences as there will be; a sequence more doubles
    /// it.
    pub(super) fn allocate_state(&mut self) -> Option<u32> {
        if let Some(slot) = self.slots.as_mut()?.allocate() {
            return Some(slot);
        }
        if !self.evict_states() {
            let wanted = 2 * self.slots.as_ref()?.len();
            self.grow_states(wanted.max(1));
        }
        self.slots.as_mut()?.allocate()
    }

    /// Gives up the kept states that go first; false where there are none.
    fn evict_states(&mut self) -> bool {
        let evicted = self.slots.as_mut().and_then(StateSlots::evict);
        if let Some(content) = evicted {
            self.forget_tail(content);
        }
        evicted.is_some()
    }

    /// Forgets the blocks of a tail whose states are gone: keys and values of a part of a block are kept for states
    /// alone.
    fn forget_tail(&mut self, content: ContentId) {
        if !self.prefixes.is_tail(content) {
            return;
        }
        for group in &mut self.groups {
            if group.pool.forget(content) {
                self.prefixes.forget(content);
            }
        }
    }

    /// Gives up the states after contents that no pool keeps any more.
    pub(super) fn drop_states(&mut self, contents: &[ContentId]) {
        let Some(slots) = self.slots.as_mut() else {
            return;
        };
        for &content in contents {
            if let Some(slot) = slots.take(content) {
                slots.release(slot);
            }
        }
    }

    /// True if the architecture has states, and there is a slot to keep those at the end of a block that prompts have
    /// in common.
    pub fn may_share_states(&self) -> bool {
        let slots = self.slots.as_ref();
        slots.is_some_and(|slots| slots.may_save(Boundary::Shared))
    }

    /// A slot for a sequence that begins, with the states after a content that are kept, if there is one. Blocks with
    /// it have references already.
    pub(super) fn resume_states(&mut self, content: Option<ContentId>) -> Option<u32> {
        let Some(content) = content else {
            return self.allocate_state();
        };
        let slots = self.slots.as_mut()?;
        slots.touch(content);
        let (slot, at) = slots.saved(content)?;
        if at.is_own() {
            slots.take(content);
            self.forget_tail(content);
            return Some(slot);
        }
        // the slot itself where no other is left: what is to be copied to it is copied to it again
        let origin = slots.origin(slot);
        let target = self.allocate_state()?;
        self.slots.as_mut()?.copy_held(origin, target);
        Some(target)
    }

    /// Keeps the states of a sequence after `tokens`, which its slot has, for others that begin with the same tokens,
    /// and with them the keys and values of the last tokens that fill no block. Does nothing where no slot is left to
    /// keep them in.
    pub fn save_states(&mut self, table: &mut BlockTable, tokens: &[u32], at: Boundary) {
        self.keep_prefix(table, tokens);
        let Some(source) = table.state else {
            return;
        };
        let rest = &tokens[tokens.len() / BLOCK_SIZE * BLOCK_SIZE..];
        let content = if rest.is_empty() {
            Some(table.known.1).filter(|&content| self.prefixes.is_kept(content))
        } else {
            self.keep_tail(table, tokens.len() / BLOCK_SIZE, rest)
        };
        let (Some(content), Some(slots)) = (content, self.slots.as_mut()) else {
            return;
        };
        if slots.has(content) {
            slots.touch(content);
        } else if at.is_own() {
            table.state = None;
            slots.save(content, source, at);
        } else if slots.may_save(at) {
            let slot = self.allocate_state();
            let (Some(slot), Some(slots)) = (slot, self.slots.as_mut()) else {
                return;
            };
            slots.copy(source, slot);
            slots.save(content, slot, at);
        } else {
            self.forget_tail(content);
        }
    }

    /// Keeps the last tokens of a sequence, block `index` of it, for states at their end.
    fn keep_tail(&mut self, table: &BlockTable, index: usize, tokens: &[u32]) -> Option<ContentId> {
        let content = self.prefixes.find_or_add(table.known.1, tokens);
        for (group, table_group) in self.groups.iter_mut().zip(&table.groups) {
            if group.pool.keep(table_group.block(index), content, tokens.len()) {
                self.prefixes.keep(content);
            }
        }
        self.prefixes.drop_unkept(content);
        self.prefixes.is_kept(content).then_some(content)
    }

    /// The states of a sequence in a layer of linear attention: of the delta rule, `[value heads · key_dim ·
    /// value_dim]`, and the last inputs of the convolution, `[(taps − 1) · channels]`, oldest first. `None` for other
    /// layers.
    pub fn states_of(&self, table: &BlockTable, layer: usize) -> Option<[Tensor<1>; 2]> {
        let states = self.states.get(self.places[layer])?;
        Some(states.values(table.state? as usize))
    }

    /// The states of a layer of linear attention.
    pub(crate) fn states(&mut self, index: usize) -> &mut LayerStates {
        &mut self.states[self.places[index]]
    }
}
