//! Blocks of rows, the spans of rows that they see or that see them, masking, and scores.

use super::super::glu::tanh;
use crate::prefix_groups::{BLOCK_FIELDS, BlockRows, SPAN_FIELDS};
use cubecl::prelude::*;

/// Rows of a block of the kernels in `CubeCL`.
pub(super) const BLOCK: usize = BlockRows::Of64.count();

/// A masked score: finite, so that differences of scores are.
pub(in crate::cube) const MASKED: f64 = -1.0e30;

/// Sizes that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sizes {
    /// Elements of a head.
    pub dim: usize,
    /// True if scores have a soft-cap.
    pub capped: bool,
}

/// The blocks of a launch, the offsets in their table of blocks of keys and of spans, and heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Layout {
    pub blocks: usize,
    pub keys: usize,
    pub spans: usize,
    pub heads: usize,
    /// Query heads of a key head.
    pub group: usize,
    pub window: i32,
    pub scale: f32,
    /// The soft-cap, or 1 where there is none.
    pub cap: f32,
}

impl Layout {
    pub(super) fn argument(self) -> LayoutLaunch {
        let Self { blocks, keys, spans, heads, group, window, scale, cap } = self;
        LayoutLaunch::new(blocks, keys, spans, heads, group, window, scale, cap)
    }
}

/// One head of some rows: the offset of the first, how many there are, and their stride.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(in crate::cube) struct Rows {
    pub at: usize,
    pub count: usize,
    pub pitch: usize,
}

/// The work of a cube: a block of rows of one head. Its first row, how many there are, the position of the first, its
/// spans, and whether results are to be written.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Block {
    pub head: usize,
    pub from: usize,
    pub count: usize,
    pub position: i32,
    pub entry: usize,
    pub last: usize,
    pub writes: bool,
}

/// The rows of a span that matter to a block, and the difference of a row's position and its index.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Part {
    pub row: i32,
    pub end: i32,
    pub shift: i32,
}

/// Scores of a block's rows, the first of which is `from` at a position, and `count` rows of a part, of one query head.
/// Positions of a block's rows are `step` apart: 0 where they are the heads of one token.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(in crate::cube) struct Tile {
    pub from: usize,
    pub rows: usize,
    pub position: i32,
    pub step: i32,
    pub row: i32,
    pub shift: i32,
    pub count: usize,
    pub head: usize,
}

/// A cube's block of queries.
#[cube]
pub(super) fn query_block(table: &[i32], layout: &Layout) -> Block {
    block_of(table, 0usize, layout.blocks, layout.heads)
}

/// A cube's block of keys.
#[cube]
pub(super) fn key_block(table: &[i32], layout: &Layout) -> Block {
    block_of(table, layout.keys, layout.blocks, layout.heads / layout.group)
}

#[cube]
fn block_of(table: &[i32], first: usize, blocks: usize, heads: usize) -> Block {
    let at = first + min(CUBE_POS / heads, blocks - 1) * BLOCK_FIELDS;
    let from = table[at] as usize;
    Block {
        head: CUBE_POS % heads,
        from,
        count: table[at + 1] as usize - from,
        position: table[at + 2],
        entry: table[at + 3] as usize,
        last: table[at + 4] as usize,
        writes: CUBE_POS < blocks * heads,
    }
}

/// A block's rows, of `wide` elements (or vectors) each.
#[cube]
pub(super) fn block_rows(block: &Block, heads: usize, #[comptime] wide: usize) -> Rows {
    Rows { at: (block.from * heads + block.head) * wide, count: block.count, pitch: heads * wide }
}

/// Rows of a head in a part's next rows, at most `tile`.
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

/// The keys of a part's next rows for a block of queries.
#[cube]
pub(super) fn key_rows(
    part: &Part,
    block: &Block,
    layout: &Layout,
    #[comptime] wide: usize,
    #[comptime] tile: usize,
) -> Rows {
    tile_rows(part, layout.heads / layout.group, block.head / layout.group, wide, tile)
}

/// A part without the rows before `row`.
#[cube]
pub(super) fn from_row(part: &Part, row: i32) -> Part {
    Part { row, end: part.end, shift: part.shift }
}

