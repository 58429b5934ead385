//! Shuffles that need no memory: the image of one index under a pseudo-random permutation.
//!
//! A resumed run must see the prompts it would have seen, so the order cannot live in a generator's
//! state. A Feistel network is a permutation for any round function; walking along its cycles
//! restricts it to a domain of any size.

use super::{Split, TaskError};
use firebrick_models::random::philox;

/// More rounds than mixing needs on large domains: tiny ones (a few bits) mix slowly.
const ROUNDS: u32 = 8;

/// A pseudo-random permutation of `0..len`, computed one index at a time.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: [u32; 2],
    stream: u64,
}

impl Permutation {
    /// The permutation `stream` of `seed` over `0..len`; different streams are different shuffles.
    pub fn new(len: u64, seed: u64, stream: u64) -> Self {
        let bits = 64 - len.saturating_sub(1).leading_zeros();
        // The key is whitened so that a shuffle replays neither a sampler's draws nor a `Stream`.
        let key = [seed as u32 ^ 0x0BAD_5EA1, (seed >> 32) as u32 ^ 0x7A5C_0FFE];
        Self { len, half_bits: bits.div_ceil(2).max(1), key, stream }
    }

    /// The number of indices.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if there is no index to permute.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The image of `index`, which must be below [`Permutation::len`].
    pub fn of(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} of a permutation of {} elements", self.len);
        let mut image = self.feistel(index);
        while image >= self.len {
            image = self.feistel(image);
        }
        image
    }

    fn feistel(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 0..ROUNDS {
            let counter = [right as u32, round, self.stream as u32, (self.stream >> 32) as u32];
            let mixed = left ^ (u64::from(philox(counter, self.key)[0]) & mask);
            (left, right) = (right, mixed);
        }
        left << self.half_bits | right
    }
}

/// The example of draw number `draw` of a run from a split of `len` examples: shuffled
/// epochs for a finite split (every example once an epoch), the draw itself for an endless one.
/// An empty split has no example to take.
pub fn shuffled_index(len: Option<u64>, seed: u64, draw: u64) -> Option<u64> {
    match len {
        None => Some(draw),
        Some(0) => None,
        Some(len) => Some(Permutation::new(len, seed, draw / len).of(draw % len)),
    }
}

/// Numbered generated problems: a fixed shuffle puts the held-out ones first, and training walks the others in
/// shuffled epochs. So the two are disjoint by construction, for any seed, and in a space of any size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problems {
    permutation: Permutation,
    held_out: u64,
    seed: u64,
}

impl Problems {
    /// Splits `len` problems, of which a larger value of `size` makes more. `key` selects the held-out ones, and `seed`
    /// orders the others.
    pub fn new(len: u64, key: u64, held_out: u64, seed: u64, size: &str) -> Result<Self, TaskError> {
        if held_out >= len {
            let detail = format!(
                "there are {len} problems, so holding out {held_out} leaves none to train on; expected at most {}: lower it \
                 or raise `{size}`",
                len - 1
            );
            return Err(TaskError::config("task.validation_size", detail));
        }
        Ok(Self { permutation: Permutation::new(len, key, 0), held_out, seed })
    }

    /// The number of examples of a split; `None` is endless.
    pub fn len(&self, split: Split) -> Option<u64> {
        match split {
            Split::Train => None,
            Split::Validation => Some(self.held_out),
        }
    }

    /// The number of the problem at an index, for the task of this name.
    pub fn at(&self, task: &str, split: Split, index: u64) -> Result<u64, TaskError> {
        let position = match split {
            Split::Validation if index < self.held_out => index,
            Split::Validation => return Err(TaskError::no_such_example(task, split, index, self.held_out)),
            Split::Train => {
                let len = self.permutation.len() - self.held_out;
                self.held_out + Permutation::new(len, self.seed, index / len).of(index % len)
            }
        };
        Ok(self.permutation.of(position))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_index_has_exactly_one_image(len in 1u64..600, seed: u64, stream: u64) {
            let permutation = Permutation::new(len, seed, stream);
            let mut images: Vec<u64> = (0..len).map(|i| permutation.of(i)).collect();
            images.sort_unstable();
            prop_assert_eq!(images, (0..len).collect::<Vec<_>>());
        }

        #[test]
        fn images_stay_inside_large_domains(len in 1u64..=u64::MAX, seed: u64, at: u64) {
            prop_assert!(Permutation::new(len, seed, 0).of(at % len) < len);
        }
    }

    #[test]
    fn seeds_and_streams_shuffle_differently() {
        let order =
            |seed, stream| -> Vec<u64> { (0..100).map(|i| Permutation::new(100, seed, stream).of(i)).collect() };
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), order(1, 1));
    }

    #[test]
    fn first_images_are_spread_evenly_over_seeds() {
        let mut counts = [0u32; 10];
        for seed in 0..10_000 {
            counts[Permutation::new(10, seed, 0).of(0) as usize] += 1;
        }
        assert!(counts.iter().all(|&c| (850..1150).contains(&c)), "{counts:?}");
    }

    #[test]
    fn an_epoch_draws_every_example_once_and_the_next_one_in_another_order() {
        let epoch = |e: u64| -> Vec<u64> {
            (0..20).map(|i| shuffled_index(Some(20), 5, e * 20 + i).expect("not empty")).collect()
        };
        let mut sorted = epoch(1);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..20).collect::<Vec<_>>());
        assert_ne!(epoch(0), epoch(1));
        assert_eq!(shuffled_index(None, 5, 17), Some(17));
        assert_eq!(shuffled_index(Some(0), 5, 17), None);
    }
}
