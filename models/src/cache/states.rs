//! Which sequence has which slot of the states of linear attention: numbers alone. States have a fixed size, so that a
//! sequence has one slot, the same in all layers, from its beginning to its end. Slots that no sequence has hold states
//! for sequences to come, until they are needed.

use super::block_pool::ContentId;
use std::collections::{BTreeSet, HashMap};

/// Places at which the states of a sequence are kept for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// The end of a prompt: whoever begins again after it.
    Prompt,
    /// The last whole block that prompts have in common.
    Shared,
    /// The end of a turn that will be answered.
    Turn,
    /// The end of a sequence.
    Ended,
}

impl Boundary {
    /// Order of eviction, the lower rank first: nothing is known to come back to those.
    fn rank(self) -> u8 {
        match self {
            Self::Prompt | Self::Ended => 0,
            Self::Shared | Self::Turn => 1,
        }
    }

    /// True if the sequence that kept the states continues with them: it gives its slot away, and gets it back.
    pub fn is_own(self) -> bool {
        match self {
            Self::Prompt | Self::Shared => false,
            Self::Turn | Self::Ended => true,
        }
    }
}

/// States that are kept.
#[derive(Clone, Copy, Debug)]
struct Saved {
    slot: u32,
    at: Boundary,
    used: u64,
}

/// A free list of slots, what the others hold for sequences to come, and copies that are still to be made.
#[derive(Debug, Default)]
pub(super) struct StateSlots {
    free: Vec<u32>,
    slots: u32,
    /// States by the content at whose end they are.
    saved: HashMap<ContentId, Saved>,
    /// By rank, then by the time of their last use: the order in which they go.
    order: BTreeSet<(u8, u64, ContentId)>,
    clock: u64,
    /// Sources and targets: made before the next forward pass. No slot is a target twice.
    copies: Vec<(u32, u32)>,
}

impl StateSlots {
    /// All slots.
    pub fn len(&self) -> usize {
        self.slots as usize
    }

    /// Slots that sequences have.
    pub fn used(&self) -> usize {
        self.len() - self.free.len() - self.saved.len()
    }

    /// Adds free slots, so that there are `slots`. The first are to be taken first.
    pub fn grow(&mut self, slots: usize) {
        let more = self.slots..slots as u32;
        if !more.is_empty() {
            self.free.splice(0..0, more.rev());
            self.slots = slots as u32;
        }
    }

    /// A slot, if one is free.
    pub fn allocate(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives a slot back; nothing is copied to it any more.
    pub fn release(&mut self, slot: u32) {
        self.copies.retain(|&(_, target)| target != slot);
        self.free.push(slot);
    }

    /// The slot that holds now what a slot will have before the next forward pass.
    pub fn origin(&self, slot: u32) -> u32 {
        let copied = self.copies.iter().find(|(_, target)| *target == slot);
        copied.map_or(slot, |&(source, _)| source)
    }

    /// Has a state copied before the next forward pass. What is itself still to be copied comes from where that comes
    /// from.
    pub fn copy(&mut self, source: u32, target: u32) {
        self.copy_held(self.origin(source), target);
    }

    /// [`Self::copy`] of a slot's present state; the slot may be the target: all copies are read before any is written.
    pub fn copy_held(&mut self, origin: u32, target: u32) {
        if origin != target {
            self.copies.push((origin, target));
        }
    }

    /// The copies that are to be made now.
    pub fn take_copies(&mut self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.copies)
    }

    /// True if there is a slot for states to keep, free or with others that may be evicted for them.
    pub fn may_save(&self, at: Boundary) -> bool {
        let evicts = self.order.first().map(|&(rank, ..)| rank <= at.rank());
        !self.free.is_empty() || evicts.unwrap_or(false)
    }

    /// True if the states after a content are kept.
    pub fn has(&self, content: ContentId) -> bool {
        self.saved.contains_key(&content)
    }

    /// Keeps the states that a slot has, or will have before the next forward pass.
    pub fn save(&mut self, content: ContentId, slot: u32, at: Boundary) {
        self.clock += 1;
        let used = self.clock;
        self.order.insert((at.rank(), used, content));
        let before = self.saved.insert(content, Saved { slot, at, used });
        assert!(before.is_none(), "states are kept once");
    }

