//! On SIMT units, in f32. A cube has some rows and a panel; a unit has four outputs, some inputs, and all the rows: it
//! widens four words in registers and reads each row's inputs once for sixteen products. Then the units of an output
//! sum their results.

use super::codes::{Epilogue, PANEL, WORD, code, silu};
use crate::cube::prelude::*;

/// Most rows of a cube: their sums fit in a unit's registers.
pub(super) const fn most_rows(epilogue: Epilogue) -> usize {
    match epilogue {
        Epilogue::SwiGlu => 8,
        Epilogue::None | Epilogue::Add => 16,
    }
}

/// Units that share a panel, each with as many outputs as a word has inputs.
const ACROSS: usize = PANEL / WORD;

/// Words of an output that are multiplied at a time, each by its own unit.
const CHUNK: usize = UNITS / ACROSS;

/// Rows that are reduced at a time, and parts of the units of an output: shared memory stays below the 16 KiB that
/// WebGPU guarantees.
const ROWS_PER_PASS: usize = 4;
const PARTS: usize = CHUNK / ROWS_PER_PASS;

/// Copies a chunk of the rows' inputs to shared memory, with zeros beyond the last.
#[cube]
fn stage<F: Float, N: Size>(
    x: &[F],
    shared: &mut Shared<[Vector<f32, N>]>,
    first: usize,
    rows: usize,
    chunk: usize,
    inner: usize,
    #[comptime] most: usize,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(most * CHUNK) {
        let row = first + i / CHUNK;
        let input = (chunk + i % CHUNK) * WORD;
        let mut vector = Vector::<f32, N>::cast_from(0u32);
        #[unroll]
        for j in 0..WORD {
            if row < rows && input + j < inner {
                vector.insert(j, f32::cast_from(x[row * inner + input + j]));
            }
        }
        shared[i] = vector;
        i += UNITS;
    }
}

/// Adds the products of a unit's words of a chunk to its sums, four outputs of each row.
#[cube]
fn accumulate<N: Size>(
    words: Vector<i32, N>,
    shared: &Shared<[Vector<f32, N>]>,
    sums: &mut Array<Vector<f32, N>>,
    #[comptime] most: usize,
) {
    let slice = UNIT_POS as usize / ACROSS;
    #[unroll]
    for j in 0..WORD {
        let mut weights = Vector::<f32, N>::cast_from(0u32);
        #[unroll]
        for output in 0..WORD {
            weights.insert(output, code(words.extract(output), j));
        }
        #[unroll]
        for m in 0..most {
            let x = shared[comptime!(m * CHUNK) + slice].extract(j);
            sums[m] += Vector::<f32, N>::new(x) * weights;
        }
    }
}

/// Sums the results of all units that share an output, for some rows. The result is valid in the first unit of each
/// output.
#[cube]
fn reduce_units<N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] round: usize,
    #[comptime] each: usize,
) -> Vector<f32, N> {
    let unit = UNIT_POS as usize;
    let row = unit / ACROSS % each;
    let part = unit / comptime!(ACROSS * each);
    sync_cube();
    #[unroll]
    for m in 0..each {
        shared[comptime!(m * UNITS) + unit] = sums[comptime!(round * each + m)];
    }
    sync_cube();
    // each part sums some slices of a row
    let mut sum = Vector::<f32, N>::cast_from(0u32);
    if part < PARTS {
        #[unroll]
        for i in 0..comptime!(CHUNK / PARTS) {
            let slice = part * comptime!(CHUNK / PARTS) + i;
            sum += shared[row * UNITS + slice * ACROSS + unit % ACROSS];
        }
    }
    sync_cube();
    shared[unit] = sum;
    sync_cube();
    if part == 0 {
        #[unroll]
        for other in 1..PARTS {
            sum += shared[comptime!(other * ACROSS * each) + unit];
        }
    }
    sum
}

/// A cube has a panel, and with `SwiGlu` that of the second matrix too.
#[cube(launch, address_type = "dynamic")]
pub(super) fn multiply<F: Float, N: Size>(
    x: &[F],
    codes: &[Vector<i32, N>],
    scales: &[f32],
    up_codes: &[Vector<i32, N>],
    up_scales: &[f32],
    out: &mut [F],
    rows: usize,
    inner: usize,
    outputs: usize,
    words: usize,
    tiles: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] most: usize,
    #[define(F)] _dtype: ElemType,
) {
    let gated = comptime!(epilogue == Epilogue::SwiGlu);
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(shared_vectors(most)));
    let panels = outputs.div_ceil(PANEL);
    let panel = min(CUBE_POS / tiles, panels - 1);
    let first = CUBE_POS % tiles * most;
    let unit = UNIT_POS as usize;
    let mut sums = Array::<Vector<f32, N>>::new(most);
    let mut up_sums = Array::<Vector<f32, N>>::new(comptime!(if gated { most } else { 1 }));
    clear(&mut sums, most);
    clear(&mut up_sums, comptime!(if gated { most } else { 1 }));
    let mut chunk = 0usize;
    while chunk < words {
        let word = chunk + unit / ACROSS;
        let mut vector = Vector::<i32, N>::cast_from(0i32);
        let mut up = Vector::<i32, N>::cast_from(0i32);
        if word < words {
            let at = (panel * words + word) * ACROSS + unit % ACROSS;
            vector = codes[at];
            if gated {
                up = up_codes[at];
            }
        }
        stage(x, &mut shared, first, rows, chunk, inner, most);
        sync_cube();
        accumulate(vector, &shared, &mut sums, most);
        if gated {
            accumulate(up, &shared, &mut up_sums, most);
        }
        sync_cube();
        chunk += CHUNK;
    }
    let writes = CUBE_POS < tiles * panels;
    let each = comptime!(if most < ROWS_PER_PASS { most } else { ROWS_PER_PASS });
    #[unroll]
    for round in 0..comptime!(most / each) {
        let sum = reduce_units(&mut sums, &mut shared, round, each);
        let mut up = Vector::<f32, N>::cast_from(0u32);
        if gated {
            up = reduce_units(&mut up_sums, &mut shared, round, each);
        }
        let row = first + comptime!(round * each) + unit / ACROSS % each;
        if unit < comptime!(ACROSS * each) && row < rows && writes {
            #[unroll]
            for j in 0..WORD {
                let output = panel * PANEL + unit % ACROSS * WORD + j;
                if output < outputs {
                    let mut y = sum.extract(j) * scales[output];
                    let at = row * outputs + output;
                    if gated {
                        y = silu(y) * (up.extract(j) * up_scales[output]);
                    } else if comptime!(epilogue == Epilogue::Add) {
                        y += f32::cast_from(out[at]);
                    }
                    out[at] = F::cast_from(y);
                }
            }
        }
    }
}

/// Sets sums to 0.
#[cube]
fn clear<N: Size>(sums: &mut Array<Vector<f32, N>>, #[comptime] count: usize) {
    #[unroll]
    for m in 0..count {
        sums[m] = Vector::<f32, N>::cast_from(0u32);
    }
}

/// Vectors of shared memory: enough for a chunk of the rows, and for the sums of all units of some rows.
const fn shared_vectors(most: usize) -> usize {
    let (staged, each) = (most * CHUNK, if most < ROWS_PER_PASS { most } else { ROWS_PER_PASS });
    if staged > each * UNITS { staged } else { each * UNITS }
}
