//! Causal depthwise convolution with `SiLU`, within each sequence, and its gradients. A unit has a channel of a chunk
//! of a sequence, or of a whole sequence where that continues, and keeps the inputs that it still needs in registers:
//! each input is read once.

use super::column_sums::sum_rows;
use super::glu::activation;
use super::prelude::*;
use crate::delta::{CHUNK_FIELDS, MAX_TAPS, READER_FIELDS, SEQUENCE_FIELDS, SequenceRows, SequenceTable};
use firebrick_spec::Activation;

/// Returns true if the kernels take these tensors: inputs, taps, and a pool where there is one.
pub(crate) fn takes(tensors: &[&Tensor<2>], sequences: &SequenceRows) -> bool {
    let [_, taps] = tensors[1].dims();
    alike(Operation::DeltaNet, tensors) && (1..=MAX_TAPS).contains(&taps) && sequences.table().is_some()
}

/// The sequences as the kernels take them.
fn table_of(sequences: &SequenceRows) -> SequenceTable {
    sequences.table().cloned().expect("sequences of a GPU")
}

/// See [`crate::causal_convolution`].
pub(crate) fn causal_convolution(x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Tensor<2> {
    run(Convolution(table_of(sequences)), [x, w].map(|t| autodiff::input(t.clone())))
}

/// See [`crate::continue_convolution`].
pub(crate) fn continue_convolution(
    x: &Tensor<2>,
    w: &Tensor<2>,
    pool: Tensor<2>,
    sequences: &SequenceRows,
) -> (Tensor<2>, Tensor<2>) {
    let table = table_of(sequences);
    let _span = span("convolution", 0.0);
    let [x, w] = [x, w].map(|t| detached(t.clone()));
    let pool = into_writable(detached(pool));
    let ([rows, channels], [_, taps]) = (dims(&x), dims(&w));
    let y = empty_or_zeros(&x, [rows, channels], x.dtype, table.rows == rows);
    if table.sequences > 0 {
        let (grid, words) = (Grid::elements([&x, &pool], table.sequences * channels), integers(&table.words));
        launch!(convolve_next, grid, [x, w, &pool, words, &y], table.sequences, channels, taps, elem(&y));
    }
    (Cube::tensor(y), Cube::tensor(pool))
}

#[derive(Clone, Debug)]
struct Convolution(SequenceTable);

impl Kernel<Cube, 2> for Convolution {
    const NAME: &str = "convolution";
    type Saved = [CubeTensor; 2];

    fn forward(&self, inputs: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let [x, w] = &inputs;
        let ([rows, channels], [_, taps]) = (dims(x), dims(w));
        let Self(table) = self;
        let y = empty_or_zeros(x, [rows, channels], x.dtype, table.rows == rows);
        if table.chunks > 0 {
            let (grid, words) = (Grid::elements([x], table.chunks * channels), integers(&table.words));
            let chunks = ChunksLaunch::new(table.chunks_at(), table.chunks, channels);
            launch!(convolve, grid, [x, w, words, &y], chunks, taps, elem(&y));
        }
        (y, inputs)
    }

    fn backward(&self, [x, w]: Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let ([rows, channels], [_, taps]) = (dims(&x), dims(&w));
        let dx = empty_or_zeros(&x, [rows, channels], x.dtype, self.0.rows == rows);
        // of no chunk there is one sum, of zeros
        let chunks = self.0.chunks.max(1);
        let partial = empty_or_zeros(&x, [chunks, channels * taps], DType::F32, self.0.chunks > 0);
        if self.0.chunks > 0 {
            let (grid, words) = (Grid::elements([&x, &partial], chunks * channels), integers(&self.0.words));
            let chunks = ChunksLaunch::new(self.0.chunks_at(), chunks, channels);
            launch!(convolution_backward, grid, [&x, &w, gradient, words, &dx, &partial], chunks, taps, elem(&x));
        }
        let dw = wanted[1].then(|| sum_rows(partial, [channels, taps], w.dtype));
        [wanted[0].then_some(dx), dw]
    }
}

/// Offset of the chunks in the table, their number, and channels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Chunks {
    at: usize,
    count: usize,
    channels: usize,
}

