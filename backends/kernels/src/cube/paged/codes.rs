//! The 8-bit codes of a pool. A token's key in one head, and its value, has a scale: the largest magnitude over 127,
//! rounded up to bf16.

use super::super::packed::codes::code;
use cubecl::prelude::*;

/// Codes of a word.
pub(super) const CODES: usize = 4;

/// The largest code.
const MAX_CODE: f64 = 127.0;

/// The bits of infinity, in f32 and in bf16. NaNs have greater ones.
const INFINITY: u32 = 0x7F80_0000;
const INFINITY_BF16: u32 = 0x7F80;

/// The bits of a magnitude, which have the order of magnitudes, and NaN after infinity.
#[cube]
pub(super) fn magnitude(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7FFF_FFFFu32
}

/// The bits in bf16 of the scale of numbers, given those of the largest magnitude; of NaN where one of them is not
/// finite.
#[cube]
pub(super) fn scale_bits(largest: u32) -> u32 {
    let mut bits = 0x7FC0u32;
    if largest < INFINITY {
        let scale = f32::reinterpret(largest) / f32::new(MAX_CODE);
        // up, so that no code exceeds 127
        bits = (u32::reinterpret(scale) + 0xFFFFu32) >> 16u32;
    }
    bits
}

/// The scale that the low half of a word has.
#[cube]
pub(super) fn scale_of(word: u32) -> f32 {
    f32::reinterpret(word << 16u32)
}

/// The code of a number; 0 where the scale is 0 or NaN.
#[cube]
pub(super) fn encoded(x: f32, bits: u32) -> f32 {
    let mut rounded = 0.0f32;
    if bits > 0u32 && bits < INFINITY_BF16 {
        let x = (x / scale_of(bits)).round();
        rounded = clamp(x, f32::new(-MAX_CODE), f32::new(MAX_CODE));
    }
    rounded
}

/// The codes of a word.
#[cube]
pub(super) fn unpack(word: i32, numbers: &mut Array<f32>) {
    #[unroll]
    for j in 0..CODES {
        numbers[j] = code(word, j);
    }
}
