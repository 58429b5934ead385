//! Shared code of kernels on tensor cores: products of 16 × 16 matrices in half precision by a plane, accumulated in
//! f32.

use super::prelude::*;
use burn::backend::cubecl::dtype_to_storage_type;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::ir::features::MmaConfig;

/// Rows and columns of a fragment, units of a plane, and planes of a cube.
pub(super) const SIDE: usize = 16;
pub(super) const PLANE: usize = 32;
pub(super) const PLANES: usize = UNITS / PLANE;

/// Elements of a vectorised load.
pub(super) const VECTOR: usize = 8;

/// Alignment of shared memory that tensor cores read, in bytes.
pub(super) const ALIGNMENT: usize = 128;

/// Returns true if the device has tensor cores for a tensor's type, and `shared` bytes of shared memory for a cube.
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

/// Shared memory that tensor cores may read.
#[cube]
pub(super) fn shared_aligned<T: CubePrimitive>(#[comptime] length: usize) -> Shared<[T]> {
    Shared::<[T]>::new_aligned_slice(length, ALIGNMENT)
}

/// Loads a fragment from shared memory.
#[cube]
#[allow(unsafe_code, reason = "a fragment is uninitialised until it is loaded, in the next line")]
pub(super) fn load_fragment<F: Float, T: CubePrimitive>(
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

/// An accumulator of zeros.
#[cube]
pub(super) fn zero_accumulator() -> Matrix<f32> {
    Matrix::<f32>::from_value(MatrixIdent::Accumulator, SIDE, SIDE, SIDE, MatrixLayout::Undefined, 0.0f32)
}
