//! Tiles of scores: products of a block's rows with rows of the other side (keys of queries, or queries of keys), by
//! slices of both in shared memory, and products of such a tile with rows of the other side. Each unit has `own` × 2
//! elements of a tile. Shared memory stays below 16 KiB, which WebGPU guarantees.
//!
//! Every sum has one order, whatever the number of rows: dimension by dimension, and row by row of the other side.

use super::super::blocks::BLOCK;
use super::super::blocks::Rows;
use crate::cube::prelude::*;

/// Rows of the other side in a tile.
pub(crate) const TILE: usize = 32;

/// Units along each side of a tile.
pub(crate) const SIDE: usize = 16;

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

/// The place of a row of the other side that there is none of.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// Lists the first `count` rows of the other side.
#[cube]
pub(super) fn list_rows(places: &mut Shared<[u32]>, count: usize) {
    let unit = UNIT_POS;
    if unit < TILE as u32 {
        let mut place = unit;
        if unit as usize >= count {
            place = u32::cast_from(NO_ROW);
        }
        places[unit as usize] = place;
    }
    sync_cube();
}

/// Copies a dimension of a block's rows to shared memory, with zeros for those beyond the last.
#[cube]
fn load_block<F: Float>(
    from: &[F],
    rows: &Rows,
    stage: &mut Shared<[f32]>,
    d: usize,
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
        stage[row * SLICE_PITCH + unit % SLICE] = x;
    }
}

/// Copies a dimension of a tile's rows of the other side to shared memory behind the block's, with zeros for those that
/// there are none of.
#[cube]
fn load_others<F: Float>(
    from: &[F],
    rows: &Rows,
    places: &Shared<[u32]>,
    stage: &mut Shared<[f32]>,
    d: usize,
    #[comptime] first: usize,
    #[comptime] dim: usize,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(TILE * SLICE / UNITS) {
        let row = unit / SLICE + comptime!(i * UNITS / SLICE);
        let place = places[row];
        let mut x = 0.0f32;
        if place != NO_ROW && d < dim {
            x = f32::cast_from(from[rows.at + place as usize * rows.pitch + d]);
        }
        stage[(first + row) * SLICE_PITCH + unit % SLICE] = x;
    }
}

/// Adds the products of a unit's `own` rows of the block and its rows of the other side, which are at `places`, to its
/// elements of a tile.
#[cube]
pub(super) fn product<F: Float>(
    left: &[F],
    block_rows: &Rows,
    right: &[F],
    other_rows: &Rows,
    places: &Shared<[u32]>,
    stage: &mut Shared<[f32]>,
    sums: &mut Array<f32>,
    #[comptime] own: usize,
    #[comptime] dim: usize,
) {
    let unit = UNIT_POS as usize;
    let across = unit / SIDE;
    let along = unit % SIDE;
    let mut slice = 0usize;
    while slice < dim {
        let d = slice + unit % SLICE;
        load_block::<F>(left, block_rows, stage, d, comptime!(own * SIDE), dim);
        load_others::<F>(right, other_rows, places, stage, d, comptime!(own * SIDE), dim);
        sync_cube();
        for d in 0..SLICE {
            #[unroll]
            for j in 0..OTHER {
                let b = stage[(along + comptime!((own + j) * SIDE)) * SLICE_PITCH + d];
                #[unroll]
                for i in 0..own {
                    let a = stage[(across + comptime!(i * SIDE)) * SLICE_PITCH + d];
                    let sum = comptime!(i * OTHER + j);
                    sums[sum] = fma(a, b, sums[sum]);
                }
            }
        }
        sync_cube();
        slice += SLICE;
    }
}

/// Adds the product of a tile and rows of the other side, which are at `places`, to a unit's accumulators of the block's
/// rows.
#[cube]
pub(super) fn accumulate<F: Float>(
    tile: &mut Shared<[f32]>,
    other: &[F],
    rows: &Rows,
    places: &Shared<[u32]>,
    stage: &mut Shared<[f32]>,
    sums: &mut Array<f32>,
    #[comptime] own: usize,
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
            if row < TILE {
                let place = places[row];
                if place != NO_ROW {
                    x = f32::cast_from(other[rows.at + place as usize * rows.pitch + i % dim]);
                }
            }
            stage[i] = x;
            i += UNITS;
        }
        sync_cube();
        let end = min(TILE - first, together);
        for row in 0..end {
            let mut weights = Array::<f32>::new(own);
            #[unroll]
            for i in 0..own {
                weights[i] = tile[(across + comptime!(i * SIDE)) * TILE_PITCH + first + row];
            }
            #[unroll]
            for j in 0..each {
                // units beyond the last dimension accumulate a value that is never stored
                let d = min(along + comptime!(j * SIDE), dim - 1);
                let x = stage[row * dim + d];
                #[unroll]
                for i in 0..own {
                    let sum = comptime!(i * each + j);
                    sums[sum] = fma(weights[i], x, sums[sum]);
                }
            }
        }
        sync_cube();
        first += together;
    }
}

/// Writes a unit's accumulators of the block's rows.
#[cube]
pub(super) fn store<F: Float>(
    sums: &mut Array<f32>,
    out: &mut [F],
    rows: &Rows,
    writes: bool,
    #[comptime] own: usize,
    #[comptime] dim: usize,
) {
    let each = comptime!(dim.div_ceil(SIDE));
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..own {
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
pub(super) fn write_tile(numbers: &mut Array<f32>, tile: &mut Shared<[f32]>, #[comptime] own: usize) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..own {
        #[unroll]
        for j in 0..OTHER {
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            tile[r * TILE_PITCH + c] = numbers[comptime!(i * OTHER + j)];
        }
    }
}
