//! Products of few rows, as decoding steps have them: codes are widened in registers as they are multiplied, and the
//! matrix is read once for some rows, in its few bits.
//!
//! A cube has some rows and 32 outputs, four of each unit. The units of an output take the words of its codes in turns,
//! 32 at a time, and multiply a row's inputs with four outputs at once. Then they sum their results.

use super::super::packed::codes::code;
use super::Parts;
use crate::cube::prelude::*;
use firebrick_spec::quantized::{CODE_MAP, NF4_BLOCK, NF4_GROUP};

/// Numbers of a word of codes.
pub(super) const BYTES: usize = 4;
pub(super) const NIBBLES: usize = 8;

/// bitsandbytes multiplies by this and does not divide by 127.
pub(super) const RECIPROCAL: f64 = 7.874_016e-3;

/// Outputs of a unit, and inputs of a vector in shared memory.
pub(super) const VECTOR: usize = 4;

/// Units that share an output.
const LANES: usize = 32;

/// Groups of outputs of a cube.
const GROUPS: usize = UNITS / LANES;

/// Outputs of a cube.
pub(super) const OUTPUTS: usize = GROUPS * VECTOR;

/// Rows that are summed over the units of an output at a time: shared memory stays below the 16 KiB that WebGPU
/// guarantees.
const ROWS_PER_PASS: usize = 2;

/// Most rows of a cube: their inputs fit in shared memory, and their sums in registers.
pub(super) const fn most_rows(numbers_of_word: usize) -> usize {
    16 * BYTES / numbers_of_word
}

/// Vectors of shared memory: enough for the rows' inputs of a turn, and for the sums of all units of some rows.
const fn shared_vectors(most: usize, numbers: usize) -> usize {
    let (staged, summed) = (most * numbers / VECTOR * LANES, together(most) * UNITS);
    if staged > summed { staged } else { summed }
}

const fn together(most: usize) -> usize {
    if most < ROWS_PER_PASS { most } else { ROWS_PER_PASS }
}

/// Copies the inputs of a turn to shared memory, with zeros beyond the last: the vectors of one place in a word lie
/// side by side.
#[cube]
fn stage<F: Float, N: Size>(
    x: &[F],
    shared: &mut Shared<[Vector<f32, N>]>,
    first: usize,
    rows: usize,
    word: usize,
    words: usize,
    #[comptime] most: usize,
    #[comptime] numbers: usize,
) {
    let vectors = comptime!(numbers / VECTOR);
    let mut i = UNIT_POS as usize;
    while i < comptime!(most * vectors * LANES) {
        let row = first + i / comptime!(vectors * LANES);
        let column = word + i % LANES;
        let place = i / LANES % vectors;
        let mut inputs = Vector::<f32, N>::cast_from(0u32);
        if row < rows && column < words {
            let at = (row * words + column) * numbers + place * VECTOR;
            #[unroll]
            for j in 0..VECTOR {
                inputs.insert(j, f32::cast_from(x[at + j]));
            }
        }
        shared[i] = inputs;
        i += UNITS;
    }
}

/// The scale of a block of `nf4`.
#[cube]
fn absmax(words: &[i32], block: usize, parts: &Parts) -> f32 {
    let scales = u32::reinterpret(words[parts.scales + block / BYTES]);
    let scale = (scales >> ((block % BYTES) as u32 * 8)) & 255u32;
    let entry = f32::reinterpret(words[parts.scale_map + scale as usize]);
    entry * f32::reinterpret(words[parts.groups + block / NF4_GROUP]) + f32::reinterpret(words[parts.offset])
}

/// The code of a number in a word of eight: the first of a byte is in its upper half.
#[cube]
pub(super) fn nibble(packed: u32, #[comptime] number: usize) -> usize {
    ((packed >> comptime!((8 * (number / 2) + 4 * (1 - number % 2)) as u32)) & 15u32) as usize
}

/// The numbers of a word of four outputs, before scales.
#[cube]
fn unpack<N: Size>(
    packed: Vector<i32, N>,
    map: &Shared<[f32]>,
    weights: &mut Array<Vector<f32, N>>,
    #[comptime] numbers: usize,
) {
    #[unroll]
    for j in 0..numbers {
        let mut of_outputs = Vector::<f32, N>::cast_from(0u32);
        #[unroll]
        for k in 0..VECTOR {
            let bits = packed.extract(k);
            let value =
                if comptime!(numbers == NIBBLES) { map[nibble(u32::reinterpret(bits), j)] } else { code(bits, j) };
            of_outputs.insert(k, value);
        }
        weights[j] = of_outputs;
    }
}

