//! Sums of gradients in f32, whatever type each is computed in.

use super::prelude::*;
use crate::gradient_sums;
use burn::backend::autodiff::NodeId;

/// Returns true if the kernel takes a sum and what is added.
pub(crate) fn takes(sum: &Tensor<2>, gradient: &Tensor<2>) -> bool {
    let plain = [sum, gradient].iter().all(|t| !t.device().is_autodiff());
    let half = matches!(gradient.dtype(), DType::F16 | DType::BF16);
    plain && half && sum.dtype() == DType::F32 && enabled_on(&sum.device()) && sum.shape().num_elements() > 0
}

/// See [`crate::accumulate`].
pub(crate) fn accumulate(sum: Tensor<2>, gradient: &Tensor<2>) -> Tensor<2> {
    let (sum, gradient) = (into_writable(detached(sum)), detached(gradient.clone()));
    let n = sum.shape().num_elements();
    let size = vector_size([&gradient, &sum], n);
    let grid = Grid::elements([&sum], n / size);
    launch!(add, grid, size, [&sum, &gradient], n / size, elem(&gradient));
    Cube::tensor(sum)
}

/// Hands the sums of some leaves' gradients to `add`, those that are there to write to; it gives each with one more. False
/// where a leaf has no sum.
pub(super) fn add_to_sums(leaves: &[NodeId], add: impl FnOnce(Vec<Option<CubeTensor>>) -> Vec<CubeTensor>) -> bool {
    gradient_sums::add(leaves, |sums| {
        let sums = sums.into_iter().map(|sum| sum.map(|sum| into_writable(detached(sum)))).collect();
        add(sums).into_iter().map(Cube::tensor).collect()
    })
}

#[cube(launch, address_type = "dynamic")]
fn add<F: Float, N: Size>(
    sum: &mut [Vector<f32, N>],
    gradient: &[Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < vectors {
        sum[i] += Vector::<f32, N>::cast_from(gradient[i]);
    }
}
