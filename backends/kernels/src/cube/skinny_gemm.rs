//! Products of few rows with a matrix in half precision, on tensor cores: what decoding waits for is the matrix, so
//! each of its numbers is read once, by many planes at a time.
//!
//! A cube computes up to 64 rows of 32 outputs. Its planes divide the inputs among them and read fragments of both
//! operands where they lie, so none waits for another before their sums are added. The sum of a row is the same however
//! many rows there are.

#![allow(clippy::trivially_copy_pass_by_ref, reason = "an accumulator is in the registers of a plane")]

use super::cmma::{ALIGNMENT, PLANE, PLANES, SIDE, has_tensor_cores, load_fragment, shared_aligned, zero_accumulator};
use super::prelude::*;
use burn_cubecl::CubeDevice;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};

/// Rows up to which a product is made this way.
pub(super) const MAX_ROWS: usize = 256;

/// Tiles of 16 rows and of 16 outputs of a cube.
const ROW_TILES: usize = 4;
const OUTPUT_TILES: usize = 2;

/// Sums of a plane for a tile of rows.
const SUMS: usize = SIDE * OUTPUT_TILES * SIDE;

/// Bytes of shared memory of a cube: the planes' sums of a tile of rows, and rows that fill no tile.
const SHARED: usize = PLANES * SUMS * 4 + PLANES * SIDE * SIDE * 2 + 2 * ALIGNMENT;

/// `x · Wᵀ` for contiguous `x`, `[rows, inputs]`, and `w`, `[outputs, inputs]`. `None` where the shape or the device is
/// not for it.
pub(super) fn product(x: &CubeTensor, w: &CubeTensor) -> Option<CubeTensor> {
    let ([rows, inner], [outputs, _]) = (dims(x), dims(w));
    let fits = (1..=MAX_ROWS).contains(&rows) && inner % SIDE == 0 && outputs >= SIDE;
    // the kernel is restricted to CUDA's tensor cores
    let on_cuda = matches!(x.device, CubeDevice::Cuda(_));
    if !fits || !on_cuda || !has_tensor_cores(x, SHARED) {
        return None;
    }
    let tiles = rows.div_ceil(SIDE).min(ROW_TILES);
    // one, two or four, so that few kernels are compiled
    let tiles = tiles.next_power_of_two();
    let blocks = rows.div_ceil(tiles * SIDE);
    let out = empty(x, [rows, outputs], x.dtype);
    let grid = Grid::cubes([x, w, &out], blocks * outputs.div_ceil(OUTPUT_TILES * SIDE));
    launch!(multiply, grid, [x, w, &out], rows, inner, outputs, blocks, tiles, rows < SIDE, elem(&out));
    Some(out)
}

/// A fragment of 16 × 16 numbers of a matrix in global memory, from the number `at` on.
#[cube]
#[allow(unsafe_code, reason = "a fragment is uninitialised until it is loaded, in the next line")]
fn fragment<F: Float>(
    #[comptime] ident: MatrixIdent,
    #[comptime] layout: MatrixLayout,
    from: &[F],
    at: usize,
    pitch: usize,
) -> Matrix<F> {
    // SAFETY: it is loaded before anything reads it.
    let mut matrix = unsafe { Matrix::<F>::uninitialized(ident, SIDE, SIDE, SIDE, layout) };
    cmma::load(&mut matrix, &from[at..from.len()], pitch as u32);
    matrix
}

/// A fragment of fewer than 16 rows, with zeros for the others: through a patch of shared memory of the plane's own.
#[cube]
fn ragged_fragment<F: Float>(x: &[F], patches: &mut Shared<[F]>, rows: usize, input: usize, pitch: usize) -> Matrix<F> {
    let patch = UNIT_POS as usize / PLANE * comptime!(SIDE * SIDE);
    let lane = UNIT_POS as usize % PLANE;
    sync_plane();
    #[unroll]
    for i in 0..comptime!(SIDE * SIDE / PLANE) {
        let place = lane + comptime!(i * PLANE);
        let (row, column) = (place / SIDE, place % SIDE);
        let mut value = F::cast_from(0u32);
        if row < rows {
            value = x[row * pitch + input + column];
        }
        patches[patch + place] = value;
    }
    sync_plane();
    load_fragment::<F, F>(MatrixIdent::A, MatrixLayout::RowMajor, &*patches, patch, SIDE as u32)
}

