//! Decode attention with the sums of the forward pass of training on SIMT units: the query heads of a key head are the rows of a
//! block, and a sequence's tokens its keys, in the same tiles and the same order (`attention::simt`).

use super::place;
use super::place::{Layout, Place, place_of, slot_of};
use crate::cube::attention::blocks::{Layout as Scoring, MASKED, Rows, Sizes, Tile};
use crate::cube::attention::simt::{NO_ROW, SIDE, STAGE, TILE, TILE_PITCH, attend_tile, clear, finish_softmax, store};
use crate::cube::prelude::*;

/// Most query heads of a key head, and most elements of a head.
pub(super) const MAX_GROUP: usize = 4 * SIDE;
pub(super) const MAX_DIM: usize = STAGE;

/// Rows of a block that a unit has, of so many query heads.
pub(super) fn rows_of_unit(group: usize) -> usize {
    if group <= SIDE { 1 } else { MAX_GROUP / SIDE }
}

/// Lists the slots of a tile of tokens, from `first` on.
#[cube]
fn list_slots(table: &[i32], place: &Place, first: usize, places: &mut Shared<[u32]>) {
    if UNIT_POS < TILE as u32 {
        let token = first + UNIT_POS as usize;
        let mut slot = u32::cast_from(NO_ROW);
        if token >= place.from && token < place.to {
            slot = slot_of(table, place, token) as u32;
        }
        places[UNIT_POS as usize] = slot;
    }
    sync_cube();
}

/// The output and the logsumexps of rotated queries, `[rows, heads, dim]` and `[rows, heads]`; zeros in a row of no
/// sequence. All tokens are in the pool.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend_in_order<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    table: &[i32],
    out: &mut [F],
    lse: &mut [f32],
    tasks: usize,
    layout: Layout,
    #[comptime] own: usize,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.dim);
    let each = comptime!(dim.div_ceil(SIDE));
    let mut places = Shared::<[u32]>::new_slice(TILE);
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(own * SIDE * TILE_PITCH));
    let mut mixed = Array::<f32>::new(comptime!(own * each));
    clear(&mut mixed, comptime!(own * each));
    let task = min(CUBE_POS, tasks - 1);
    let (row, head) = (task / layout.kv, task % layout.kv);
    let whole = comptime!(place::Sizes { heads: MAX_GROUP, dim: sizes.dim, capped: sizes.capped });
    let work = place_of(table, &layout, row, head, 0usize, layout.window, whole);
    let query_rows = Rows { at: work.first, count: layout.group, pitch: dim };
    let key_rows = Rows { at: work.base * dim, count: TILE, pitch: dim };
    let scoring = Scoring {
        blocks: 1usize,
        keys: 0usize,
        spans: 0usize,
        heads: layout.group,
        group: layout.group,
        window: layout.window as i32,
        scale: layout.scale,
        cap: layout.cap,
    };
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut first = work.from / TILE * TILE;
    while first < work.to {
        list_slots(table, &work, first, &mut places);
        // all heads are of the last token
        let pairs = Tile {
            from: 0usize,
            rows: layout.group,
            position: work.to as i32 - 1,
            step: 0i32,
            row: first as i32,
            shift: 0i32,
            count: TILE,
            head: 0usize,
        };
        let (now, sum) = attend_tile::<F>(
            q,
            k,
            v,
            &query_rows,
            &key_rows,
            &places,
            &mut stage,
            &mut tile,
            &mut mixed,
            &pairs,
            &scoring,
            largest,
            total,
            own,
            sizes,
        );
        largest = now;
        total = sum;
        first += TILE;
    }
    let writes = CUBE_POS < tasks;
    let lse_rows = Rows { at: task * layout.group, count: layout.group, pitch: 1usize };
    finish_softmax(&mut mixed, &mut stage, lse, &lse_rows, largest, total, writes, own, each);
    store::<F>(&mut mixed, out, &query_rows, writes, own, dim);
}
