//! Frozen matrices in few bits ([`firebrick_device::quantized`]): products of few rows with them (`fused`), and matrices that are
//! widened as a whole, where a unit has the numbers of one word of codes.
//!
//! Widened numbers are those of the host to the bit. So no multiplication may be joined with an addition or done in
//! another order: the first product passes through integers, and an argument that no compiler knows, before anything
//! else is done with it.

mod fused;

use super::launch::{UNITS, address, cubes, detached, elem, elementwise, empty, enabled_on, supports};
use super::packed::codes::code;
use crate::autodiff::KernelBackend;
use crate::choice::{FEW_ROWS, Operation};
use crate::quantized_linear::through_the_host;
use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use cubecl::prelude::*;
use firebrick_device::trace::span;
use firebrick_spec::quantized::{NF4_BLOCK, NF4_GROUP};
use firebrick_spec::{BaseFormat, QuantizedLayout};
use fused::{BYTES, NIBBLES, RECIPROCAL};

/// The product of few rows with a matrix, widened as it is multiplied: `[rows, outputs]`. `None` for many rows, under
/// autodiff, and where a row of the matrix does not begin with a word.
pub(super) fn fused(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Option<Tensor<2>> {
    let numbers = match layout.format {
        BaseFormat::Int8 => BYTES,
        BaseFormat::Nf4 => NIBBLES,
    };
    let [rows, inner] = x.dims();
    let few = (1..=FEW_ROWS).contains(&rows);
    let fits = few && inner.is_multiple_of(numbers) && layout.matrices == 1;
    if !fits || x.device().is_autodiff() || !supports(Operation::Quantised, x) {
        return None;
    }
    let _span = span("product", 2.0 * (rows * inner * layout.rows) as f64);
    let [x, words] = [x, words].map(|t| detached(t.clone()));
    let out = empty(&x, [rows, layout.rows], x.dtype);
    let most = rows.next_power_of_two().min(fused::most_rows(numbers));
    let tiles = rows.div_ceil(most);
    let panels = layout.rows.div_ceil(fused::OUTPUTS);
    // int8 has a scale a row behind its codes, and nothing else
    let [groups_at, offset_at, scale_map_at, code_map_at] = match layout.format {
        BaseFormat::Int8 => [0; 4],
        BaseFormat::Nf4 => [layout.groups_at(), layout.offset_at(), layout.scale_map_at(), layout.code_map_at()],
    };
    fused::multiply::launch(
        &out.client,
        cubes(&out, tiles * panels),
        CubeDim::new_1d(UNITS as u32),
        address([&x, &words, &out]),
        fused::VECTOR,
        x.into_buffer_arg(),
        words.into_buffer_arg(),
        out.clone().into_buffer_arg(),
        rows,
        inner / numbers,
        layout.rows,
        tiles,
        layout.code_words(),
        groups_at,
        offset_at,
        scale_map_at,
        code_map_at,
        numbers,
        most,
        elem(&out),
    );
    Some(Cube::tensor(out))
}

/// See [`crate::dequantize`]. The host widens where kernels are off.
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
