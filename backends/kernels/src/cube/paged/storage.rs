//! Storage of keys and values in a pool: in a float type, or as codes of 8 bits with scales.

use super::super::packed::codes::placed;
use super::codes::{CODES, encoded, magnitude, scale_bits, unpack};
use crate::cube::prelude::*;

/// Units that find the largest magnitude of a key or value.
const REDUCERS: usize = 32;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Key,
    Value,
}

/// The keys and values of a pool. Slots are counted through all key heads. A new token is in shared memory, the key
/// before the value.
#[cube]
pub(crate) trait Storage: LaunchArg + Send + Sync {
    /// Numbers of an element, which a unit reads at a time.
    const PACK: usize;
    /// True if numbers are codes to be multiplied by a scale.
    const SCALED: bool;

    /// The numbers of an element, before scales.
    fn load(this: &Self, #[comptime] kind: Kind, at: usize, numbers: &mut Array<f32>);

    /// The bits of both scales of a slot, the key's in the low half.
    fn scales(this: &Self, slot: usize) -> u32;

    /// Replaces a new token by what is stored of it, before scales, and gives the bits of those.
    fn encode(fresh: &mut Shared<[f32]>, #[comptime] dim: usize) -> u32;

    /// Writes an encoded token to a slot.
    fn write(this: &mut Self, fresh: &Shared<[f32]>, scales: u32, slot: usize, #[comptime] dim: usize);
}

/// A pool in a float type.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct FloatPool<F: Float> {
    keys: Box<[F]>,
    values: Box<[F]>,
}

#[cube]
impl<F: Float> Storage for FloatPool<F> {
    const PACK: usize = 1;
    const SCALED: bool = false;

    fn load(this: &Self, #[comptime] kind: Kind, at: usize, numbers: &mut Array<f32>) {
        match kind {
            Kind::Key => {
                numbers[0] = f32::cast_from(this.keys[at]);
            }
            Kind::Value => {
                numbers[0] = f32::cast_from(this.values[at]);
            }
        }
    }

    fn scales(_this: &Self, _slot: usize) -> u32 {
        0u32.runtime()
    }

    fn encode(_fresh: &mut Shared<[f32]>, #[comptime] _dim: usize) -> u32 {
        0u32.runtime()
    }

    fn write(this: &mut Self, fresh: &Shared<[f32]>, _scales: u32, slot: usize, #[comptime] dim: usize) {
        let mut i = UNIT_POS as usize;
        while i < dim {
            this.keys[slot * dim + i] = F::cast_from(fresh[i]);
            this.values[slot * dim + i] = F::cast_from(fresh[dim + i]);
            i += UNITS;
        }
    }
}

/// A pool in 8 bits: words of four codes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Int8Pool {
    keys: Box<[i32]>,
    values: Box<[i32]>,
    scales: Box<[i32]>,
}

#[cube]
impl Storage for Int8Pool {
    const PACK: usize = CODES;
    const SCALED: bool = true;

    fn load(this: &Self, #[comptime] kind: Kind, at: usize, numbers: &mut Array<f32>) {
        match kind {
            Kind::Key => {
                unpack(this.keys[at], numbers);
            }
            Kind::Value => {
                unpack(this.values[at], numbers);
            }
        }
    }

    fn scales(this: &Self, slot: usize) -> u32 {
        u32::reinterpret(this.scales[slot])
    }

    fn encode(fresh: &mut Shared<[f32]>, #[comptime] dim: usize) -> u32 {
        let mut lanes = Shared::<[u32]>::new_slice(comptime!(2 * REDUCERS));
        let unit = UNIT_POS as usize;
        if unit < comptime!(2 * REDUCERS) {
            let first = unit / REDUCERS * dim;
            let mut largest = 0u32;
            let mut i = unit % REDUCERS;
            while i < dim {
                largest = max(largest, magnitude(fresh[first + i]));
                i += REDUCERS;
            }
            lanes[unit] = largest;
        }
        sync_cube();
        let key = scale_bits(largest_of(&lanes, 0));
        let value = scale_bits(largest_of(&lanes, REDUCERS));
        let mut i = unit;
        while i < comptime!(2 * dim) {
            let mut bits = key;
            if i >= dim {
                bits = value;
            }
            let code = encoded(fresh[i], bits);
            fresh[i] = code;
            i += UNITS;
        }
        sync_cube();
        key | (value << 16u32)
    }

    fn write(this: &mut Self, fresh: &Shared<[f32]>, scales: u32, slot: usize, #[comptime] dim: usize) {
        let words = comptime!(dim / CODES);
        let mut i = UNIT_POS as usize;
        while i < words {
            let mut key = 0i32;
            let mut value = 0i32;
            #[unroll]
            for j in 0..CODES {
                key |= placed(fresh[i * CODES + j], j);
                value |= placed(fresh[dim + i * CODES + j], j);
            }
            this.keys[slot * words + i] = key;
            this.values[slot * words + i] = value;
            i += UNITS;
        }
        if UNIT_POS == 0 {
            this.scales[slot] = i32::reinterpret(scales);
        }
    }
}

/// The largest magnitude that units found, as bits.
#[cube]
fn largest_of(lanes: &Shared<[u32]>, first: usize) -> u32 {
    let mut largest = 0u32;
    for i in 0..REDUCERS {
        largest = max(largest, lanes[first + i]);
    }
    largest
}
