//! Queries and keys of some tokens in shared memory, and where heads are in rows.

use super::sizes::{PARTS, Sizes};
use crate::delta::SEQUENCE_FIELDS;
use cubecl::prelude::*;

/// Term added to the squared norm of a query or key.
const NORM_EPS: f64 = 1e-6;

/// Layout of heads and buffers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RuleLayout {
    /// Cubes or units with work.
    pub tasks: usize,
    pub keys: usize,
    pub values: usize,
    /// √`key_dim`, inverted.
    pub scale: f32,
    /// Offsets of chunks and rows in the table.
    pub chunks_at: usize,
    pub rows_at: usize,
    /// Offsets of dδ in the vectors, and in the states of gradients of states, of end states that others begin with, and
    /// of gradients of such first states.
    pub vectors_at: usize,
    pub states_at: usize,
    pub ends_at: usize,
    pub starts_at: usize,
    /// The first sequence of the generation that runs, and how many come before those that have parents.
    pub first: usize,
    pub roots: usize,
    /// Offset of products of states and their gradients, behind the gradients of queries and keys.
    pub products_at: usize,
}

/// Columns of a value head and its key head in a row of queries, keys and values.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(crate) struct HeadPlace {
    pub channels: usize,
    /// First columns of the query, of the key and of the value.
    pub query: usize,
    pub key: usize,
    pub value: usize,
}

#[cube]
pub(crate) fn place_of(layout: &RuleLayout, head: usize, #[comptime] sizes: Sizes) -> HeadPlace {
    let key_width = layout.keys * comptime!(sizes.key_dim);
    let query = head / (layout.values / layout.keys) * comptime!(sizes.key_dim);
    HeadPlace {
        channels: 2 * key_width + layout.values * comptime!(sizes.value_dim),
        query,
        key: key_width + query,
        value: 2 * key_width + head * comptime!(sizes.value_dim),
    }
}

/// A unit's column of a value head's state, in a run through a sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(crate) struct Run {
    pub start: usize,
    pub end: usize,
    pub slot: usize,
    pub begins: bool,
    /// The sequence's first chunk.
    pub chunk: usize,
    /// Places plus 1, or 0, of the end state that it begins with, and of the one that others begin with.
    pub start_state: usize,
    pub end_state: usize,
    /// Its place among sequences that have a parent; and the places of the sequences that go on behind it.
    pub place: usize,
    pub child: usize,
    pub children_end: usize,
    pub head: usize,
    pub column: usize,
    /// True if there is such a column.
    pub writes: bool,
}

#[cube]
pub(crate) fn run_of(table: &[i32], layout: &RuleLayout, #[comptime] sizes: Sizes) -> Run {
    let task = min(CUBE_POS, layout.tasks - 1);
    let slice = task % comptime!(sizes.slices());
    let column = slice * comptime!(sizes.units()) + UNIT_POS as usize;
    let head = task / comptime!(sizes.slices());
    let sequence = layout.first + head / layout.values;
    let at = sequence * SEQUENCE_FIELDS;
    let parent = table[at + 5] as usize;
    let mut start_state = 0usize;
    if parent > 0 {
        start_state = table[(parent - 1) * SEQUENCE_FIELDS + 6] as usize;
    }
    let children = table[at + 8] as usize;
    let mut child = 0usize;
    if children > 0 {
        child = table[at + 7] as usize - layout.roots;
    }
    let mut place = 0usize;
    if sequence >= layout.roots {
        place = sequence - layout.roots;
    }
    Run {
        start: table[at] as usize,
        end: table[at + 1] as usize,
        slot: table[at + 2] as usize,
        begins: table[at + 3] != 0,
        chunk: table[at + 4] as usize,
        start_state,
        end_state: table[at + 6] as usize,
        place,
        child,
        children_end: child + children,
        head: head % layout.values,
        column: min(column, comptime!(sizes.value_dim - 1)),
        writes: CUBE_POS < layout.tasks && column < comptime!(sizes.value_dim),
    }
}

