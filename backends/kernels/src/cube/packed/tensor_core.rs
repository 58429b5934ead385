//! On tensor cores, in half precision: a cube has a tile of rows and some panels, both in shared memory a chunk of
//! inputs at a time, and each plane an accumulator of each panel. Codes are integers below 128, which f16 and bf16 hold
//! exactly.

#![allow(clippy::trivially_copy_pass_by_ref, reason = "an accumulator is in the registers of a plane")]

use super::super::cmma::{ALIGNMENT, PLANE, SIDE, VECTOR, load_fragment, shared_aligned, zero_accumulator};
use super::codes::{Epilogue, PANEL, WORD, code, silu};
use crate::cube::prelude::*;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};

/// Rows of a cube.
pub(super) const ROWS: usize = 64;

/// Inputs in shared memory at a time.
const CHUNK: usize = 128;

/// Strides of staged rows, and of sums, without bank conflicts of adjacent rows.
const PITCH: usize = CHUNK + VECTOR;
const SUM_PITCH: usize = PANEL + 4;

/// Outputs whose words adjacent units read: a 32-byte sector of memory.
const SECTOR: usize = 8;

/// Most panels of a cube: a plane has an accumulator of each.
const PANELS: usize = 4;

/// Bytes of shared memory of a cube with `wide` panels.
const fn shared_bytes(epilogue: Epilogue, wide: usize) -> usize {
    let matrices = match epilogue {
        Epilogue::SwiGlu => 2,
        Epilogue::None | Epilogue::Add => 1,
    };
    2 * (ROWS + matrices * wide * PANEL) * PITCH + matrices * 4 * ROWS * SUM_PITCH + 4 * ALIGNMENT
}

/// The least shared memory that the kernels need, in bytes.
pub(super) const MIN_SHARED_BYTES: usize = shared_bytes(Epilogue::SwiGlu, 1);

/// Panels of a cube, of `panels`: as many as shared memory allows while cubes still fill the GPU, since every cube
/// reads the rows again.
pub(super) fn wide(panels: usize, tiles: usize, epilogue: Epilogue, like: &CubeTensor) -> usize {
    let most = if epilogue == Epilogue::SwiGlu { PANELS / 2 } else { PANELS };
    let shared = like.client.properties().hardware.max_shared_memory_size;
    let wanted = cubes_to_fill(like);
    let fits = |&wide: &usize| tiles * panels.div_ceil(wide) >= wanted && shared_bytes(epilogue, wide) <= shared;
    [most, most / 2].into_iter().find(fits).unwrap_or(1)
}

/// Copies a chunk of the rows' inputs to shared memory, with zeros beyond the last. Offsets are in vectors.
#[cube]
fn stage_rows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    staged: &mut Shared<[Vector<F, N>]>,
    first: usize,
    rows: usize,
    chunk: usize,
    inner: usize,
) {
    let wide = comptime!(CHUNK / VECTOR);
    let inner = inner / VECTOR;
    #[unroll]
    for i in 0..comptime!(ROWS * CHUNK / VECTOR / UNITS) {
        let place = UNIT_POS as usize + comptime!(i * UNITS);
        let (row, input) = (place / wide, place % wide);
        let from = chunk / VECTOR + input;
        let mut values = Vector::<F, N>::cast_from(0u32);
        if first + row < rows && from < inner {
            values = x[(first + row) * inner + from];
        }
        staged[row * comptime!(PITCH / VECTOR) + input] = values;
    }
}

/// Widens a chunk of a panel into shared memory, with zeros beyond the last input.
#[cube]
fn stage_codes<F: Float>(
    codes: &[i32],
    staged: &mut Shared<[F]>,
    #[comptime] place: usize,
    panel: usize,
    chunk: usize,
    words: usize,
) {
    let lane = UNIT_POS as usize % PLANE;
    let plane = UNIT_POS as usize / PLANE;
    let offset = plane * comptime!(PLANE / SECTOR) + lane / SECTOR;
    let word = chunk / WORD + offset;
    #[unroll]
    for i in 0..comptime!(PANEL / SECTOR) {
        let output = lane % SECTOR + comptime!(i * SECTOR);
        let mut packed = 0i32;
        if word < words {
            packed = codes[(panel * words + word) * PANEL + output];
        }
        #[unroll]
        for j in 0..WORD {
            staged[comptime!(place * PANEL * PITCH) + output * PITCH + offset * WORD + j] =
                F::cast_from(code(packed, j));
        }
    }
}

