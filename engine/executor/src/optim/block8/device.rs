//! Quantization to 8-bit blocks on any device.

use super::{BLOCK, Codebook, HostBlock8, SMALLEST};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, QuantizationMap, QuantizedBlocks};
use firebrick_core::Result;
use firebrick_core::error::device_error;

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
    pub fn quantise(values: &Tensor<2>, signed: bool) -> Self {
        let (shape, dtype) = (values.dims(), values.dtype());
        let book = Codebook::get(signed);
        let midpoints = table(&book.midpoints, &values.device());
        let map = QuantizationMap { midpoints: &midpoints, middle: book.midpoints[127], smallest: SMALLEST };
        let QuantizedBlocks { codes, scales } = kernels::quantize_blockwise(values, &map);
        Self { codes, scales, shape, signed, dtype }
    }

    /// The matrix, in the float type of the one that was quantised. It is `[rows, columns]`.
    pub fn dequantise(&self) -> Tensor<2> {
        let values = table(&Codebook::get(self.signed).values, &self.scales.device());
        let blocks = QuantizedBlocks { codes: self.codes.clone(), scales: self.scales.clone() };
        kernels::dequantize_blockwise(&blocks, &values, self.shape, self.dtype)
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        self.shape
    }

    /// Bytes held.
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
    pub fn upload(host: &HostBlock8, shape: [usize; 2], device: &Device) -> Self {
        assert_eq!(host.len(), shape[0] * shape[1], "as many codes as elements");
        let words = host.scales.len() * BLOCK / PACKED;
        let mut bytes = host.codes.clone();
        bytes.resize(words * PACKED, Codebook::get(host.signed).zero);
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
