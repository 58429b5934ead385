//! Blocks of rows, the spans of rows that they see or that see them, masking, and scores.

use super::super::glu::tanh;
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// A masked score: finite, so that differences of scores are.
pub(super) const MASKED: f64 = -1.0e30;

/// One head of some rows: the offset of the first, how many there are, and their stride.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Rows {
    pub at: usize,
    pub count: usize,
    pub pitch: usize,
}

/// A block: its first row, how many there are, the position of the first, and its spans.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Block {
    pub from: usize,
    pub count: usize,
    pub position: i32,
    pub entry: usize,
    pub last: usize,
}

/// The rows of a span that matter to a block, and the difference of a row's position and its index.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Part {
    pub row: i32,
    pub end: i32,
    pub shift: i32,
}

/// How the product of a query and a key becomes a score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Scoring {
    pub window: i32,
    pub scale: f32,
    pub cap: f32,
}

#[cube]
pub(super) fn block_of(table: &[i32], at: usize) -> Block {
    let from = table[at] as usize;
    Block {
        from,
        count: table[at + 1] as usize - from,
        position: table[at + 2],
        entry: table[at + 3] as usize,
        last: table[at + 4] as usize,
    }
}

/// One head of a block's rows, of `wide` elements (or vectors) each.
#[cube]
pub(super) fn block_rows(block: &Block, heads: usize, head: usize, #[comptime] wide: usize) -> Rows {
    Rows { at: (block.from * heads + head) * wide, count: block.count, pitch: heads * wide }
}

/// The same of a part's next rows, at most `tile`.
#[cube]
pub(super) fn tile_rows(
    part: &Part,
    heads: usize,
    head: usize,
    #[comptime] wide: usize,
    #[comptime] tile: usize,
) -> Rows {
    Rows {
        at: (part.row as usize * heads + head) * wide,
        count: min((part.end - part.row) as usize, tile),
        pitch: heads * wide,
    }
}

/// A part without the rows before `row`.
#[cube]
pub(super) fn from_row(part: &Part, row: i32) -> Part {
    Part { row, end: part.end, shift: part.shift }
}

/// The keys of a span that any query of a block sees: from the first query's window to the last query.
#[cube]
pub(super) fn visible_keys(table: &[i32], at: usize, block: &Block, window: i32) -> Part {
    let first = table[at];
    let start = table[at + 2];
    let row = first + max(block.position - window + 1 - start, 0);
    let after = block.position + block.count as i32 - start;
    Part { row, end: min(table[at + 1], first + after), shift: start - first }
}

/// The queries of a span that see any key of a block: from the first key to the last whose window includes the last
/// key.
#[cube]
pub(super) fn visible_queries(table: &[i32], at: usize, block: &Block, window: i32) -> Part {
    let first = table[at];
    let start = table[at + 2];
    let row = first + max(block.position - start, 0);
    let after = max(block.position + block.count as i32 - 1 + window - start, 0);
    Part { row, end: min(table[at + 1], first + after), shift: start - first }
}

/// Whether a query sees a key, given their positions.
#[cube]
pub(super) fn is_visible(query: i32, key: i32, window: i32) -> bool {
    key <= query && query - key < window
}

/// The score of a product of query and key, and its derivative.
#[cube]
pub(super) fn scored(product: f32, scoring: &Scoring, #[comptime] capped: bool) -> (f32, f32) {
    let mut score = product * scoring.scale;
    let mut slope = scoring.scale;
    if capped {
        let t = tanh(score / scoring.cap);
        score = t * scoring.cap;
        slope *= 1.0f32 - t * t;
    }
    (score, slope)
}

/// See `softmax_stats`. A unit has one head of a row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn softmax_delta<F: Float>(
    out: &[F],
    gradient: &[F],
    lse: &[f32],
    both: &mut [f32],
    rows: usize,
    dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let row = ABSOLUTE_POS;
    if row < rows {
        let mut sum = 0.0f32;
        for i in row * dim..row * dim + dim {
            sum += f32::cast_from(out[i]) * f32::cast_from(gradient[i]);
        }
        both[2 * row] = lse[row];
        both[2 * row + 1] = sum;
    }
}
