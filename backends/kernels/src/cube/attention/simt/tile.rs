//! Tiles of scores: products of a block's rows with rows of the other side (keys of queries, or queries of keys), by
//! slices of both in shared memory, and products of such a tile with rows of the other side. Each unit has 4 × 2
//! elements of a tile. Shared memory stays below 16 KiB, which WebGPU guarantees.

use super::super::blocks::BLOCK;
use super::super::blocks::Rows;
use crate::cube::prelude::*;

/// Rows of the other side in a tile.
pub(super) const TILE: usize = 32;

/// Units along each side of a tile.
pub(super) const SIDE: usize = 16;

/// Rows of the block, and of the other side, that a unit has.
pub(super) const OWN: usize = BLOCK / SIDE;
pub(super) const OTHER: usize = TILE / SIDE;

/// Dimensions in shared memory at a time while a tile is computed; pitches avoid bank conflicts of adjacent rows.
pub(super) const SLICE: usize = 16;
pub(super) const SLICE_PITCH: usize = SLICE + 1;
pub(super) const TILE_PITCH: usize = TILE + 4;

/// Elements of the slices of both sides.
pub(crate) const STAGE: usize = (BLOCK + TILE) * SLICE_PITCH;

/// Units of a row in the softmax.
pub(super) const LANES: usize = UNITS / BLOCK;

/// Copies a dimension of some rows to shared memory, from its row `first` on, with zeros for those beyond the last.
#[cube]
fn load_slice<F: Float>(
    from: &[F],
    rows: &Rows,
    stage: &mut Shared<[f32]>,
    d: usize,
    #[comptime] first: usize,
    #[comptime] count: usize,
    #[comptime] dim: usize,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(count * SLICE / UNITS) {
        let row = unit / SLICE + comptime!(i * UNITS / SLICE);
        let mut x = 0.0f32;
        if row < rows.count && d < dim {
            x = f32::cast_from(from[rows.at + row * rows.pitch + d]);
        }
        stage[(first + row) * SLICE_PITCH + unit % SLICE] = x;
    }
}

/// Adds the products of a unit's rows of the block and its rows of the other side to its elements of a tile.
#[cube]
pub(super) fn product<F: Float>(
    left: &[F],
    block_rows: &Rows,
    right: &[F],
    other_rows: &Rows,
    stage: &mut Shared<[f32]>,
    sums: &mut Array<f32>,
    #[comptime] dim: usize,
) {
    let unit = UNIT_POS as usize;
    let across = unit / SIDE;
    let along = unit % SIDE;
    let mut slice = 0usize;
    while slice < dim {
        let d = slice + unit % SLICE;
        load_slice::<F>(left, block_rows, stage, d, 0usize, BLOCK, dim);
        load_slice::<F>(right, other_rows, stage, d, BLOCK, TILE, dim);
        sync_cube();
        for d in 0..SLICE {
            #[unroll]
            for j in 0..OTHER {
                let b = stage[(along + comptime!(BLOCK + j * SIDE)) * SLICE_PITCH + d];
                #[unroll]
                for i in 0..OWN {
                    let a = stage[(across + comptime!(i * SIDE)) * SLICE_PITCH + d];
                    sums[comptime!(i * OTHER + j)] += a * b;
                }
            }
        }
        sync_cube();
        slice += SLICE;
    }
}

/// Adds the product of a tile and rows of the other side to a unit's accumulators of the block's rows.
#[cube]
pub(super) fn accumulate<F: Float>(
    tile: &mut Shared<[f32]>,
    other: &[F],
    rows: &Rows,
    stage: &mut Shared<[f32]>,
    sums: &mut Array<f32>,
    #[comptime] dim: usize,
) {
    let each = comptime!(dim.div_ceil(SIDE));
    let together = comptime!((STAGE / dim).clamp(1, TILE));
    let unit = UNIT_POS as usize;
    let across = unit / SIDE;
    let along = unit % SIDE;
    let mut first = 0usize;
    while first < TILE {
        let mut i = unit;
        while i < comptime!(together * dim) {
            let row = first + i / dim;
            let mut x = 0.0f32;
            if row < rows.count {
                x = f32::cast_from(other[rows.at + row * rows.pitch + i % dim]);
            }
            stage[i] = x;
            i += UNITS;
        }
        sync_cube();
        let end = min(TILE - first, together);
        for row in 0..end {
            let mut weights = Array::<f32>::new(OWN);
            #[unroll]
            for i in 0..OWN {
                weights[i] = tile[(across + comptime!(i * SIDE)) * TILE_PITCH + first + row];
            }
            #[unroll]
            for j in 0..each {
                // units beyond the last dimension accumulate a value that is never stored
                let d = min(along + comptime!(j * SIDE), dim - 1);
                let x = stage[row * dim + d];
                #[unroll]
                for i in 0..OWN {
                    sums[comptime!(i * each + j)] += weights[i] * x;
                }
            }
        }
        sync_cube();
        first += together;
    }
}

/// Writes a unit's accumulators of the block's rows.
#[cube]
pub(super) fn store<F: Float>(sums: &mut Array<f32>, out: &mut [F], rows: &Rows, writes: bool, #[comptime] dim: usize) {
    let each = comptime!(dim.div_ceil(SIDE));
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..OWN {
        let row = unit / SIDE + comptime!(i * SIDE);
        #[unroll]
        for j in 0..each {
            let d = unit % SIDE + comptime!(j * SIDE);
            if writes && row < rows.count && d < dim {
                let x = sums[comptime!(i * each + j)];
                out[rows.at + row * rows.pitch + d] = F::cast_from(x);
            }
        }
    }
}

#[cube]
pub(super) fn clear(numbers: &mut Array<f32>, #[comptime] count: usize) {
    #[unroll]
    for i in 0..count {
        numbers[i] = 0.0f32;
    }
}

/// Writes a unit's elements to the tile in shared memory.
#[cube]
pub(super) fn write_tile(numbers: &mut Array<f32>, tile: &mut Shared<[f32]>) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OTHER {
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            tile[r * TILE_PITCH + c] = numbers[comptime!(i * OTHER + j)];
        }
    }
}