/// The scores of a block and the next `count` rows of a part.
#[cube]
pub(super) fn tile_of(block: &Block, part: &Part, count: usize, head: usize) -> Tile {
    Tile {
        from: block.from,
        rows: block.count,
        position: block.position,
        step: 1i32,
        row: part.row,
        shift: part.shift,
        count,
        head,
    }
}

/// The keys of a span that any query of a block sees: from the first query's window to the last query.
#[cube]
pub(super) fn visible_keys(table: &[i32], layout: &Layout, entry: usize, block: &Block) -> Part {
    let at = layout.spans + entry * SPAN_FIELDS;
    let first = table[at];
    let start = table[at + 2];
    let row = first + max(block.position - layout.window + 1 - start, 0);
    let after = block.position + block.count as i32 - start;
    Part { row, end: min(table[at + 1], first + after), shift: start - first }
}

/// The queries of a span that see any key of a block: from the first key to the last whose window includes the last
/// key.
#[cube]
pub(super) fn visible_queries(table: &[i32], layout: &Layout, entry: usize, block: &Block) -> Part {
    let at = layout.spans + entry * SPAN_FIELDS;
    let first = table[at];
    let start = table[at + 2];
    let row = first + max(block.position - start, 0);
    let after = max(block.position + block.count as i32 - 1 + layout.window - start, 0);
    Part { row, end: min(table[at + 1], first + after), shift: start - first }
}

/// Returns true if a query sees a key, given their positions.
#[cube]
fn is_visible(query: i32, key: i32, window: i32) -> bool {
    key <= query && query - key < window
}

/// The score of a product of query and key, and its derivative.
#[cube]
fn scored(product: f32, layout: &Layout, #[comptime] sizes: Sizes) -> (f32, f32) {
    let mut score = product * layout.scale;
    let mut slope = layout.scale;
    if comptime!(sizes.capped) {
        let t = tanh(score / layout.cap);
        score = t * layout.cap;
        slope *= 1.0f32 - t * t;
    }
    (score, slope)
}

/// The score of query `r` of a block and key `c` of a part, given their product.
#[cube]
pub(super) fn masked_score(
    product: f32,
    r: usize,
    c: usize,
    tile: &Tile,
    layout: &Layout,
    #[comptime] sizes: Sizes,
) -> f32 {
    let (score, _) = scored(product, layout, sizes);
    let mut z = score;
    let query = tile.position + r as i32 * tile.step;
    let key = tile.row + tile.shift + c as i32;
    if r >= tile.rows || c >= tile.count || !is_visible(query, key, layout.window) {
        z = f32::new(MASKED);
    }
    z
}

/// Returns true if row `r` of a block and row `c` of a part are a query and a key that it sees, and where the query's
/// logsumexp and Δ are.
#[cube]
pub(super) fn pair_of(
    r: usize,
    c: usize,
    tile: &Tile,
    layout: &Layout,
    #[comptime] block_of_queries: bool,
) -> (bool, usize) {
    let position = tile.position + r as i32;
    let other = tile.row + tile.shift + c as i32;
    let mut seen = is_visible(other, position, layout.window);
    let mut row = tile.row as usize + c;
    if block_of_queries {
        seen = is_visible(position, other, layout.window);
        row = tile.from + r;
    }
    (r < tile.rows && c < tile.count && seen, (row * layout.heads + tile.head) * 2)
}

/// The probability P of a pair, and the gradient dS of its product, given that of value and output gradient. `at` is
/// where the query's logsumexp and Δ are in `numbers`.
#[cube]
pub(super) fn pair_gradient(
    product: f32,
    upstream: f32,
    numbers: &[f32],
    at: usize,
    layout: &Layout,
    #[comptime] sizes: Sizes,
) -> (f32, f32) {
    let (z, slope) = scored(product, layout, sizes);
    let p = (z - numbers[at]).exp();
    (p, p * (upstream - numbers[at + 1]) * slope)
}

/// See `softmax_stats`. A unit has one head of a row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn softmax_delta<F: Float>(
    out: &[F],
    gradient: &[F],
    lse: &[f32],
    statistics: &mut [f32],
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
        statistics[2 * row] = lse[row];
        statistics[2 * row + 1] = sum;
    }
}
