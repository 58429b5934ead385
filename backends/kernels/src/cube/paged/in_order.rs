//! Decode attention with the sums of the forward pass of training on SIMT units: the query heads of a key head are the
//! rows of a block, and a sequence's tokens its keys, in the same tiles and the same order (`attention::simt`).

use super::place;
use super::place::{Layout, Place, place_of, slot_of};
use crate::cube::attention::blocks::{Layout as Scoring, Rows, Sizes, Tile};
use crate::cube::attention::simt::{KeyRows, NO_ROW, SIDE, STAGE, TILE, attend};
use crate::cube::prelude::*;

/// Most query heads of a key head, and most elements of a head.
pub(super) const MAX_GROUP: usize = 4 * SIDE;
pub(super) const MAX_DIM: usize = STAGE;

/// Rows of a block that a unit has, of so many query heads.
pub(super) fn rows_of_unit(group: usize) -> usize {
    if group <= SIDE { 1 } else { MAX_GROUP / SIDE }
}

/// A sequence's tokens by their slots.
#[cube]
impl KeyRows for Place {
    fn row(this: &Self, table: &[i32], position: i32) -> u32 {
        let token = position as usize;
        let mut slot = u32::cast_from(NO_ROW);
        if token >= this.from && token < this.to {
            slot = slot_of(table, this, token) as u32;
        }
        slot
    }
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
    let group = layout.group;
    let task = min(CUBE_POS, tasks - 1);
    let (row, head) = (task / layout.kv, task % layout.kv);
    let whole = comptime!(place::Sizes { heads: MAX_GROUP, dim: sizes.dim, capped: sizes.capped });
    let keys = place_of(table, &layout, row, head, 0usize, layout.window, whole);
    let (first, end) = (keys.from as i32, keys.to as i32);
    let scoring = Scoring {
        blocks: 1usize,
        keys: 0usize,
        spans: 0usize,
        heads: group,
        group,
        window: layout.window as i32,
        scale: layout.scale,
        cap: layout.cap,
    };
    // all heads are of the last token
    let queries = Tile {
        from: 0usize,
        rows: group,
        position: end - 1,
        step: 0i32,
        row: 0i32,
        shift: 0i32,
        count: TILE,
        head: 0usize,
    };
    let query_rows = Rows { at: keys.first, count: group, pitch: dim };
    let key_rows = Rows { at: keys.base * dim, count: TILE, pitch: dim };
    let lse_rows = Rows { at: task * group, count: group, pitch: 1usize };
    attend::<F, Place>(
        q,
        k,
        v,
        out,
        lse,
        table,
        &keys,
        &query_rows,
        &key_rows,
        &lse_rows,
        &queries,
        first,
        end,
        &scoring,
        CUBE_POS < tasks,
        own,
        sizes,
    );
}
