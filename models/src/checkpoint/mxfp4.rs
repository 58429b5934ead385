//! Matrices of experts in MXFP4 (OCP Microscaling Formats 1.0; gpt-oss), which are widened as they are read: under a
//! matrix's name with `_blocks` behind it codes of 4 bits, `[experts, out, in / 32, 16]`, the first of two in the lower
//! half of a byte, and with `_scales` a byte for every 32 of them, `[experts, out, in / 32]`. A number is the code's
//! E2M1 times `2^(scale − 127)`.

use super::bitsandbytes::RawTensor;
use safetensors::tensor::Dtype;

const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

/// Numbers that share a scale, and their bytes.
const BLOCK: usize = 32;
const BYTES: usize = BLOCK / 2;

/// Values of E2M1 codes.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A scale that is no number.
const NAN: u8 = 255;

/// The matrix that a tensor is a part of; `None` for a tensor by itself.
pub(super) fn weight_of(name: &str) -> Option<&str> {
    name.strip_suffix(BLOCKS).or_else(|| name.strip_suffix(SCALES))
}

/// True if a matrix is in MXFP4, in a folder that has tensors of some names.
pub(super) fn is_quantised(weight: &str, has: impl Fn(&str) -> bool) -> bool {
    [BLOCKS, SCALES].iter().any(|part| has(&format!("{weight}{part}")))
}

/// The numbers of a matrix `[experts, out, in]`.
///
/// # Errors
/// The part that is missing or misshapen.
pub(super) fn read<'a>(
    weight: &str,
    [experts, out, input]: [usize; 3],
    tensor: impl Fn(&str) -> Option<RawTensor<'a>>,
) -> Result<Vec<f32>, String> {
    let part = |suffix: &str, last: &[usize]| {
        let name = format!("{weight}{suffix}");
        let stored =
            tensor(&name).ok_or_else(|| format!("is in MXFP4 without its {name}; download or copy it again"))?;
        let shape = [&[experts, out, input.div_ceil(BLOCK)], last].concat();
        if stored.dtype == Dtype::U8 && stored.shape == shape {
            return Ok(stored.bytes);
        }
        Err(format!(
            "is in MXFP4 with {name} of type {:?} and shape {:?}, expected U8 and {shape:?}",
            stored.dtype, stored.shape
        ))
    };
    if !input.is_multiple_of(BLOCK) {
        return Err(format!("is in MXFP4 with {input} inputs, which is not a multiple of {BLOCK}"));
    }
    let (codes, scales) = (part(BLOCKS, &[BYTES])?, part(SCALES, &[])?);
    if scales.contains(&NAN) {
        return Err("is in MXFP4 with a scale that is not a number".into());
    }
    let mut values = Vec::with_capacity(experts * out * input);
    for (codes, &scale) in codes.chunks_exact(BYTES).zip(scales) {
        let scale = power_of_two(scale);
        for byte in codes {
            values.extend([byte & 15, byte >> 4].map(|code| E2M1[usize::from(code)] * scale));
        }
    }
    Ok(values)
}

/// `2^(scale − 127)`.
fn power_of_two(scale: u8) -> f32 {
    match scale {
        // below the normal numbers
        0 => f32::from_bits(1 << 22),
        scale => f32::from_bits(u32::from(scale) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts<'a>(codes: &'a [u8], scales: &'a [u8], shape: &'a [usize]) -> impl Fn(&str) -> Option<RawTensor<'a>> {
        move |name| {
            let (bytes, shape) = match name {
                "w_blocks" => (codes, shape),
                "w_scales" if !scales.is_empty() => (scales, &shape[..3]),
                _ => return None,
            };
            Some(RawTensor { dtype: Dtype::U8, shape, bytes })
        }
    }

    #[test]
    fn a_number_is_its_code_times_a_power_of_two_the_lower_half_of_a_byte_first() {
        let mut codes = [0_u8; 32];
        codes[0] = 0x71;
        codes[1] = 0x9f;
        codes[16] = 0x02;
        let values = read("w", [1, 2, 32], parts(&codes, &[128, 0], &[1, 2, 1, 16])).unwrap();
        assert_eq!(values.len(), 64);
        assert_eq!(values[..4], [1.0, 12.0, -12.0, -1.0]);
        assert_eq!(values[32].to_bits(), 2_f32.powi(-127).to_bits());
        assert!(values[33..].iter().all(|&x| x == 0.0));
    }

    #[test]
    fn what_is_missing_misshapen_or_no_number_is_named() {
        let codes = [0_u8; 16];
        let wrong = |scales: &[u8], shape: &[usize], size: [usize; 3]| {
            read("w", size, parts(&codes, scales, shape)).unwrap_err()
        };
        let fits = [1, 1, 1, 16];
        for (message, part) in [
            (wrong(&[], &fits, [1, 1, 32]), "without its w_scales"),
            (wrong(&[127], &[1, 1, 2, 8], [1, 1, 32]), "w_blocks of type U8 and shape [1, 1, 2, 8]"),
            (wrong(&[255], &fits, [1, 1, 32]), "not a number"),
            (wrong(&[127], &fits, [1, 1, 16]), "16 inputs"),
        ] {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    }
}
