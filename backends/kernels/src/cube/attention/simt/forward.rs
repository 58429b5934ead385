//! The forward pass of blocks of queries.

use super::super::blocks::{Layout, MASKED, Rows, Sizes, Tile, block_rows, masked_score, query_block};
use super::tile::{
    LANES, NO_ROW, OTHER, OWN, SIDE, STAGE, TILE, TILE_PITCH, accumulate, clear, product, store, write_tile,
};
use crate::cube::prelude::*;
use crate::prefix_groups::SPAN_FIELDS;

/// The keys that a block of queries sees, by their positions.
#[cube]
pub(crate) trait KeyRows: CubeType {
    /// The row of the key at a position, or [`NO_ROW`].
    fn row(this: &Self, table: &[i32], position: i32) -> u32;
}

/// Keys in spans: entries of a table up to `last`, and the position after the last key.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
struct Spans {
    at: usize,
    last: usize,
    end: i32,
}

#[cube]
impl KeyRows for Spans {
    fn row(this: &Self, table: &[i32], position: i32) -> u32 {
        let mut span = this.at;
        while span + SPAN_FIELDS < this.last && position >= table[span + SPAN_FIELDS + 2] {
            span += SPAN_FIELDS;
        }
        let behind = position - table[span + 2];
        let mut row = u32::cast_from(NO_ROW);
        // there is none before the first position that is known
        if behind >= 0 && position < this.end {
            row = (table[span] + behind) as u32;
        }
        row
    }
}

/// Turns products of queries and keys into scores, in place, and masks keys that a query does not see.
#[cube]
fn score(scores: &mut Array<f32>, tile: &Tile, layout: &Layout, #[comptime] own: usize, #[comptime] sizes: Sizes) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..own {
        #[unroll]
        for j in 0..OTHER {
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            let product = scores[comptime!(i * OTHER + j)];
            scores[comptime!(i * OTHER + j)] = masked_score(product, r, c, tile, layout, sizes);
        }
    }
}

/// One step of the online softmax, over a tile of scores, which become weights. [`LANES`] units have a row; a unit is
/// given the row's maximum and the sum of its weights so far, and returns both. `stage` gets the factors that rescale
/// the rows' accumulators: exactly 1 where the maximum stays, so that tiles of which a row sees no key change nothing.
#[cube]
fn online_softmax(
    tile: &mut Shared<[f32]>,
    stage: &mut Shared<[f32]>,
    largest: f32,
    total: f32,
    #[comptime] own: usize,
) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    // units beyond the last row have that row once more
    let row = min(unit / LANES, comptime!(own * SIDE - 1));
    let first = row * TILE_PITCH + lane;
    let mut top = largest;
    for c in 0..comptime!(TILE / LANES) {
        top = max(top, tile[first + c * LANES]);
    }
    stage[unit] = top;
    sync_cube();
    let mut now = top;
    for other in 0..LANES {
        now = max(now, stage[unit - lane + other]);
    }
    let mut shrunk = 1.0f32;
    if now > largest {
        shrunk = (largest - now).exp();
    }
    let mut weights = Array::<f32>::new(comptime!(TILE / LANES));
    let mut sum = 0.0f32;
    #[unroll]
    for c in 0..comptime!(TILE / LANES) {
        let score = tile[first + comptime!(c * LANES)];
        let mut weight = 0.0f32;
        if score > f32::new(MASKED * 0.5) {
            weight = (score - now).exp();
        }
        weights[c] = weight;
        sum += weight;
    }
    sync_cube();
    if unit < comptime!(own * SIDE * LANES) {
        #[unroll]
        for c in 0..comptime!(TILE / LANES) {
            tile[first + comptime!(c * LANES)] = weights[c];
        }
        if lane == 0 {
            stage[UNITS + row] = shrunk;
        }
    }
    sync_cube();
    (now, fma(total, shrunk, sum))
}

