//! The same quantisation on any device: by kernels, or by tensor operations where none is used.

use super::{BLOCK, Codebook, HostBlock8, SMALLEST};
use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Tensor, TensorData};
use firebrick_backends::kernels::{self, QuantizationMap, QuantizedBlocks};
use firebrick_core::Result;
use firebrick_core::error::device_error;

/// Elements that are worked on at a time: what bounds temporaries, about ten times 4 bytes each.
const SLICE: usize = 1 << 20;

/// Codes in one integer: WGSL has none of 8 bits.
const PACKED: usize = 4;

/// A quantised matrix on a device.
///
/// Codes lie in i32, the first in the lowest bits, so that their bytes in memory are those of a [`HostBlock8`]; the
/// last block is padded with zeros. On a GPU a code may differ from the host's where a value is halfway between two.
#[derive(Clone, Debug)]
pub struct DeviceBlock8 {
    codes: Tensor<1, Int>,
    scales: Tensor<1>,
    shape: [usize; 2],
    signed: bool,
    dtype: DType,
}

impl DeviceBlock8 {
    /// Quantises a matrix. Signed ones are first moments; second moments are never negative. The matrix is `[rows,
    /// columns]`.
    #[must_use]
    pub fn quantise(values: Tensor<2>, signed: bool) -> Self {
        let (shape, dtype) = (values.dims(), values.dtype());
        let n = shape[0] * shape[1];
        let book = Codebook::of(signed);
        let midpoints = table(&book.midpoints, &values.device());
        let map = QuantizationMap { midpoints: &midpoints, smallest: SMALLEST };
        if let Some(QuantizedBlocks { codes, scales }) = kernels::quantize_blockwise(&values, &map) {
            return Self { codes, scales, shape, signed, dtype };
        }
        let values = values.reshape([n]);
        let (codes, scales) = (0..n)
            .step_by(SLICE)
            .map(|start| {
                let part = values.clone().slice(start..n.min(start + SLICE));
                quantise(part.cast(FloatDType::F32), &midpoints, book.midpoints[127])
            })
            .unzip();
        Self { codes: Tensor::cat(codes, 0), scales: Tensor::cat(scales, 0), shape, signed, dtype }
    }

    /// The matrix, in the float type of the one that was quantised. It is `[rows, columns]`.
    #[must_use]
    pub fn dequantise(&self) -> Tensor<2> {
        let device = self.scales.device();
        let values = table(&Codebook::of(self.signed).values, &device);
        let blocks = QuantizedBlocks { codes: self.codes.clone(), scales: self.scales.clone() };
        if let Some(whole) = kernels::dequantize_blockwise(&blocks, &values, self.shape, self.dtype) {
            return whole;
        }
        let n = self.shape[0] * self.shape[1];
        // slices are written into their place: joining them would hold everything twice
        let mut all = Tensor::<1>::empty([n], (&device, self.dtype));
        for start in (0..n).step_by(SLICE) {
            let end = n.min(start + SLICE);
            let blocks = start / BLOCK..end.div_ceil(BLOCK);
            let words = blocks.start * BLOCK / PACKED..blocks.end * BLOCK / PACKED;
            let part = dequantise(self.codes.clone().slice(words), self.scales.clone().slice(blocks), values.clone());
            let part = part.slice(0..end - start).cast(self.dtype);
            all = all.slice_assign(start..end, part);
        }
        all.reshape(self.shape)
    }

