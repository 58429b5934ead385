//! Frozen matrices in few bits ([`crate::quantized`]), widened: a unit has the numbers of one word of codes.
//!
//! The numbers are those of the host to the bit. So no multiplication may be joined with an addition or done in another order: the first
//! product passes through integers, and an argument that no compiler knows, before anything else is done with it.

use super::launch::{address, detached, elem, elementwise, empty, enabled_on};
use super::packed::codes::code;
use crate::kernels::autodiff::KernelBackend;
use crate::kernels::quantized_linear::through_the_host;
use crate::trace::span;
use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use cubecl::prelude::*;
use firebrick_spec::quantized::{NF4_BLOCK, NF4_GROUP};
use firebrick_spec::{BaseFormat, QuantizedLayout};

/// Numbers of a word of codes.
const BYTES: usize = 4;
const NIBBLES: usize = 8;

/// bitsandbytes multiplies by this and does not divide by 127.
const RECIPROCAL: f64 = 7.874_016e-3;

/// See [`crate::kernels::dequantize`]. The host widens where kernels are off.
pub(super) fn dequantize(words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
    if !enabled_on(&words.device()) {
        return through_the_host(words, layout, dtype);
    }
    let _span = span("widening", 0.0);
    let words = detached(words.clone());
    let out = empty(&words, [layout.rows, layout.cols], dtype);
    let (count, dim) = elementwise(&out, layout.code_words());
    let address = address([&out, &words]);
    match layout.format {
        BaseFormat::Int8 => int8::launch(
            &out.client,
            count,
            dim,
            address,
            words.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            layout.numbers(),
            layout.cols,
            layout.code_words(),
            0,
            elem(&out),
        ),
        BaseFormat::Nf4 => nf4::launch(
            &out.client,
            count,
            dim,
            address,
            words.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            layout.numbers(),
            layout.code_words(),
            layout.groups_at(),
            layout.offset_at(),
            layout.scale_map_at(),
            layout.code_map_at(),
            0,
            elem(&out),
        ),
    }
    Cube::tensor(out)
}

#[cube(launch, address_type = "dynamic")]
fn int8<F: Float>(
    words: &[i32],
    out: &mut [F],
    numbers: usize,
    cols: usize,
    code_words: usize,
    zero: u32,
    #[define(F)] _dtype: ElemType,
) {
    let word = ABSOLUTE_POS;
    if word < code_words {
        let packed = words[word];
        #[unroll]
        for j in 0..BYTES {
            let at = word * BYTES + j;
            if at < numbers {
                let absmax = f32::reinterpret(words[code_words + at / cols]);
                let scaled = code(packed, j) * absmax;
                let scaled = f32::reinterpret(u32::reinterpret(scaled) ^ zero);
                out[at] = F::cast_from(scaled * f32::new(RECIPROCAL));
            }
        }
    }
}

#[cube(launch, address_type = "dynamic")]
fn nf4<F: Float>(
    words: &[i32],
    out: &mut [F],
    numbers: usize,
    code_words: usize,
    groups_at: usize,
    offset_at: usize,
    scale_map_at: usize,
    code_map_at: usize,
    zero: u32,
    #[define(F)] _dtype: ElemType,
) {
    let word = ABSOLUTE_POS;
    if word < code_words {
        let packed = u32::reinterpret(words[word]);
        // the numbers of a word are of one block
        let block = word * NIBBLES / NF4_BLOCK;
        let scales = u32::reinterpret(words[code_words + block / BYTES]);
        let scale = (scales >> ((block % BYTES) as u32 * 8)) & 255u32;
        let entry = f32::reinterpret(words[scale_map_at + scale as usize]);
        let scaled = entry * f32::reinterpret(words[groups_at + block / NF4_GROUP]);
        let scaled = f32::reinterpret(u32::reinterpret(scaled) ^ zero);
        let absmax = scaled + f32::reinterpret(words[offset_at]);
        #[unroll]
        for j in 0..NIBBLES {
            let at = word * NIBBLES + j;
            if at < numbers {
                // the first number of a byte is in its upper half
                let shift = comptime!((8 * (j / 2) + 4 * (1 - j % 2)) as u32);
                let nibble = (packed >> shift) & 15u32;
                let value = f32::reinterpret(words[code_map_at + nibble as usize]);
                out[at] = F::cast_from(value * absmax);
            }
        }
    }
}