/// Ends the online softmax: divides the accumulators by the sums of weights, and writes every row's logsumexp to
/// `lse_rows`. A row that sees no key keeps its zeros.
#[cube]
fn finish_softmax(
    mixed: &mut Array<f32>,
    stage: &mut Shared<[f32]>,
    lse: &mut [f32],
    lse_rows: &Rows,
    largest: f32,
    total: f32,
    writes: bool,
    #[comptime] own: usize,
    #[comptime] each: usize,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    stage[unit] = total;
    sync_cube();
    let mut denominator = 0.0f32;
    for other in 0..LANES {
        denominator += stage[unit - lane + other];
    }
    if denominator <= 0.0f32 {
        denominator = 1.0f32;
    }
    sync_cube();
    if lane == 0 {
        let row = unit / LANES;
        stage[row] = denominator;
        if writes && row < lse_rows.count {
            lse[lse_rows.at + row * lse_rows.pitch] = largest + denominator.ln();
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..own {
        let denominator = stage[unit / SIDE + comptime!(i * SIDE)];
        #[unroll]
        for j in 0..each {
            mixed[comptime!(i * each + j)] /= denominator;
        }
    }
}

/// Attention of a block of queries: the output, and the logsumexps in `lse_rows`. `queries` has the block's rows and their
/// positions. Tiles of keys begin at multiples of [`TILE`] positions from `first` on, up to `end`, so that the order of a
/// row's sums depends on its position alone, not on the block or on where its keys are.
#[cube]
pub(crate) fn attend<F: Float, K: KeyRows>(
    q: &[F],
    k: &[F],
    v: &[F],
    out: &mut [F],
    lse: &mut [f32],
    table: &[i32],
    keys: &K,
    query_rows: &Rows,
    key_rows: &Rows,
    lse_rows: &Rows,
    queries: &Tile,
    first: i32,
    end: i32,
    layout: &Layout,
    writes: bool,
    #[comptime] own: usize,
    #[comptime] sizes: Sizes,
) {
    let dim = comptime!(sizes.dim);
    let each = comptime!(dim.div_ceil(SIDE));
    let mut places = Shared::<[u32]>::new_slice(TILE);
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(own * SIDE * TILE_PITCH));
    let mut scores = Array::<f32>::new(comptime!(own * OTHER));
    let mut mixed = Array::<f32>::new(comptime!(own * each));
    clear(&mut mixed, comptime!(own * each));
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut position = first / TILE as i32 * TILE as i32;
    while position < end {
        if UNIT_POS < TILE as u32 {
            places[UNIT_POS as usize] = K::row(keys, table, position + UNIT_POS as i32);
        }
        sync_cube();
        clear(&mut scores, comptime!(own * OTHER));
        product::<F>(q, query_rows, k, key_rows, &places, &mut stage, &mut scores, own, dim);
        score(&mut scores, &at_position(queries, position), layout, own, sizes);
        write_tile(&mut scores, &mut tile, own);
        sync_cube();
        let (now, sum) = online_softmax(&mut tile, &mut stage, largest, total, own);
        largest = now;
        total = sum;
        #[unroll]
        for i in 0..own {
            let shrunk = stage[UNIT_POS as usize / SIDE + comptime!(UNITS + i * SIDE)];
            #[unroll]
            for j in 0..each {
                mixed[comptime!(i * each + j)] *= shrunk;
            }
        }
        sync_cube();
        accumulate::<F>(&mut tile, v, key_rows, &places, &mut stage, &mut mixed, own, dim);
        position += TILE as i32;
    }
    finish_softmax(&mut mixed, &mut stage, lse, lse_rows, largest, total, writes, own, each);
    store::<F>(&mut mixed, out, query_rows, writes, own, dim);
}

/// The scores of a block's queries and the keys from a position on.
#[cube]
fn at_position(queries: &Tile, position: i32) -> Tile {
    Tile {
        from: queries.from,
        rows: queries.rows,
        position: queries.position,
        step: queries.step,
        row: position,
        shift: 0i32,
        count: TILE,
        head: queries.head,
    }
}

/// The output and the logsumexps of a block of queries of one head.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attention_forward<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    out: &mut [F],
    lse: &mut [f32],
    table: &[i32],
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.dim);
    let block = query_block(table, &layout);
    let (heads, kv) = (layout.heads, layout.heads / layout.group);
    let end = block.position + block.count as i32;
    let keys =
        Spans { at: layout.spans + block.entry * SPAN_FIELDS, last: layout.spans + block.last * SPAN_FIELDS, end };
    let queries = Tile {
        from: block.from,
        rows: block.count,
        position: block.position,
        step: 1i32,
        row: 0i32,
        shift: 0i32,
        count: TILE,
        head: block.head,
    };
    let query_rows = block_rows(&block, heads, dim);
    let key_rows = Rows { at: block.head / layout.group * dim, count: TILE, pitch: kv * dim };
    let lse_rows = Rows { at: block.from * heads + block.head, count: block.count, pitch: heads };
    let first = max(block.position - layout.window + 1, 0);
    attend::<F, Spans>(
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
        &layout,
        block.writes,
        OWN,
        sizes,
    );
}
