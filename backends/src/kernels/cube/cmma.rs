//! What kernels on tensor cores share: products of 16 × 16 numbers in half precision by a plane of units, summed up in f32.

use super::launch::{UNITS, elem};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::ir::features::MmaConfig;
use cubecl::prelude::*;

/// Rows and columns of a matrix of the tensor cores, and units of a plane, which works on one.
pub(super) const SIDE: usize = 16;
pub(super) const PLANE: usize = 32;
pub(super) const PLANES: usize = UNITS / PLANE;

/// Numbers that are read and staged at a time.
pub(super) const VECTOR: usize = 8;

/// Alignment of what tensor cores read.
pub(super) const ALIGNMENT: usize = 128;

/// Whether tensor cores make such products of a tensor's type, and a cube gets as many bytes of shared memory.
pub(super) fn has_tensor_cores(like: &CubeTensor, shared: usize) -> bool {
    let properties = like.client.properties();
    let hardware = &properties.hardware;
    let (factor, sum) = (elem(like), dtype_to_storage_type(DType::F32));
    let wanted = |c: &MmaConfig| {
        let types = [c.a_type, c.b_type] == [factor; 2] && c.cd_type == sum;
        types && [c.m, c.n, c.k].map(u32::from) == [SIDE as u32; 3]
    };
    factor.size() == 2
        && properties.features.matmul.cmma.iter().any(wanted)
        && [hardware.plane_size_min, hardware.plane_size_max] == [PLANE as u32; 2]
        && hardware.max_shared_memory_size >= shared
}

/// Room in shared memory that tensor cores read.
#[cube]
pub(super) fn aligned<T: CubePrimitive>(#[comptime] length: usize) -> Shared<[T]> {
    Shared::<[T]>::new_aligned_slice(length, ALIGNMENT)
}

/// A matrix from shared memory.
#[cube]
#[allow(
    unsafe_code,
    reason = "a matrix has no numbers until it is loaded, in the next line"
)]
pub(super) fn operand<F: Float, T: CubePrimitive>(
    #[comptime] ident: MatrixIdent,
    #[comptime] layout: MatrixLayout,
    from: &Shared<[T]>,
    at: usize,
    pitch: u32,
) -> Matrix<F> {
    // SAFETY: it is loaded before anything reads it.
    let mut matrix = unsafe { Matrix::<F>::uninitialized(ident, SIDE, SIDE, SIDE, layout) };
    cmma::load(&mut matrix, &from[at..from.len()], pitch);
    matrix
}

/// A sum of products, nothing yet.
#[cube]
pub(super) fn no_sum() -> Matrix<f32> {
    Matrix::<f32>::from_value(
        MatrixIdent::Accumulator,
        SIDE,
        SIDE,
        SIDE,
        MatrixLayout::Undefined,
        0.0f32,
    )
}