    /// Notes that kept states are used, if they are there.
    pub fn touch(&mut self, content: ContentId) {
        if let Some(saved) = self.saved.get_mut(&content) {
            self.clock += 1;
            let rank = saved.at.rank();
            self.order.remove(&(rank, saved.used, content));
            saved.used = self.clock;
            self.order.insert((rank, saved.used, content));
        }
    }

    /// The slot of kept states, and who may have it.
    pub fn saved(&self, content: ContentId) -> Option<(u32, Boundary)> {
        self.saved.get(&content).map(|saved| (saved.slot, saved.at))
    }

    /// Gives up kept states, with their slot.
    pub fn take(&mut self, content: ContentId) -> Option<u32> {
        let saved = self.saved.remove(&content)?;
        self.order.remove(&(saved.at.rank(), saved.used, content));
        Some(saved.slot)
    }

    /// Frees the slot of the kept states that go first, and tells which they were.
    pub fn evict(&mut self) -> Option<ContentId> {
        let &(.., content) = self.order.first()?;
        let slot = self.take(content)?;
        self.release(slot);
        Some(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_back_and_the_first_are_taken_first() {
        let mut slots = StateSlots::default();
        slots.grow(2);
        assert_eq!([slots.allocate(), slots.allocate()], [Some(0), Some(1)]);
        assert_eq!((slots.allocate(), slots.used()), (None, 2));
        slots.grow(3);
        slots.release(0);
        assert_eq!([slots.allocate(), slots.allocate()], [Some(0), Some(2)]);
    }

    #[test]
    fn a_copy_of_a_copy_comes_from_the_first_and_none_goes_to_a_slot_that_was_given_back() {
        let mut slots = StateSlots::default();
        slots.grow(4);
        let allocated: Vec<u32> = (0..4).filter_map(|_| slots.allocate()).collect();
        slots.copy(allocated[0], allocated[1]);
        slots.copy(allocated[1], allocated[2]);
        slots.copy(allocated[0], allocated[3]);
        slots.release(allocated[1]);
        assert_eq!(slots.take_copies(), [(allocated[0], allocated[2]), (allocated[0], allocated[3])]);
        assert!(slots.take_copies().is_empty());
    }

    #[test]
    fn what_a_slot_holds_is_copied_though_the_slot_is_given_away_before() {
        let mut slots = StateSlots::default();
        slots.grow(4);
        let allocated: Vec<u32> = (0..4).filter_map(|_| slots.allocate()).collect();
        slots.copy(allocated[0], allocated[3]);
        let origin = slots.origin(allocated[3]);
        // the slot that is still to be read has another sequence's state next
        slots.release(allocated[0]);
        assert_eq!(slots.allocate(), Some(allocated[0]));
        slots.copy(allocated[1], allocated[0]);
        slots.copy_held(origin, allocated[2]);
        slots.copy_held(allocated[1], allocated[1]);
        let expected = [(allocated[0], allocated[3]), (allocated[1], allocated[0]), (allocated[0], allocated[2])];
        assert_eq!(slots.take_copies(), expected);
    }

    #[test]
    fn kept_states_go_by_rank_and_then_by_the_time_of_their_last_use() {
        let mut slots = StateSlots::default();
        slots.grow(4);
        let kinds = [Boundary::Shared, Boundary::Prompt, Boundary::Turn, Boundary::Ended];
        for (content, at) in (0..).map(ContentId).zip(kinds) {
            let slot = slots.allocate().expect("a free slot");
            slots.save(content, slot, at);
        }
        assert_eq!((slots.used(), slots.allocate()), (0, None));
        slots.touch(ContentId(0));
        assert!(slots.may_save(Boundary::Prompt));
        let gone: Vec<u64> = std::iter::from_fn(|| slots.evict()).map(|c| c.0).collect();
        assert_eq!(gone, [1, 3, 2, 0]);
        assert_eq!((slots.free.len(), slots.evict()), (4, None));
    }

    #[test]
    fn the_end_of_a_prompt_takes_no_slot_of_states_that_will_be_used() {
        let mut slots = StateSlots::default();
        slots.grow(1);
        let slot = slots.allocate().expect("a free slot");
        assert!(!slots.may_save(Boundary::Turn), "a sequence has it");
        slots.save(ContentId(1), slot, Boundary::Shared);
        assert!(slots.may_save(Boundary::Shared) && !slots.may_save(Boundary::Prompt));
        assert_eq!(slots.take(ContentId(1)), Some(slot));
        assert!(!slots.has(ContentId(1)));
        assert_eq!(slots.used(), 1);
    }
}