/// Adds the products of `16 · steps` inputs to a plane's sums: first all reads, then all products, so that many reads
/// are under way.
#[cube]
fn advance<F: Float>(
    x: &[F],
    w: &[F],
    patches: &mut Shared<[F]>,
    sums: &mut Sequence<Matrix<f32>>,
    first: (usize, usize, usize),
    sizes: (usize, usize, usize),
    #[comptime] tiles: usize,
    #[comptime] steps: usize,
    #[comptime] ragged: bool,
) {
    let (first_row, first_output, first_input) = first;
    let (rows, inner, outputs) = sizes;
    let mut weights = Sequence::<Matrix<F>>::new();
    let mut inputs = Sequence::<Matrix<F>>::new();
    #[unroll]
    for step in 0..steps {
        let input = first_input + comptime!(step * SIDE);
        #[unroll]
        for i in 0..OUTPUT_TILES {
            let output = min(first_output + comptime!(i * SIDE), outputs - SIDE);
            let (b, column) = (MatrixIdent::B, MatrixLayout::ColMajor);
            weights.push(fragment::<F>(b, column, w, output * inner + input, inner));
        }
        #[unroll]
        for tile in 0..tiles {
            if ragged {
                inputs.push(ragged_fragment::<F>(x, patches, rows, input, inner));
            } else {
                let row = min(first_row + comptime!(tile * SIDE), rows - SIDE);
                let (a, by_rows) = (MatrixIdent::A, MatrixLayout::RowMajor);
                inputs.push(fragment::<F>(a, by_rows, x, row * inner + input, inner));
            }
        }
    }
    #[unroll]
    for step in 0..steps {
        #[unroll]
        for tile in 0..tiles {
            let a = inputs.index(comptime!(step * tiles + tile));
            #[unroll]
            for i in 0..OUTPUT_TILES {
                let b = weights.index(comptime!(step * OUTPUT_TILES + i));
                let sum = sums.index(comptime!(tile * OUTPUT_TILES + i));
                cmma::execute(a, b, sum, sum);
            }
        }
    }
}

/// Cubes of the same outputs are neighbours, so that the matrix is read from memory once. A tile that would reach
/// beyond the last row or output begins earlier, and computes again what another has.
#[cube(launch, address_type = "dynamic")]
fn multiply<F: Float>(
    x: &[F],
    w: &[F],
    out: &mut [F],
    rows: usize,
    inner: usize,
    outputs: usize,
    blocks: usize,
    #[comptime] tiles: usize,
    #[comptime] ragged: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut shared = shared_aligned::<f32>(comptime!(PLANES * SUMS));
    let mut patches = shared_aligned::<F>(comptime!(PLANES * SIDE * SIDE));
    let plane = UNIT_POS as usize / PLANE;
    let first_row = CUBE_POS % blocks * comptime!(tiles * SIDE);
    let first_output = CUBE_POS / blocks * comptime!(OUTPUT_TILES * SIDE);
    let sizes = (rows, inner, outputs);
    // as many as registers hold
    let ahead = comptime!(if tiles > 2 { 2usize } else { 4usize });
    let steps = inner / SIDE;
    let each = steps.div_ceil(PLANES);
    let mut step = min(plane * each, steps);
    let end = min(step + each, steps);

    let mut sums = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(tiles * OUTPUT_TILES) {
        sums.push(zero_accumulator());
    }
    while step + ahead <= end {
        let at = (first_row, first_output, step * SIDE);
        advance::<F>(x, w, &mut patches, &mut sums, at, sizes, tiles, ahead, ragged);
        step += ahead;
    }
    while step < end {
        let at = (first_row, first_output, step * SIDE);
        advance::<F>(x, w, &mut patches, &mut sums, at, sizes, tiles, 1usize, ragged);
        step += 1;
    }

    let inputs = plane * SUMS;
    #[unroll]
    for tile in 0..tiles {
        sync_cube();
        #[unroll]
        for i in 0..OUTPUT_TILES {
            cmma::store(
                &mut shared[inputs + comptime!(i * SIDE)..comptime!(PLANES * SUMS)],
                sums.index(comptime!(tile * OUTPUT_TILES + i)),
                comptime!((OUTPUT_TILES * SIDE) as u32),
                MatrixLayout::RowMajor,
            );
        }
        sync_cube();
        let mut row = first_row + comptime!(tile * SIDE);
        if comptime!(!ragged) {
            row = min(row, rows - SIDE);
        }
        let mut i = UNIT_POS as usize;
        while i < SUMS {
            let column = i % comptime!(OUTPUT_TILES * SIDE);
            let output = min(first_output + column / SIDE * SIDE, outputs - SIDE) + column % SIDE;
            let row = row + i / comptime!(OUTPUT_TILES * SIDE);
            if row < rows {
                let mut sum = 0.0f32;
                #[unroll]
                for part in 0..PLANES {
                    sum += shared[comptime!(part * SUMS) + i];
                }
                out[row * outputs + output] = F::cast_from(sum);
            }
            i += UNITS;
        }
    }
}
