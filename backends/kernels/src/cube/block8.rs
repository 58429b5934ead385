//! Block-wise 8-bit quantisation of moments (arXiv:2110.02861): a cube has a block of 256, and reads and writes it
//! once.

use super::prelude::*;
use crate::shapes::{QuantizationMap, QuantizedBlocks};

/// Elements of a block, each of which has a unit.
const BLOCK: usize = UNITS;

/// See [`crate::quantize_blockwise`].
pub(crate) fn quantize_blockwise(values: &Tensor<2>, map: &QuantizationMap<'_>) -> QuantizedBlocks {
    let _span = span("8-bit moments", 0.0);
    let values = detached(values.clone());
    let n = values.shape().num_elements();
    let blocks = n.div_ceil(BLOCK);
    let codes = empty(&values, [blocks * BLOCK / 4], DType::I32);
    let scales = empty(&values, [blocks], DType::F32);
    let (grid, midpoints, dtype) = (Grid::cubes([&values], blocks), detached(map.midpoints.clone()), elem(&values));
    launch!(encode, grid, [values, midpoints, &codes, &scales], n, blocks, map.smallest, f32::NAN, dtype);
    QuantizedBlocks { codes: Tensor::from_primitive::<Cube>(codes), scales: Cube::tensor(scales) }
}

/// See [`crate::dequantize_blockwise`].
pub(crate) fn dequantize_blockwise(
    blocks: &QuantizedBlocks,
    entries: &Tensor<1>,
    shape: [usize; 2],
    dtype: DType,
) -> Tensor<2> {
    let _span = span("8-bit moments", 0.0);
    let scales = detached(blocks.scales.clone());
    let out = empty(&scales, shape, dtype);
    let n = shape[0] * shape[1];
    let entries = detached(entries.clone());
    launch!(decode, Grid::elements([&out], n), [integers(&blocks.codes), scales, entries, &out], n, elem(&out));
    Cube::tensor(out)
}

#[cube(launch, address_type = "dynamic")]
fn encode<F: Float>(
    values: &[F],
    midpoints: &[f32],
    codes: &mut [i32],
    scales: &mut [f32],
    n: usize,
    blocks: usize,
    smallest: f32,
    nan: f32,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(BLOCK);
    let mut bytes = Shared::<[u32]>::new_slice(BLOCK);
    let block = CUBE_POS;
    let i = block * BLOCK + UNIT_POS as usize;
    let mut value = 0.0f32;
    if i < n {
        value = f32::cast_from(values[i]);
    }
    let mut bad = 0.0f32;
    if value.is_nan() || value.is_inf() {
        bad = 1.0f32;
        value = 0.0f32;
    }
    let bad = row_sum(&mut lanes, bad, BLOCK);
    let highest = row_max::<f32>(&mut lanes, value, BLOCK);
    let lowest = -row_max::<f32>(&mut lanes, -value, BLOCK);
    let mut scale = highest;
    if highest < -lowest {
        scale = lowest;
    }
    if scale.abs() < smallest {
        scale = 0.0f32;
    }
    let mut divisor = scale;
    if scale == 0.0 {
        divisor = 1.0f32;
    }
    let x = value / divisor;
    let mut code = 0u32;
    if bad == 0.0 {
        if x > midpoints[127] {
            code = 128u32;
        }
        #[unroll]
        for level in 0..7usize {
            let step = comptime!(64u32 >> level as u32);
            if x > midpoints[(code + step - 1) as usize] {
                code += step;
            }
        }
    }
    bytes[UNIT_POS as usize] = code;
    sync_cube();
    if block < blocks {
        if (UNIT_POS as usize) < comptime!(BLOCK / 4) {
            let at = UNIT_POS as usize * 4;
            let word = bytes[at] | (bytes[at + 1] << 8u32) | (bytes[at + 2] << 16u32) | (bytes[at + 3] << 24u32);
            codes[block * comptime!(BLOCK / 4) + UNIT_POS as usize] = i32::reinterpret(word);
        }
        if UNIT_POS == 0 {
            if bad > 0.0 {
                scale = nan;
            }
            scales[block] = scale;
        }
    }
}

#[cube(launch, address_type = "dynamic")]
fn decode<F: Float>(
    codes: &[i32],
    scales: &[f32],
    entries: &[f32],
    out: &mut [F],
    n: usize,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < n {
        let word = u32::reinterpret(codes[i / 4]);
        let code = (word >> ((i % 4) as u32 * 8)) & 255u32;
        out[i] = F::cast_from(entries[code as usize] * scales[i / BLOCK]);
    }
}