/// Offset of a run's column in the `index`-th of some states.
#[cube]
pub(crate) fn column_at(run: &Run, index: usize, values: usize, #[comptime] sizes: Sizes) -> usize {
    (index * values + run.head) * comptime!(sizes.key_dim * sizes.value_dim) + run.column
}

#[cube]
pub(crate) fn read_column(
    column: &mut Array<f32>,
    states: &[f32],
    first: usize,
    wanted: bool,
    #[comptime] sizes: Sizes,
) {
    if wanted {
        #[unroll]
        for i in 0..comptime!(sizes.key_dim) {
            column[i] = states[first + comptime!(i * sizes.value_dim)];
        }
    }
}

#[cube]
pub(crate) fn write_column(
    column: &Array<f32>,
    states: &mut [f32],
    first: usize,
    wanted: bool,
    #[comptime] sizes: Sizes,
) {
    if wanted {
        #[unroll]
        for i in 0..comptime!(sizes.key_dim) {
            states[first + comptime!(i * sizes.value_dim)] = column[i];
        }
    }
}

#[cube]
pub(crate) fn add_column(column: &mut Array<f32>, states: &[f32], first: usize, #[comptime] sizes: Sizes) {
    #[unroll]
    for i in 0..comptime!(sizes.key_dim) {
        column[i] += states[first + comptime!(i * sizes.value_dim)];
    }
}

/// Copies queries and keys of `count` rows from `row` on to shared memory, divided by their norms, queries also by
/// √`key_dim`: of each token the query, then the key; zeros for tokens beyond `count`. All units of the cube call this.
#[cube]
pub(crate) fn load_keys<F: Float>(
    qkv: &[F],
    place: &HeadPlace,
    layout: &RuleLayout,
    row: usize,
    count: usize,
    stage: &mut Shared<[f32]>,
    norms: &mut Shared<[f32]>,
    #[comptime] dim: usize,
    #[comptime] tile: usize,
    #[comptime] units: usize,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(2 * tile * dim) {
        let vector = i / dim;
        let mut first = place.query;
        if vector % 2 == 1 {
            first = place.key;
        }
        let mut x = 0.0f32;
        if vector / 2 < count {
            x = f32::cast_from(qkv[(row + vector / 2) * place.channels + first + i % dim]);
        }
        stage[i] = x;
        i += units;
    }
    sync_cube();
    let mut i = UNIT_POS as usize;
    while i < comptime!(2 * tile * PARTS) {
        let vector = i / PARTS;
        let mut d = i % PARTS;
        let mut sum = 0.0f32;
        while d < dim {
            let x = stage[vector * dim + d];
            sum += x * x;
            d += PARTS;
        }
        norms[i] = sum;
        i += units;
    }
    sync_cube();
    let mut i = UNIT_POS as usize;
    while i < comptime!(2 * tile * dim) {
        let vector = i / dim;
        let mut sum = f32::new(NORM_EPS);
        for part in 0..PARTS {
            sum += norms[vector * PARTS + part];
        }
        let mut factor = 1.0f32 / sum.sqrt();
        if vector % 2 == 0 {
            factor *= layout.scale;
        }
        stage[i] *= factor;
        i += units;
    }
    sync_cube();
}

/// The factor of a vector with this sum of squares.
#[cube]
pub(crate) fn inverse_norm(squares: f32) -> f32 {
    1.0f32 / (squares + f32::new(NORM_EPS)).sqrt()
}

#[cube]
pub(crate) fn clear(numbers: &mut Array<f32>, #[comptime] count: usize) {
    #[unroll]
    for i in 0..count {
        numbers[i] = 0.0f32;
    }
}

/// The sum of what a unit adds up in four places, which do not wait for each other.
#[cube]
pub(crate) fn total(sums: &Array<f32>) -> f32 {
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}
