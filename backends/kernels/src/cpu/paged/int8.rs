//! Numbers in 8 bits: a code each, and a scale for those of one token and head.

use crate::cpu::real::Real;

// codes are read as the bytes of words that have the first in the lowest bits
const _: () = assert!(cfg!(target_endian = "little"), "not for big-endian machines");

/// The largest code.
const MAX_CODE: f32 = 127.0;

/// NaN in bf16.
const NAN: u16 = 0x7FC0;

/// The scale of some numbers, as the bits of a bf16: their largest magnitude over 127, rounded up, so that no code is
/// larger. NaN where a number is not finite, so that none is read back as finite.
#[inline(always)]
pub(super) fn scale<T: Real>(numbers: &[T]) -> u16 {
    // magnitudes are ordered as their bits are, infinity and NaN above all numbers
    let bits = numbers.iter().map(|x| x.as_f32().to_bits() & 0x7FFF_FFFF);
    let most = f32::from_bits(bits.fold(0, u32::max));
    if most.is_finite() { (((most / MAX_CODE).to_bits() + 0xFFFF) >> 16) as u16 } else { NAN }
}

/// Writes the codes of some numbers, each with its index, and gives their scale.
#[inline(always)]
pub(super) fn encode<T: Real>(numbers: &[T], mut write: impl FnMut(usize, i8)) -> u16 {
    let bits = scale(numbers);
    let scale = f32::from_bits(u32::from(bits) << 16);
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    for (i, x) in numbers.iter().enumerate() {
        let code = (x.as_f32() / divisor).round_ties_even();
        write(i, code.clamp(-MAX_CODE, MAX_CODE) as i8);
    }
    bits
}

/// A word of the scales of a key and a value.
#[inline(always)]
pub(super) fn pack_scales(key: u16, value: u16) -> i32 {
    (u32::from(value) << 16 | u32::from(key)) as i32
}

/// The scale of a key.
#[inline(always)]
pub(super) fn key_scale(word: i32) -> f32 {
    f32::from_bits((word as u32) << 16)
}

/// The scale of a value.
#[inline(always)]
pub(super) fn value_scale(word: i32) -> f32 {
    f32::from_bits(word as u32 & 0xFFFF_0000)
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "scales are exact")]
mod tests {
    use super::*;

    fn wide(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    /// Their scale, and their codes.
    fn encoded(numbers: &[f32], codes: &mut [i8]) -> f32 {
        wide(encode(numbers, |i, code| codes[i] = code))
    }

    #[test]
    fn scales_are_the_largest_magnitude_over_127_rounded_up_to_bf16() {
        assert_eq!(wide(scale(&[0.5_f32, -127.0, 3.0])), 1.0);
        // 1 + 2⁻⁷ is the next bf16 after 1
        assert_eq!(wide(scale(&[127.0_f32.next_up() * (1.0 + 1e-6)])), 1.007_812_5);
        assert_eq!(scale(&[0.0_f32, -0.0]), 0);
        assert_eq!(scale::<f32>(&[]), 0);
        for i in 1..2000 {
            let most = i as f32 * 0.0137;
            let exact = most / 127.0;
            let actual = wide(scale(&[most]));
            assert!(actual >= exact && actual <= exact * (1.0 + 1.0 / 128.0), "{most}");
        }
        assert_eq!(wide(scale(&[254.0_f64, 1e-300])), 2.0);
    }

    #[test]
    fn codes_are_the_nearest_multiples_of_the_scale() {
        let numbers = [0.0_f32, 1.0, -1.0, 0.49, -0.51, 126.4, -127.0, 63.6];
        let mut codes = [9; 8];
        assert_eq!(encoded(&numbers, &mut codes), 1.0);
        assert_eq!(codes, [0, 1, -1, 0, -1, 126, -127, 64]);
        assert_eq!(encoded(&[0.0_f32; 8], &mut codes), 0.0);
        assert_eq!(codes, [0; 8]);
        let numbers = std::array::from_fn::<f32, 8, _>(|i| (i as f32 * 1.7).sin() * 3e-3);
        let scale = encoded(&numbers, &mut codes);
        for (x, code) in numbers.iter().zip(codes) {
            assert!((x - f32::from(code) * scale).abs() <= scale * 0.500_001);
        }
    }

    #[test]
    fn what_is_not_finite_is_read_back_as_nan() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut codes = [9; 4];
            let scale = encoded(&[1.0, bad, -2.0, 0.0], &mut codes);
            assert!(codes.iter().all(|&code| (f32::from(code) * scale).is_nan()));
        }
        // larger than every f32
        assert!(wide(scale(&[1e300_f64])).is_nan());
        // the largest f32 is not
        assert!(wide(scale(&[f32::MAX])).is_finite());
    }

    #[test]
    fn a_word_has_the_key_in_the_low_half() {
        let (key, value) = (0x3F80, 0xC000);
        let word = pack_scales(key, value);
        assert_eq!(word as u32, 0xC000_3F80);
        assert_eq!((key_scale(word), value_scale(word)), (1.0, -2.0));
    }
}