/// The taps of a channel.
#[cube]
fn load_taps<F: Float>(w: &[F], channel: usize, #[comptime] taps: usize) -> Array<f32> {
    let mut weights = Array::<f32>::new(taps);
    #[unroll]
    for tap in 0..taps {
        weights[tap] = f32::cast_from(w[channel * taps + tap]);
    }
    weights
}

/// The last inputs of a channel before a row of a sequence, the oldest first, which is never read; before the first row
/// those of its parents, and zeros before these.
#[cube]
fn load_window<F: Float>(
    x: &[F],
    table: &[i32],
    row: usize,
    sequence: usize,
    channels: usize,
    channel: usize,
    #[comptime] taps: usize,
) -> Array<f32> {
    let mut window = Array::<f32>::new(taps);
    window[0] = 0.0f32;
    let mut at = sequence * SEQUENCE_FIELDS;
    let mut first = table[at] as usize;
    let mut next = row;
    let mut known = true;
    #[unroll]
    for back in 1..taps {
        if next == first {
            let parent = table[at + 5] as usize;
            known = parent > 0;
            if known {
                at = (parent - 1) * SEQUENCE_FIELDS;
                first = table[at] as usize;
                next = table[at + 1] as usize;
            }
        }
        let mut value = 0.0f32;
        if known {
            next -= 1;
            value = f32::cast_from(x[next * channels + channel]);
        }
        window[comptime!(taps - back)] = value;
    }
    window
}

/// Bounds of a chunk's rows, its sequence, the row after that one's last, and where in the table its readers are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
struct Rows {
    start: usize,
    end: usize,
    sequence: usize,
    last: usize,
    reader: usize,
    readers_end: usize,
}

#[cube]
fn rows_of(table: &[i32], at: usize) -> Rows {
    let sequence = table[at + 2] as usize;
    let of_sequence = sequence * SEQUENCE_FIELDS;
    Rows {
        start: table[at] as usize,
        end: table[at + 1] as usize,
        sequence,
        last: table[of_sequence + 1] as usize,
        reader: table[of_sequence + 9] as usize,
        readers_end: table[of_sequence + 10] as usize,
    }
}

/// Convolves rows of a channel, given the inputs before them, which become the last ones.
#[cube]
fn convolve_rows<F: Float>(
    x: &[F],
    y: &mut [F],
    window: &mut Array<f32>,
    weights: &Array<f32>,
    start: usize,
    end: usize,
    channels: usize,
    channel: usize,
    #[comptime] taps: usize,
) {
    for row in start..end {
        let i = row * channels + channel;
        shift(window, f32::cast_from(x[i]), taps);
        let (value, _) = activation(weighted(&*window, weights, taps), Activation::Silu);
        y[i] = F::cast_from(value);
    }
}

/// Moves on to the next number.
#[cube]
fn shift(window: &mut Array<f32>, next: f32, #[comptime] taps: usize) {
    #[unroll]
    for tap in 0..comptime!(taps - 1) {
        window[tap] = window[comptime!(tap + 1)];
    }
    window[comptime!(taps - 1)] = next;
}

#[cube]
fn weighted(window: &Array<f32>, weights: &Array<f32>, #[comptime] taps: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for tap in 0..taps {
        sum += window[tap] * weights[tap];
    }
    sum
}

#[cube(launch, address_type = "dynamic")]
fn convolve<F: Float>(
    x: &[F],
    w: &[F],
    table: &[i32],
    y: &mut [F],
    chunks: Chunks,
    #[comptime] taps: usize,
    #[define(F)] _dtype: ElemType,
) {
    let channels = chunks.channels;
    let channel = ABSOLUTE_POS % channels;
    let chunk = ABSOLUTE_POS / channels;
    if chunk < chunks.count {
        let rows = rows_of(table, chunks.at + chunk * CHUNK_FIELDS);
        let weights = load_taps::<F>(w, channel, taps);
        let mut window = load_window::<F>(x, table, rows.start, rows.sequence, channels, channel, taps);
        convolve_rows::<F>(x, y, &mut window, &weights, rows.start, rows.end, channels, channel, taps);
    }
}

