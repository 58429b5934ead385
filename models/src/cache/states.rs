//! Which sequence has which slot of the states of linear attention: numbers alone. States have a fixed size, so that a sequence has one
//! slot, the same in all layers, from its beginning to its end.

/// A free list of slots, and copies that are still to be made.
#[derive(Debug, Default)]
pub(super) struct StateSlots {
    free: Vec<u32>,
    slots: u32,
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
        self.len() - self.free.len()
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

    /// Has a state copied before the next forward pass. What is itself still to be copied comes from where that comes from.
    pub fn copy(&mut self, source: u32, target: u32) {
        let earlier = self.copies.iter().find(|(_, copied)| *copied == source);
        let source = earlier.map_or(source, |&(first, _)| first);
        self.copies.push((source, target));
    }

    /// The copies that are to be made now.
    pub fn take_copies(&mut self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.copies)
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
        let all: Vec<u32> = (0..4).filter_map(|_| slots.allocate()).collect();
        slots.copy(all[0], all[1]);
        slots.copy(all[1], all[2]);
        slots.copy(all[0], all[3]);
        slots.release(all[1]);
        assert_eq!(slots.take_copies(), [(all[0], all[2]), (all[0], all[3])]);
        assert!(slots.take_copies().is_empty());
    }
}
