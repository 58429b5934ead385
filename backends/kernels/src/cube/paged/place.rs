//! The work of a cube: some query heads of a row, and the columns that they see.

use cubecl::prelude::*;
use firebrick_spec::BLOCK_SIZE;

/// Sizes that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sizes {
    /// Query heads of a cube.
    pub heads: usize,
    pub dim: usize,
    /// True if scores have a soft-cap.
    pub capped: bool,
}

/// The rows of a step, their table, and their pool.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Layout {
    pub rows: usize,
    /// Blocks of a row in the table.
    pub stride: usize,
    pub kv: usize,
    /// Query heads of a key head, and cubes that have them.
    pub group: usize,
    pub chunks: usize,
    pub slots: usize,
    pub window: usize,
    pub scale: f32,
    /// The soft-cap, or 1 where there is none.
    pub cap: f32,
}

impl Layout {
    pub(super) fn argument(self) -> LayoutLaunch {
        let Self { rows, stride, kv, group, chunks, slots, window, scale, cap } = self;
        LayoutLaunch::new(rows, stride, kv, group, chunks, slots, window, scale, cap)
    }
}

/// The work of a cube: query heads of one key head of a row, and columns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(crate) struct Place {
    pub row: usize,
    /// The key head, counted through all rows.
    pub key_head: usize,
    /// Offset of the first query head, and how many heads.
    pub first: usize,
    pub heads: usize,
    /// The key head's first slot in the pool.
    pub base: usize,
    /// Offset of the row's blocks in the table.
    pub blocks: usize,
    /// Columns that are seen. Those before `cached` are read from the pool; the one after them, if any, is in shared
    /// memory.
    pub from: usize,
    pub to: usize,
    pub cached: usize,
}

/// The work of some query heads of a row, with all its columns, of which the last is the new one.
#[cube]
pub(super) fn place_of(
    table: &[i32],
    layout: &Layout,
    row: usize,
    head: usize,
    chunk: usize,
    window: usize,
    #[comptime] sizes: Sizes,
) -> Place {
    // a row in no sequence has no columns
    let to = table[row] as usize;
    let first = row * layout.kv * layout.group + head * layout.group + chunk * comptime!(sizes.heads);
    Place {
        row,
        key_head: row * layout.kv + head,
        first: first * comptime!(sizes.dim),
        heads: min(layout.group - chunk * comptime!(sizes.heads), comptime!(sizes.heads)),
        base: head * layout.slots,
        blocks: 3 * layout.rows + row * layout.stride,
        from: to - min(window, to),
        to,
        cached: max(to, 1) - 1,
    }
}

/// The slot of a column, or of the last where there are fewer columns.
#[cube]
pub(super) fn slot_of(table: &[i32], place: &Place, column: usize) -> usize {
    let column = min(column, max(place.to, 1) - 1);
    table[place.blocks + column / BLOCK_SIZE] as usize * BLOCK_SIZE + column % BLOCK_SIZE
}
