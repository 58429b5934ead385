//! Conversions of tensors in half precision, which kernels compute with in f32.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Element};
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements of a task.
const GRAIN: usize = 1 << 15;

/// A contiguous tensor in f32 where it is in half precision, itself elsewhere.
pub(super) fn widened(tensor: FlexTensor) -> FlexTensor {
    match tensor.dtype() {
        DType::BF16 => converted(&tensor, bf16::to_f32, DType::F32),
        DType::F16 => converted(&tensor, f16::to_f32, DType::F32),
        _ => tensor,
    }
}

/// A contiguous f32 tensor in half precision `stored`; itself where that is no half precision.
pub(super) fn narrowed(tensor: FlexTensor, stored: DType) -> FlexTensor {
    match stored {
        DType::BF16 => converted(&tensor, bf16::from_f32, stored),
        DType::F16 => converted(&tensor, f16::from_f32, stored),
        _ => tensor,
    }
}

/// Rounds f32 numbers to those of a half precision; leaves them as they are for other types.
pub(super) fn round(values: &mut [f32], stored: DType) {
    match stored {
        DType::BF16 => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
        DType::F16 => values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32()),
        _ => {}
    }
}

fn converted<A, B>(tensor: &FlexTensor, convert: fn(A) -> B, dtype: DType) -> FlexTensor
where
    A: Element + bytemuck::Pod + Sync,
    B: Element + bytemuck::Pod + Send,
{
    let shape = tensor.layout().shape().clone();
    let (start, end) =
        tensor.layout().contiguous_offsets().unwrap_or_else(|| unreachable!("the caller made it contiguous"));
    let values = &tensor.storage::<A>()[start..end];
    let mut out = vec![B::zeroed(); values.len()];
    out.par_chunks_mut(GRAIN).zip(values.par_chunks(GRAIN)).for_each(|(out, values)| {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = convert(value);
        }
    });
    FlexTensor::new(Bytes::from_elems(out), Layout::contiguous(shape), dtype)
}