/// [`convolve`] of sequences that continue from their last inputs in a pool, where the new ones go.
#[cube(launch, address_type = "dynamic")]
fn convolve_next<F: Float>(
    x: &[F],
    w: &[F],
    pool: &mut [F],
    table: &[i32],
    y: &mut [F],
    sequences: usize,
    channels: usize,
    #[comptime] taps: usize,
    #[define(F)] _dtype: ElemType,
) {
    let channel = ABSOLUTE_POS % channels;
    let sequence = ABSOLUTE_POS / channels;
    if sequence < sequences {
        let at = sequence * SEQUENCE_FIELDS;
        let start = table[at] as usize;
        let end = table[at + 1] as usize;
        let state_at = table[at + 2] as usize * comptime!(taps - 1) * channels + channel;
        let begins = table[at + 3] != 0;
        let weights = load_taps::<F>(w, channel, taps);
        let mut window = Array::<f32>::new(taps);
        window[0] = 0.0f32;
        #[unroll]
        for tap in 1..taps {
            let mut value = 0.0f32;
            if !begins {
                value = f32::cast_from(pool[state_at + comptime!(tap - 1) * channels]);
            }
            window[tap] = value;
        }
        convolve_rows::<F>(x, y, &mut window, &weights, start, end, channels, channel, taps);
        #[unroll]
        for tap in 1..taps {
            pool[state_at + comptime!(tap - 1) * channels] = F::cast_from(window[tap]);
        }
    }
}

/// The gradient of the sum of a row before `SiLU`, given the inputs before the row, of which its input becomes the last.
#[cube]
fn of_sum<F: Float>(
    x: &[F],
    g: &[F],
    window: &mut Array<f32>,
    weights: &Array<f32>,
    at: usize,
    #[comptime] taps: usize,
) -> f32 {
    shift(window, f32::cast_from(x[at]), taps);
    let (_, slope) = activation(weighted(&*window, weights, taps), Activation::Silu);
    f32::cast_from(g[at]) * slope
}

/// The gradient of a chunk's inputs, and what its rows add to that of the taps: `[chunks, channels · taps]`. The sums
/// before `SiLU` are computed again, also those of the rows after the chunk that see its inputs. Behind the last row of a
/// sequence these are the rows of all sequences that go on there.
#[cube(launch, address_type = "dynamic")]
fn convolution_backward<F: Float>(
    x: &[F],
    w: &[F],
    g: &[F],
    table: &[i32],
    dx: &mut [F],
    partial: &mut [f32],
    chunks: Chunks,
    #[comptime] taps: usize,
    #[define(F)] _dtype: ElemType,
) {
    let channels = chunks.channels;
    let channel = ABSOLUTE_POS % channels;
    let chunk = ABSOLUTE_POS / channels;
    if chunk < chunks.count {
        let rows = rows_of(table, chunks.at + chunk * CHUNK_FIELDS);
        let weights = load_taps::<F>(w, channel, taps);
        let mut window = load_window::<F>(x, table, rows.start, rows.sequence, channels, channel, taps);
        let mut reader = rows.reader;
        let mut sums = Array::<f32>::new(taps);
        let mut upstream = Array::<f32>::new(taps);
        #[unroll]
        for tap in 0..taps {
            sums[tap] = 0.0f32;
            upstream[tap] = 0.0f32;
        }
        for row in rows.start..rows.end + comptime!(taps - 1) {
            let mut dz = 0.0f32;
            if row < rows.last {
                dz = of_sum::<F>(x, g, &mut window, &weights, row * channels + channel, taps);
                if row < rows.end {
                    #[unroll]
                    for tap in 0..taps {
                        sums[tap] += dz * window[tap];
                    }
                }
            } else {
                let mut more = reader < rows.readers_end;
                while more {
                    more = table[reader] as usize == row - rows.last;
                    if more {
                        let behind = table[reader + 1] as usize;
                        let of = table[reader + 2] as usize;
                        let mut inputs = load_window::<F>(x, table, behind, of, channels, channel, taps);
                        dz += of_sum::<F>(x, g, &mut inputs, &weights, behind * channels + channel, taps);
                        reader += READER_FIELDS;
                        more = reader < rows.readers_end;
                    }
                }
            }
            shift(&mut upstream, dz, taps);
            if row + 1 >= rows.start + taps {
                let mut sum = 0.0f32;
                #[unroll]
                for tap in 0..taps {
                    sum += weights[tap] * upstream[comptime!(taps - 1 - tap)];
                }
                dx[(row + 1 - taps) * channels + channel] = F::cast_from(sum);
            }
        }
        #[unroll]
        for tap in 0..taps {
            partial[(chunk * channels + channel) * taps + tap] = sums[tap];
        }
    }
}
