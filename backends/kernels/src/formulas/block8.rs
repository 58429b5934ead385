//! Block-wise 8-bit quantization (arXiv:2110.02861) in tensor operations, a slice of the matrix at a time.

use crate::shapes::{QuantizationMap, QuantizedBlocks};
use burn::tensor::{DType, FloatDType, Int, IntDType, Tensor};

/// Elements of a block.
const BLOCK: usize = 256;

/// Elements that are worked on at a time: what bounds temporaries, about ten times 4 bytes each.
const SLICE: usize = 1 << 20;

/// Codes in one integer: WGSL has none of 8 bits.
const PACKED: usize = 4;

/// See [`crate::quantize_blockwise`].
pub(crate) fn quantize(values: &Tensor<2>, map: &QuantizationMap<'_>) -> QuantizedBlocks {
    let [rows, columns] = values.dims();
    let n = rows * columns;
    let values = values.clone().reshape([n]);
    let (codes, scales) = (0..n)
        .step_by(SLICE)
        .map(|start| {
            let part = values.clone().slice(start..n.min(start + SLICE));
            quantize_slice(part.cast(FloatDType::F32), map)
        })
        .unzip();
    QuantizedBlocks { codes: Tensor::cat(codes, 0), scales: Tensor::cat(scales, 0) }
}

/// See [`crate::dequantize_blockwise`].
pub(crate) fn dequantize(blocks: &QuantizedBlocks, entries: &Tensor<1>, shape: [usize; 2], dtype: DType) -> Tensor<2> {
    let QuantizedBlocks { codes, scales } = blocks;
    let n = shape[0] * shape[1];
    // slices are written into their place: joining them would hold everything twice
    let mut whole = Tensor::<1>::empty([n], (&scales.device(), dtype));
    for start in (0..n).step_by(SLICE) {
        let end = n.min(start + SLICE);
        let blocks = start / BLOCK..end.div_ceil(BLOCK);
        let words = blocks.start * BLOCK / PACKED..blocks.end * BLOCK / PACKED;
        let part = dequantize_slice(codes.clone().slice(words), scales.clone().slice(blocks), entries.clone());
        let part = part.slice(0..end - start).cast(dtype);
        whole = whole.slice_assign(start..end, part);
    }
    whole.reshape(shape)
}

/// Packed codes and scales of whole blocks.
fn quantize_slice(values: Tensor<1>, map: &QuantizationMap<'_>) -> (Tensor<1, Int>, Tensor<1>) {
    let [n] = values.dims();
    let blocks = n.div_ceil(BLOCK);
    let values = if blocks * BLOCK == n {
        values
    } else {
        let padding = Tensor::zeros([blocks * BLOCK - n], (&values.device(), DType::F32));
        Tensor::cat(vec![values, padding], 0)
    };
    let values = values.reshape([blocks, BLOCK]);
    let scales = block_scales(&values, map.smallest);
    let divisors = scales.clone().mask_fill(scales.clone().equal_elem(0.0), 1.0);
    let scaled = (values / divisors).reshape([blocks * BLOCK]);
    (pack(nearest(&scaled, map)), scales.reshape([blocks]))
}

/// Of each row the value of largest magnitude, 0 where that is too small, NaN where a value is not finite: `[blocks,
/// 1]`.
fn block_scales(values: &Tensor<2>, smallest: f32) -> Tensor<2> {
    let highest = values.clone().max_dim(1);
    let lowest = values.clone().min_dim(1);
    let negative = highest.clone().lower(-lowest.clone());
    let scales = highest.mask_where(negative, lowest);
    let small = scales.clone().abs().lower_elem(smallest);
    let not_finite = (values.clone() * 0.0).sum_dim(1);
    scales.mask_fill(small, 0.0) + not_finite
}

/// Number of midpoints below each value, by binary search.
fn nearest(x: &Tensor<1>, map: &QuantizationMap<'_>) -> Tensor<1, Int> {
    let mut code = x.clone().greater_elem(map.middle).int().cast(IntDType::I32) * 128;
    for step in [64, 32, 16, 8, 4, 2, 1] {
        let probes = map.midpoints.clone().select(0, code.clone() + (step - 1));
        code = code + x.clone().greater(probes).int().cast(IntDType::I32) * step;
    }
    code
}

fn pack(codes: Tensor<1, Int>) -> Tensor<1, Int> {
    let words = codes.dims()[0] / PACKED;
    let codes = codes.reshape([words, PACKED]);
    let byte = |i: usize| {
        let byte = codes.clone().slice([0..words, i..i + 1]);
        byte.bitwise_left_shift_scalar(8 * i as i32)
    };
    (1..PACKED).fold(byte(0), |word, i| word.bitwise_or(byte(i))).reshape([words])
}

fn dequantize_slice(words: Tensor<1, Int>, scales: Tensor<1>, values: Tensor<1>) -> Tensor<1> {
    let ([n], [blocks]) = (words.dims(), scales.dims());
    let words = words.reshape([n, 1]);
    // the shift keeps the sign; the mask drops what it fills in
    let bytes =
        (0..PACKED).map(|i| words.clone().bitwise_right_shift_scalar(8 * i as i32).bitwise_and_scalar(255)).collect();
    let codes = Tensor::cat(bytes, 1).reshape([n * PACKED]);
    let values = values.select(0, codes).reshape([blocks, BLOCK]);
    (values * scales.reshape([blocks, 1])).reshape([blocks * BLOCK])
}