/// Sums the results of all units that share an output, for some rows. The result is valid in the first units, one of
/// each row and group.
#[cube]
fn reduce_units<N: Size>(
    sums: &mut Array<Vector<f32, N>>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] round: usize,
    #[comptime] each: usize,
) -> Vector<f32, N> {
    let pairs = comptime!(each * GROUPS);
    let unit = UNIT_POS as usize;
    let (row, group, part) = (unit / GROUPS % each, unit % GROUPS, unit / pairs);
    sync_cube();
    #[unroll]
    for m in 0..each {
        shared[comptime!(m * UNITS) + unit] = sums[comptime!(round * each + m)];
    }
    sync_cube();
    // as many parts as there are units for a row and group, of as many lanes as there are rows
    let mut sum = Vector::<f32, N>::cast_from(0u32);
    #[unroll]
    for i in 0..each {
        sum += shared[row * UNITS + group * LANES + part * each + i];
    }
    sync_cube();
    shared[unit] = sum;
    sync_cube();
    if part == 0 {
        #[unroll]
        for other in 1..comptime!(UNITS / pairs) {
            sum += shared[comptime!(other * pairs) + unit];
        }
    }
    sum
}

/// `x · Wᵀ` of rows `[rows, inner]`, with `numbers` of a word: four of `int8`, eight of `nf4`. Words begin where rows
/// of the matrix do.
#[cube(launch, address_type = "dynamic")]
pub(super) fn multiply<F: Float, N: Size>(
    x: &[F],
    words: &[i32],
    out: &mut [F],
    rows: usize,
    words_of_row: usize,
    outputs: usize,
    tiles: usize,
    parts: Parts,
    #[comptime] numbers: usize,
    #[comptime] most: usize,
    #[define(F)] _dtype: ElemType,
) {
    let nibbles = comptime!(numbers == NIBBLES);
    let vectors = comptime!(numbers / VECTOR);
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!(shared_vectors(most, numbers)));
    let mut map = Shared::<[f32]>::new_slice(CODE_MAP);
    let unit = UNIT_POS as usize;
    if nibbles && unit < CODE_MAP {
        map[unit] = f32::reinterpret(words[parts.code_map + unit]);
    }
    let panels = outputs.div_ceil(OUTPUTS);
    let panel = min(CUBE_POS / tiles, panels - 1);
    let first = CUBE_POS % tiles * most;
    let (lane, group) = (unit % LANES, unit / LANES);
    let mut sums = Array::<Vector<f32, N>>::new(most);
    #[unroll]
    for m in 0..most {
        sums[m] = Vector::<f32, N>::cast_from(0u32);
    }
    let mut turn = 0usize;
    while turn < words_of_row {
        stage(x, &mut shared, first, rows, turn, words_of_row, most, numbers);
        sync_cube();
        let word = turn + lane;
        if word < words_of_row {
            let mut packed = Vector::<i32, N>::cast_from(0i32);
            let mut scale = Vector::<f32, N>::cast_from(0u32);
            #[unroll]
            for k in 0..VECTOR {
                let output = min(panel * OUTPUTS + group * VECTOR + k, outputs - 1);
                let at = output * words_of_row + word;
                packed.insert(k, words[at]);
                if nibbles {
                    // the numbers of a word are of one block
                    let block = at / comptime!(NF4_BLOCK / NIBBLES);
                    scale.insert(k, absmax(words, block, &parts));
                }
            }
            let mut weights = Array::<Vector<f32, N>>::new(numbers);
            unpack(packed, &map, &mut weights, numbers);
            #[unroll]
            for m in 0..most {
                let mut products = Vector::<f32, N>::cast_from(0u32);
                #[unroll]
                for v in 0..vectors {
                    let inputs = shared[comptime!((m * vectors + v) * LANES) + lane];
                    #[unroll]
                    for j in 0..VECTOR {
                        products += Vector::<f32, N>::new(inputs.extract(j)) * weights[comptime!(v * VECTOR + j)];
                    }
                }
                if nibbles {
                    products *= scale;
                }
                sums[m] += products;
            }
        }
        sync_cube();
        turn += LANES;
    }
    let writes = CUBE_POS < tiles * panels;
    let each = comptime!(together(most));
    #[unroll]
    for round in 0..comptime!(most / each) {
        let sum = reduce_units(&mut sums, &mut shared, round, each);
        let row = first + comptime!(round * each) + unit / GROUPS % each;
        if unit < comptime!(each * GROUPS) && row < rows && writes {
            #[unroll]
            for k in 0..VECTOR {
                let output = panel * OUTPUTS + unit % GROUPS * VECTOR + k;
                if output < outputs {
                    let mut y = sum.extract(k);
                    if comptime!(!nibbles) {
                        let absmax = f32::reinterpret(words[parts.scales + output]);
                        y *= absmax * f32::new(RECIPROCAL);
                    }
                    out[row * outputs + output] = F::cast_from(y);
                }
            }
        }
    }
}
