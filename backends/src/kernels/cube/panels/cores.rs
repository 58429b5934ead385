//! On tensor cores, in half precision: a cube has a tile of rows and a panel, both in shared memory some inputs at a time, and each
//! plane one matrix of sums. Codes are whole numbers below 128, which both kinds of half precision hold exactly.

use super::super::launch::UNITS;
use super::super::matrices::{ALIGNMENT, PLANE, SIDE, VECTOR, aligned, no_sum, operand};
use super::{PANEL, WORD, code};
use burn_cubecl::cubecl;
use cubecl::cmma::{self, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Rows of a cube.
pub(super) const ROWS: usize = 64;

/// Inputs in shared memory at a time.
const CHUNK: usize = 128;

/// Numbers from row to row of what is staged, and of sums: rows side by side are in different banks.
const PITCH: usize = CHUNK + VECTOR;
const SUM_PITCH: usize = PANEL + 4;

/// Outputs whose words units side by side read, a whole sector of memory.
const SECTOR: usize = 8;

pub(super) const SHARED_BYTES: usize =
    2 * (ROWS + PANEL) * PITCH + 4 * ROWS * SUM_PITCH + 3 * ALIGNMENT;

/// Copies a chunk of the rows' inputs to shared memory, zeros for what is beyond the last. Places are in vectors.
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
        let mut own = Vector::<F, N>::cast_from(0u32);
        if first + row < rows && from < inner {
            own = x[(first + row) * inner + from];
        }
        staged[row * comptime!(PITCH / VECTOR) + input] = own;
    }
}

/// Widens a chunk of a panel to shared memory, zeros for what is beyond the last input.
#[cube]
fn stage_codes<F: Float>(
    codes: &[i32],
    staged: &mut Shared<[F]>,
    panel: usize,
    chunk: usize,
    words: usize,
) {
    let lane = UNIT_POS as usize % PLANE;
    let plane = UNIT_POS as usize / PLANE;
    let own = plane * comptime!(PLANE / SECTOR) + lane / SECTOR;
    let word = chunk / WORD + own;
    #[unroll]
    for i in 0..comptime!(PANEL / SECTOR) {
        let output = lane % SECTOR + comptime!(i * SECTOR);
        let mut packed = 0i32;
        if word < words {
            packed = codes[(panel * words + word) * PANEL + output];
        }
        #[unroll]
        for j in 0..WORD {
            staged[output * PITCH + own * WORD + j] = F::cast_from(code(packed, j));
        }
    }
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn multiply<F: Float, N: Size>(
    x: &[Vector<F, N>],
    codes: &[i32],
    scales: &[f32],
    out: &mut [F],
    rows: usize,
    inner: usize,
    outputs: usize,
    words: usize,
    tiles: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut inputs = aligned::<Vector<F, N>>(comptime!(ROWS * PITCH / VECTOR));
    let mut weights = aligned::<F>(comptime!(PANEL * PITCH));
    let mut sums = aligned::<f32>(comptime!(ROWS * SUM_PITCH));
    let panels = outputs.div_ceil(PANEL);
    let panel = min(CUBE_POS / tiles, panels - 1);
    let first = CUBE_POS % tiles * ROWS;
    let plane = UNIT_POS as usize / PLANE;
    let across = plane / comptime!(PANEL / SIDE);
    let along = plane % comptime!(PANEL / SIDE);
    let sum = no_sum();
    let mut chunk = 0usize;
    while chunk < inner {
        stage_rows(x, &mut inputs, first, rows, chunk, inner);
        stage_codes::<F>(codes, &mut weights, panel, chunk, words);
        sync_cube();
        #[unroll]
        for k in 0..comptime!(CHUNK / SIDE) {
            let a = across * comptime!(SIDE * PITCH / VECTOR) + comptime!(k * SIDE / VECTOR);
            let b = along * comptime!(SIDE * PITCH) + comptime!(k * SIDE);
            let (row, column) = (MatrixLayout::RowMajor, MatrixLayout::ColMajor);
            let pitch = PITCH as u32;
            let a = operand::<F, Vector<F, N>>(MatrixIdent::A, row, &inputs, a, pitch);
            let b = operand::<F, F>(MatrixIdent::B, column, &weights, b, pitch);
            cmma::execute(&a, &b, &sum, &sum);
        }
        sync_cube();
        chunk += CHUNK;
    }
    let at = across * comptime!(SIDE * SUM_PITCH) + along * SIDE;
    cmma::store(
        &mut sums[at..comptime!(ROWS * SUM_PITCH)],
        &sum,
        SUM_PITCH as u32,
        MatrixLayout::RowMajor,
    );
    sync_cube();
    let writes = CUBE_POS < tiles * panels;
    let mut i = UNIT_POS as usize;
    while i < comptime!(ROWS * PANEL) {
        let (row, output) = (first + i / PANEL, panel * PANEL + i % PANEL);
        if row < rows && output < outputs && writes {
            let sum = sums[i / PANEL * SUM_PITCH + i % PANEL];
            out[row * outputs + output] = F::cast_from(sum * scales[output]);
        }
        i += UNITS;
    }
}