/// Adds a chunk's products to a plane's accumulators: the same rows, and 16 outputs of each panel.
#[cube]
fn accumulate<F: Float, N: Size>(
    inputs: &Shared<[Vector<F, N>]>,
    weights: &Shared<[F]>,
    sums: &mut Sequence<Matrix<f32>>,
    across: usize,
    along: usize,
    #[comptime] panels: usize,
) {
    let (row, column) = (MatrixLayout::RowMajor, MatrixLayout::ColMajor);
    let pitch = PITCH as u32;
    #[unroll]
    for k in 0..comptime!(CHUNK / SIDE) {
        let a = across * comptime!(SIDE * PITCH / VECTOR) + comptime!(k * SIDE / VECTOR);
        let a = load_fragment::<F, Vector<F, N>>(MatrixIdent::A, row, inputs, a, pitch);
        #[unroll]
        for i in 0..panels {
            let b = along * comptime!(SIDE * PITCH) + comptime!(i * PANEL * PITCH + k * SIDE);
            let b = load_fragment::<F, F>(MatrixIdent::B, column, weights, b, pitch);
            let sum = sums.index(i);
            cmma::execute(&a, &b, sum, sum);
        }
    }
}

/// Writes an accumulator to shared memory.
#[cube]
fn store(sum: &Matrix<f32>, sums: &mut Shared<[f32]>, across: usize, along: usize) {
    let at = across * comptime!(SIDE * SUM_PITCH) + along * SIDE;
    cmma::store(&mut sums[at..comptime!(ROWS * SUM_PITCH)], sum, SUM_PITCH as u32, MatrixLayout::RowMajor);
}

/// A cube has `wide` panels, and with `SwiGlu` as many of the second matrix.
#[cube(launch, address_type = "dynamic")]
pub(super) fn multiply<F: Float, N: Size>(
    x: &[Vector<F, N>],
    codes: &[i32],
    scales: &[f32],
    up_codes: &[i32],
    up_scales: &[f32],
    out: &mut [F],
    rows: usize,
    inner: usize,
    outputs: usize,
    words: usize,
    tiles: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] wide: usize,
    #[define(F)] _dtype: ElemType,
) {
    let gated = comptime!(epilogue == Epilogue::SwiGlu);
    let staged = comptime!(if gated { 2 * wide } else { wide });
    let mut inputs = shared_aligned::<Vector<F, N>>(comptime!(ROWS * PITCH / VECTOR));
    let mut weights = shared_aligned::<F>(comptime!(staged * PANEL * PITCH));
    let mut shared = shared_aligned::<f32>(comptime!(ROWS * SUM_PITCH));
    let mut up_shared = shared_aligned::<f32>(comptime!(if gated { ROWS * SUM_PITCH } else { VECTOR }));
    let mut sums = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..staged {
        sums.push(zero_accumulator());
    }
    let panels = outputs.div_ceil(PANEL);
    let blocks = panels.div_ceil(wide);
    // the last cube may reach beyond the last panel, which it then computes again
    let panel = min(CUBE_POS / tiles, blocks - 1) * wide;
    let first = CUBE_POS % tiles * ROWS;
    let plane = UNIT_POS as usize / PLANE;
    let across = plane / comptime!(PANEL / SIDE);
    let along = plane % comptime!(PANEL / SIDE);
    let mut chunk = 0usize;
    while chunk < inner {
        stage_rows(x, &mut inputs, first, rows, chunk, inner);
        #[unroll]
        for i in 0..wide {
            let tile = min(panel + i, panels - 1);
            stage_codes::<F>(codes, &mut weights, i, tile, chunk, words);
            if gated {
                stage_codes::<F>(up_codes, &mut weights, comptime!(wide + i), tile, chunk, words);
            }
        }
        sync_cube();
        accumulate(&inputs, &weights, &mut sums, across, along, staged);
        sync_cube();
        chunk += CHUNK;
    }
    let writes = CUBE_POS < tiles * blocks;
    #[unroll]
    for tile in 0..wide {
        sync_cube();
        store(sums.index(tile), &mut shared, across, along);
        if gated {
            store(sums.index(comptime!(wide + tile)), &mut up_shared, across, along);
        }
        sync_cube();
        let mut i = UNIT_POS as usize;
        while i < comptime!(ROWS * PANEL) {
            let (row, output) = (first + i / PANEL, (panel + tile) * PANEL + i % PANEL);
            if row < rows && output < outputs && writes {
                let from = i / PANEL * SUM_PITCH + i % PANEL;
                let at = row * outputs + output;
                let mut y = shared[from] * scales[output];
                if gated {
                    y = silu(y) * (up_shared[from] * up_scales[output]);
                } else if comptime!(epilogue == Epilogue::Add) {
                    y += f32::cast_from(out[at]);
                }
                out[at] = F::cast_from(y);
            }
            i += UNITS;
        }
    }
}
