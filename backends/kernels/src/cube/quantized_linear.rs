//! Frozen matrices in few bits ([`firebrick_device::quantized`]): products of few rows with them (`fused`), and
//! matrices that are widened as a whole, where a unit has the numbers of one word of codes.
//!
//! Widened numbers are those of the host to the bit. So no multiplication may be joined with an addition or done in
//! another order: the first product passes through integers, and an argument that no compiler knows, before anything
//! else is done with it.

mod fused;

use super::packed::codes::code;
use super::prelude::*;
use crate::choice::MAX_FUSED_ROWS;
use firebrick_spec::quantized::{NF4_BLOCK, NF4_GROUP};
use firebrick_spec::{BaseFormat, QuantizedLayout};
use fused::{BYTES, NIBBLES, RECIPROCAL, nibble};

/// Offsets of the parts of a buffer, in words. `int8` has scales of rows behind its codes, and nothing else.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Parts {
    pub scales: usize,
    pub groups: usize,
    pub offset: usize,
    pub scale_map: usize,
    pub code_map: usize,
}

fn parts(layout: QuantizedLayout) -> PartsLaunch {
    let scales = layout.code_words();
    match layout.format {
        BaseFormat::Int8 => PartsLaunch::new(scales, 0, 0, 0, 0),
        BaseFormat::Nf4 => PartsLaunch::new(
            scales,
            layout.groups_at(),
            layout.offset_at(),
            layout.scale_map_at(),
            layout.code_map_at(),
        ),
    }
}

/// Numbers of a word.
fn numbers_of(format: BaseFormat) -> usize {
    match format {
        BaseFormat::Int8 => BYTES,
        BaseFormat::Nf4 => NIBBLES,
    }
}

/// Returns true if a matrix is widened as it is multiplied with these rows: few, without autodiff, and where rows of
/// the matrix begin with a word.
pub(crate) fn takes(x: &Tensor<2>, layout: QuantizedLayout) -> bool {
    let [rows, inner] = x.dims();
    let fits = inner.is_multiple_of(numbers_of(layout.format)) && layout.matrices == 1;
    (1..=MAX_FUSED_ROWS).contains(&rows) && fits && plain(Operation::Quantised, &[x])
}

/// See [`crate::operations`]: the product of few rows with a matrix that is widened as it is multiplied.
pub(crate) fn quantized_matmul(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
    let ([rows, inner], numbers) = (x.dims(), numbers_of(layout.format));
    let _span = span("product", 2.0 * (rows * inner * layout.rows) as f64);
    let [x, words] = [x, words].map(|t| detached(t.clone()));
    let out = empty(&x, [rows, layout.rows], x.dtype);
    let most = rows.next_power_of_two().min(fused::most_rows(numbers));
    let tiles = rows.div_ceil(most);
    let panels = layout.rows.div_ceil(fused::OUTPUTS);
    launch!(
        fused::multiply,
        Grid::cubes([&x, &words, &out], tiles * panels),
        fused::VECTOR,
        [&x, &words, &out],
        rows,
        inner / numbers,
        layout.rows,
        tiles,
        parts(layout),
        numbers,
        most,
        elem(&out),
    );
    Cube::tensor(out)
}

/// See [`crate::dequantize`].
pub(crate) fn dequantize(words: &Tensor<2>, layout: QuantizedLayout, dtype: DType) -> Tensor<2> {
    let _span = span("widening", 0.0);
    let words = detached(words.clone());
    let out = empty(&words, [layout.rows, layout.cols], dtype);
    let grid = Grid::elements([&out, &words], layout.code_words());
    let (numbers, code_words, dtype) = (layout.numbers(), layout.code_words(), elem(&out));
    match layout.format {
        BaseFormat::Int8 => launch!(int8, grid, [words, &out], numbers, layout.cols, code_words, 0, dtype),
        BaseFormat::Nf4 => launch!(nf4, grid, [words, &out], numbers, parts(layout), 0, dtype),
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
fn nf4<F: Float>(words: &[i32], out: &mut [F], numbers: usize, parts: Parts, zero: u32, #[define(F)] _dtype: ElemType) {
    let word = ABSOLUTE_POS;
    if word < parts.scales {
        let packed = u32::reinterpret(words[word]);
        // the numbers of a word are of one block
        let block = word * NIBBLES / NF4_BLOCK;
        let scales = u32::reinterpret(words[parts.scales + block / BYTES]);
        let scale = (scales >> ((block % BYTES) as u32 * 8)) & 255u32;
        let entry = f32::reinterpret(words[parts.scale_map + scale as usize]);
        let scaled = entry * f32::reinterpret(words[parts.groups + block / NF4_GROUP]);
        let scaled = f32::reinterpret(u32::reinterpret(scaled) ^ zero);
        let absmax = scaled + f32::reinterpret(words[parts.offset]);
        #[unroll]
        for j in 0..NIBBLES {
            let at = word * NIBBLES + j;
            if at < numbers {
                let value = f32::reinterpret(words[parts.code_map + nibble(packed, j)]);
                out[at] = F::cast_from(value * absmax);
            }
        }
    }
}
