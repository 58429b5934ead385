//! States that sequences hand to those that go on behind them, and the gradients that come back.

use crate::cpu::prelude::*;
use crate::delta::{DeltaHeads, Generations};

/// States of some sequences, `[sequences, value heads, key_dim, value_dim]`.
pub(super) struct States<T> {
    numbers: Vec<T>,
    heads: DeltaHeads,
}

impl<T: Real> States<T> {
    pub fn new(sequences: usize, heads: DeltaHeads) -> Self {
        Self { numbers: vec![T::ZERO; sequences * heads.state()], heads }
    }

    /// Those that threads write.
    pub fn shared(&mut self) -> SharedStates<T> {
        SharedStates { numbers: SharedPtr(self.numbers.as_mut_ptr()), heads: self.heads }
    }
}

/// States that several threads write.
#[derive(Clone, Copy)]
pub(super) struct SharedStates<T> {
    numbers: SharedPtr<T>,
    heads: DeltaHeads,
}

impl<T: Real> SharedStates<T> {
    /// States in a pool.
    pub fn of_pool(pool: SharedPtr<T>, heads: DeltaHeads) -> Self {
        Self { numbers: pool, heads }
    }

    /// The states of a key head's value heads at a place.
    ///
    /// # Safety
    /// The place is one of these, and no other thread accesses these states as long as the slice lives.
    pub unsafe fn of_key_head<'a>(self, place: usize, key_head: usize) -> &'a mut [T] {
        let width = self.heads.group() * self.heads.key_dim * self.heads.value_dim;
        // SAFETY: the caller's promise.
        unsafe { self.numbers.slice(place * self.heads.state() + key_head * width, width) }
    }
}

/// The sequences of a generation with each key head.
pub(super) fn tasks(members: &[usize], heads: DeltaHeads) -> Vec<(usize, usize)> {
    members.iter().flat_map(|&sequence| (0..heads.keys).map(move |head| (sequence, head))).collect()
}

/// What a sequence's key head begins with and what goes on behind it, in a backward pass.
pub(super) struct HandedOn<'a, T> {
    /// The states that it begins with; zeros where there are none.
    pub start: Option<&'a [T]>,
    /// Gradients of the states that others begin with behind it, in their order.
    pub d_ends: Vec<&'a [T]>,
    /// Where the gradients of the first states go.
    pub d_start: Option<&'a mut [T]>,
}

impl<'a, T: Real> HandedOn<'a, T> {
    /// Those of a key head of a sequence, given the end states of sequences that have children and the gradients of the
    /// first states of those that have a parent.
    ///
    /// # Safety
    /// No thread writes these states, and no other one accesses the gradients of this sequence's.
    pub unsafe fn new(
        tree: &Generations,
        [ends, d_starts]: [SharedStates<T>; 2],
        (sequence, key_head): (usize, usize),
    ) -> Self {
        let of = |states: SharedStates<T>, place: Option<usize>| -> Option<&'a mut [T]> {
            // SAFETY: the caller's promise.
            place.map(|place| unsafe { states.of_key_head(place, key_head) })
        };
        let parent = tree.parents[sequence].and_then(|parent| tree.ends[parent]);
        let d_ends = tree.children[sequence].iter().filter_map(|&child| of(d_starts, tree.starts[child]));
        Self {
            start: of(ends, parent).map(|states| &*states),
            d_ends: d_ends.map(|states| &*states).collect(),
            d_start: of(d_starts, tree.starts[sequence]),
        }
    }
}
