//! Tensors in collectives: as rows of values on the host, and through host memory where nothing else carries them.

use super::{Element, Flat, Result};
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_device::precision::stored_as;
use firebrick_device::transfer::HostTensor;

/// Errors of operations on tensors: those of the collective, and of copies.
pub(super) type TensorResult = std::result::Result<Tensor<1>, firebrick_device::Error>;

impl Element {
    /// Of a tensor's values.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F64 => Self::F64,
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => Self::F32,
        }
    }
}

impl From<HostTensor> for Flat {
    /// The values in row-major order: f64 as they are, all others in f32.
    fn from(tensor: HostTensor) -> Self {
        let data = tensor.into_data();
        let values = match data.dtype() {
            DType::F64 => data.try_into_vec().map(Self::F64),
            DType::F32 => data.try_into_vec().map(Self::F32),
            _ => data.convert_dtype(DType::F32).try_into_vec().map(Self::F32),
        };
        match values {
            Ok(values) => values,
            Err(e) => unreachable!("values are read in the type that they have: {e:?}"),
        }
    }
}

impl Flat {
    /// The values of a tensor in row-major order, in the type that they have.
    pub fn as_stored(tensor: HostTensor) -> Self {
        let data = tensor.into_data();
        let half = match data.dtype() {
            DType::BF16 => data.try_into_vec().map(Self::Bf16),
            DType::F16 => data.try_into_vec().map(Self::F16),
            _ => return HostTensor::from_data(data).into(),
        };
        match half {
            Ok(values) => values,
            Err(e) => unreachable!("values are read in the type that they have: {e:?}"),
        }
    }

    /// The values as a matrix: f64 as they are, all others in f32.
    pub fn into_host_tensor(self, shape: [usize; 2]) -> HostTensor {
        HostTensor::from_data(match self {
            Self::F64(values) => TensorData::new(values, shape),
            Self::F32(values) => TensorData::new(values, shape),
            Self::Bf16(values) => TensorData::new(values, shape).convert_dtype(DType::F32),
            Self::F16(values) => TensorData::new(values, shape).convert_dtype(DType::F32),
            Self::Bytes(values) => TensorData::new(values, shape).convert_dtype(DType::F32),
        })
    }
}

/// An operation on the values of a tensor, which are copied to the host for it, and what it gives back.
pub(super) fn through_host(tensor: Tensor<1>, operation: impl FnOnce(Flat) -> Result<Flat>) -> TensorResult {
    let ([len], device, stored) = (tensor.dims(), tensor.device(), tensor.dtype());
    let values = HostTensor::download(tensor.reshape([1, len]))?;
    let result = operation(Flat::as_stored(values))?;
    let len = result.len();
    let result = result.into_host_tensor([1, len]).into_device(&device);
    Ok(stored_as(result.reshape([len]), stored))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Settings, Threads};
    use burn::tensor::Device;
    use firebrick_device::Precision;

    #[test]
    fn values_keep_their_type_or_are_widened() {
        let table = HostTensor::from_values(vec![1.0, 2.0, 3.0, 4.0], [2, 2]).rounded(Precision::Bf16);
        let stored = Flat::as_stored(table.clone());
        assert_eq!((stored.element(), stored.len()), (Element::Bf16, 4));
        assert_eq!(Flat::from(table), Flat::F32(vec![1.0, 2.0, 3.0, 4.0]));
    }

    #[test]
    fn tensors_are_exchanged_as_their_values_are() {
        let ranks = Threads::run(2, Settings::default(), |rank| {
            let device = Device::flex();
            let first = rank.rank() as f32;
            let tensor = || Tensor::<1>::from_floats([first, 1.0, 2.0, 10.0 + first], &device);
            let values = |result: TensorResult| result.unwrap().into_data().iter::<f32>().collect::<Vec<_>>();
            let results = [
                values(rank.all_gather_tensor(tensor())),
                values(rank.all_reduce_tensor(tensor())),
                values(rank.reduce_scatter_tensor(tensor())),
                values(rank.all_to_all_tensor(tensor())),
            ];
            (first, results)
        });
        for rank in ranks {
            let (first, [gathered, summed, shard, blocks]) = rank.unwrap();
            assert_eq!(gathered, [0.0, 1.0, 2.0, 10.0, 1.0, 1.0, 2.0, 11.0]);
            assert_eq!(summed, [1.0, 2.0, 4.0, 21.0]);
            if first == 0.0 {
                assert_eq!(shard, [1.0, 2.0]);
                assert_eq!(blocks, [0.0, 1.0, 1.0, 1.0]);
            } else {
                assert_eq!(shard, [4.0, 21.0]);
                assert_eq!(blocks, [2.0, 10.0, 2.0, 11.0]);
            }
        }
    }
}