    /// Rows and columns.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        self.shape
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        4 * (self.codes.dims()[0] + self.scales.dims()[0])
    }

    /// Copies codes and scales to the host. Waits for them to be computed.
    ///
    /// # Errors
    /// `Error::Model` where the device fails.
    pub fn download(&self) -> Result<HostBlock8> {
        let failed = |e| device_error("reading 8-bit moments", &e);
        let words: Vec<i32> = self.codes.clone().try_into_vec_as().map_err(failed)?;
        let scales = self.scales.clone().try_into_vec_as().map_err(failed)?;
        let mut codes: Vec<u8> = words.into_iter().flat_map(i32::to_le_bytes).collect();
        codes.truncate(self.shape[0] * self.shape[1]);
        Ok(HostBlock8 { codes, scales, signed: self.signed })
    }

    /// Copies codes and scales of a matrix of this shape to a device, where it is dequantised as f32.
    #[must_use]
    pub fn upload(host: &HostBlock8, shape: [usize; 2], device: &Device) -> Self {
        assert_eq!(host.len(), shape[0] * shape[1], "as many codes as elements");
        let words = host.scales.len() * BLOCK / PACKED;
        let mut bytes = host.codes.clone();
        bytes.resize(words * PACKED, Codebook::of(host.signed).zero);
        let (quadruples, _) = bytes.as_chunks::<PACKED>();
        let codes: Vec<i32> = quadruples.iter().map(|&q| i32::from_le_bytes(q)).collect();
        Self {
            codes: Tensor::from_data(TensorData::new(codes, [words]), (device, DType::I32)),
            scales: table(&host.scales, device),
            shape,
            signed: host.signed,
            dtype: DType::F32,
        }
    }
}

fn table(values: &[f32], device: &Device) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data, (device, DType::F32))
}

/// Packed codes and scales of whole blocks.
fn quantise(values: Tensor<1>, midpoints: &Tensor<1>, middle: f32) -> (Tensor<1, Int>, Tensor<1>) {
    let [n] = values.dims();
    let blocks = n.div_ceil(BLOCK);
    let values = if blocks * BLOCK == n {
        values
    } else {
        let padding = Tensor::zeros([blocks * BLOCK - n], (&values.device(), DType::F32));
        Tensor::cat(vec![values, padding], 0)
    };
    let values = values.reshape([blocks, BLOCK]);
    let scales = block_scales(&values);
    let divisors = scales.clone().mask_fill(scales.clone().equal_elem(0.0), 1.0);
    let scaled = (values / divisors).reshape([blocks * BLOCK]);
    (pack(nearest(&scaled, midpoints, middle)), scales.reshape([blocks]))
}

/// Of each row the value of largest magnitude, 0 where that is too small, NaN where a value is not finite: `[blocks,
/// 1]`.
fn block_scales(values: &Tensor<2>) -> Tensor<2> {
    let highest = values.clone().max_dim(1);
    let lowest = values.clone().min_dim(1);
    let negative = highest.clone().lower(-lowest.clone());
    let scales = highest.mask_where(negative, lowest);
    let small = scales.clone().abs().lower_elem(SMALLEST);
    let not_finite = (values.clone() * 0.0).sum_dim(1);
    scales.mask_fill(small, 0.0) + not_finite
}

/// How many midpoints are below each number, by binary search.
fn nearest(x: &Tensor<1>, midpoints: &Tensor<1>, middle: f32) -> Tensor<1, Int> {
    let mut code = x.clone().greater_elem(middle).int().cast(IntDType::I32) * 128;
    for step in [64, 32, 16, 8, 4, 2, 1] {
        let probes = midpoints.clone().select(0, code.clone() + (step - 1));
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

fn dequantise(words: Tensor<1, Int>, scales: Tensor<1>, values: Tensor<1>) -> Tensor<1> {
    let ([n], [blocks]) = (words.dims(), scales.dims());
    let words = words.reshape([n, 1]);
    // the shift keeps the sign; the mask drops what it fills in
    let bytes =
        (0..PACKED).map(|i| words.clone().bitwise_right_shift_scalar(8 * i as i32).bitwise_and_scalar(255)).collect();
    let codes = Tensor::cat(bytes, 1).reshape([n * PACKED]);
    let values = values.select(0, codes).reshape([blocks, BLOCK]);
    (values * scales.reshape([blocks, 1])).reshape([blocks * BLOCK])
}
