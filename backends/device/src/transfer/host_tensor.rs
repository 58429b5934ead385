//! Matrices in host memory, and arithmetic on them.

use super::copy_streams::CopyStreams;
use crate::precision::dense;
use crate::trace::span;
use crate::{Precision, PrecisionExt};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_std::{AllocationProperty, Bytes};
use rayon::prelude::*;
use std::ops::Range;

/// Elements of a task in host arithmetic.
const GRAIN: usize = 1 << 15;

/// A matrix in host memory, in the float type that it had on its device: f32, f16 or bf16 for weights in half
/// precision, or f64 in exactness tests.
#[derive(Clone, Debug)]
pub struct HostTensor {
    data: TensorData,
    /// True if its clones share its memory, which is then not to be written to.
    shared: bool,
    /// True if its elements are bits of something else, to be copied as they are.
    verbatim: bool,
}

impl HostTensor {
    /// A matrix as Burn holds it.
    pub fn from_data(data: TensorData) -> Self {
        Self { data, shared: false, verbatim: false }
    }

    /// The values as Burn holds them.
    pub fn into_data(self) -> TensorData {
        self.data
    }

    /// f32 values in row-major order.
    pub fn from_values(values: Vec<f32>, shape: [usize; 2]) -> Self {
        Self::from_data(TensorData::new(values, shape))
    }

    /// Rows of 32-bit words, as floats with these bits: no device converts them to a float type of its own.
    pub fn verbatim(words: Vec<f32>, rows: usize) -> Self {
        let columns = words.len() / rows;
        Self::from_values(words, [rows, columns]).into_verbatim()
    }

    /// These elements, taken for words as in [`Self::verbatim`]. They must be in f32.
    #[must_use]
    pub fn into_verbatim(mut self) -> Self {
        debug_assert_eq!(self.data.dtype(), DType::F32);
        self.verbatim = true;
        self
    }

    /// The words of [`Self::verbatim`].
    pub fn words(&self) -> &[f32] {
        match self.data.as_slice::<f32>() {
            Ok(words) => words,
            Err(e) => unreachable!("words are floats of 32 bits: {e:?}"),
        }
    }

    /// The values' bytes in the type that they have, in row-major order.
    pub fn as_bytes(&self) -> &[u8] {
        self.data.as_bytes()
    }

    /// A matrix from the bytes of its values, which are of a float type.
    pub fn from_bytes(bytes: Vec<u8>, shape: [usize; 2], dtype: DType) -> Self {
        Self::from_data(TensorData::from_bytes_vec(bytes, shape, dtype))
    }

    /// A copy of some of the values, counted in row-major order, as a matrix of its own.
    #[must_use]
    pub fn part(&self, values: Range<usize>, shape: [usize; 2]) -> Self {
        let dtype = self.data.dtype();
        let bytes = values.start * dtype.size()..values.end * dtype.size();
        Self::from_bytes(self.data.as_bytes()[bytes].to_vec(), shape, dtype)
    }

    /// A copy of some of its columns.
    #[must_use]
    pub fn columns(&self, columns: Range<usize>) -> Self {
        let ([rows, width], dtype) = (self.dims(), self.data.dtype());
        let size = dtype.size();
        let bytes = self.data.as_bytes().chunks_exact((width * size).max(1));
        let part = columns.start * size..columns.end * size;
        let kept: Vec<u8> = bytes.flat_map(|row| &row[part.clone()]).copied().collect();
        Self::from_bytes(kept, [rows, columns.len()], dtype)
    }

    /// Zeros of the same type.
    #[must_use]
    pub fn zeros(&self, shape: [usize; 2]) -> Self {
        Self::from_data(TensorData::zeros_dtype(shape, self.data.dtype()))
    }

    /// The matrix on a device; the host keeps its copy. It is `[rows, columns]`.
    pub fn upload(&self, device: &Device) -> Tensor<2> {
        self.clone().into_device(device)
    }

    /// The matrix on a device; consumes the host's copy. It is `[rows, columns]`.
    pub fn into_device(self, device: &Device) -> Tensor<2> {
        let _span = span("copy to device", 0.0);
        match self.data.dtype() {
            words if self.verbatim => dense(self.data, (device, words)),
            // without a type Burn would convert it to the device's default
            half @ (DType::BF16 | DType::F16) => dense(self.data, (device, half)),
            _ => dense(self.data, device),
        }
    }

    /// The values in f32 where they are in half precision, else as they are.
    #[must_use]
    pub fn widened(self) -> Self {
        match self.data.dtype() {
            DType::BF16 | DType::F16 => Self::from_data(self.data.convert_dtype(DType::F32)),
            _ => self,
        }
    }

    /// A copy in a precision.
    #[must_use]
    pub fn rounded(&self, precision: Precision) -> Self {
        match precision {
            Precision::F32 => self.clone(),
            Precision::Bf16 => Self::from_data(self.data.clone().convert_dtype(DType::BF16)),
            Precision::F16 => Self::from_data(self.data.clone().convert_dtype(DType::F16)),
        }
    }

    /// The precision that the values are stored in.
    pub fn precision(&self) -> Precision {
        Precision::of(self.data.dtype())
    }

    /// Moves the values to pinned memory, where the device copies from that itself (CUDA). Clones share it from then
    /// on, so that no upload copies bytes on the host; whoever changes values then gets memory of its own. Elsewhere
    /// this does nothing: wgpu's staging buffers serve one upload.
    pub fn pin(&mut self, device: &Device) {
        if self.shared || CopyStreams::new(device).is_none() {
            return;
        }
        device.staging(std::iter::once(&mut self.data));
        if self.is_pinned() {
            self.remake(Bytes::shared);
            self.shared = true;
        }
    }

    /// Returns true if the values lie in pinned memory.
    pub fn is_pinned(&self) -> bool {
        self.data.bytes().property() == AllocationProperty::Pinned
    }

    /// Returns true if a clone costs nothing: it shares the values' memory.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// These values in other memory.
    fn remake(&mut self, with: impl FnOnce(Bytes) -> Bytes) {
        let empty = TensorData::new(Vec::<f32>::new(), [0, 0]);
        let (bytes, shape, dtype) = std::mem::replace(&mut self.data, empty).into_parts();
        self.data = TensorData::from_bytes(with(bytes), shape, dtype);
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        let dims = self.data.shape().as_slice();
        [dims[0], dims[1]]
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.data.as_bytes().len()
    }

    /// The values, mutable. They must not be in half precision: see [`HostTensor::widened`].
    pub fn values(&mut self) -> HostValues<'_> {
        if self.shared {
            self.remake(|bytes| Bytes::from_bytes_vec(bytes.to_vec()));
            self.shared = false;
        }
        // one of the two always succeeds: values are f32 or f64
        if self.data.as_slice::<f64>().is_ok() {
            return match self.data.as_mut_slice::<f64>() {
                Ok(values) => HostValues::F64(values),
                Err(_) => unreachable!("just read as f64"),
            };
        }
        match self.data.as_mut_slice::<f32>() {
            Ok(values) => HostValues::F32(values),
            Err(e) => unreachable!("a host tensor is f32 or f64: {e:?}"),
        }
    }

    /// Values as f64, for reading.
    pub fn to_f64(&self) -> Vec<f64> {
        self.data.iter::<f64>().collect()
    }

    /// Values as f32, for reading.
    pub fn to_f32(&self) -> Vec<f32> {
        self.data.iter::<f32>().collect()
    }

    /// The values of some rows as f32, for reading.
    pub fn rows_to_f32(&self, rows: Range<usize>) -> Vec<f32> {
        let [_, columns] = self.dims();
        let width = columns * self.data.dtype().size();
        let bytes = self.data.as_bytes()[rows.start * width..rows.end * width].to_vec();
        let some = TensorData::from_bytes_vec(bytes, [rows.len(), columns], self.data.dtype());
        some.iter::<f32>().collect()
    }

    /// Adds another matrix of the same shape, in parallel.
    pub fn add(&mut self, mut other: Self) {
        match (self.values(), other.values()) {
            (HostValues::F32(a), HostValues::F32(b)) => add(a, b),
            (HostValues::F64(a), HostValues::F64(b)) => add(a, b),
            _ => unreachable!("gradients of one parameter have one type"),
        }
    }

    /// Adds row `i` of `rows` to row `at[i]` of this matrix.
    pub fn add_rows(&mut self, at: &[usize], mut rows: Self) {
        let columns = self.dims()[1];
        match (self.values(), rows.values()) {
            (HostValues::F32(a), HostValues::F32(b)) => add_rows(a, columns, at, b),
            (HostValues::F64(a), HostValues::F64(b)) => add_rows(a, columns, at, b),
            _ => unreachable!("gradients of one parameter have one type"),
        }
    }

    /// Sum of squares, accumulated in f64 in a fixed order.
    pub fn sum_of_squares(&self) -> f64 {
        fn sum<T: Copy + Into<f64> + Sync>(values: &[T]) -> f64 {
            let parts: Vec<f64> =
                values.par_chunks(GRAIN).map(|c| c.iter().map(|&v| v.into() * v.into()).sum()).collect();
            parts.iter().sum()
        }
        match (self.data.as_slice::<f32>(), self.data.as_slice::<f64>()) {
            (Ok(values), _) => sum(values),
            (_, Ok(values)) => sum(values),
            _ => unreachable!("a host tensor is f32 or f64"),
        }
    }
}

/// Values of a [`HostTensor`] in row-major order.
#[derive(Debug)]
pub enum HostValues<'a> {
    /// f32.
    F32(&'a mut [f32]),
    /// f64, in exactness tests.
    F64(&'a mut [f64]),
}

fn add<T: Copy + std::ops::AddAssign + Send + Sync>(a: &mut [T], b: &[T]) {
    a.par_chunks_mut(GRAIN).zip(b.par_chunks(GRAIN)).for_each(|(a, b)| {
        for (a, b) in a.iter_mut().zip(b) {
            *a += *b;
        }
    });
}

fn add_rows<T: Copy + std::ops::AddAssign>(a: &mut [T], columns: usize, at: &[usize], b: &[T]) {
    for (&row, values) in at.iter().zip(b.chunks_exact(columns)) {
        let part = &mut a[row * columns..(row + 1) * columns];
        for (a, b) in part.iter_mut().zip(values) {
            *a += *b;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(values: &[f32], shape: [usize; 2]) -> HostTensor {
        HostTensor::from_values(values.to_vec(), shape)
    }

    #[test]
    fn columns_are_cut_out_of_every_row() {
        let table = matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3]);
        let some = table.columns(1..3);
        assert_eq!((some.dims(), some.to_f32()), ([2, 2], vec![2.0, 3.0, 5.0, 6.0]));
        let half = table.rounded(Precision::Bf16);
        assert_eq!(half.columns(0..1).to_f32(), [1.0, 4.0]);
    }

    #[test]
    fn rows_are_added_where_they_belong_also_twice() {
        let mut table = matrix(&[0.0; 6], [3, 2]);
        table.add_rows(&[2, 0, 2], matrix(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2]));
        assert_eq!(table.to_f32(), [3.0, 4.0, 0.0, 0.0, 6.0, 8.0]);
        assert!((table.sum_of_squares() - 125.0).abs() < 1e-12);
    }
}
