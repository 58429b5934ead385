//! Causal depthwise convolution with `SiLU`, within each sequence, and its gradients.

use super::glu::sigmoid;
use super::prelude::*;
use crate::delta::{SequenceRows, StateRows};

/// Rows of a task.
const ROWS: usize = 64;

/// Channels at a time: a page of f32 of each row.
const BLOCK: usize = 1024;

/// See [`crate::causal_convolution`].
pub(crate) fn causal_convolution(x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Tensor<2> {
    run(Convolution(sequences.clone()), [x, w].map(|t| input(t.clone())))
}

/// See [`crate::continue_convolution`].
pub(crate) fn continue_convolution(
    x: &Tensor<2>,
    w: &Tensor<2>,
    pool: Tensor<2>,
    sequences: &SequenceRows,
) -> (Tensor<2>, Tensor<2>) {
    let (x, w, mut pool) = (detached(x.clone()), detached(w.clone()), detached::<2>(pool));
    let out = dispatch_float!(x.dtype(), continued(&x, &w, &mut pool, sequences));
    (to_tensor(out), to_tensor(pool))
}

#[derive(Clone, Debug)]
struct Convolution(SequenceRows);

float_kernel!(Convolution, 2, "convolution", forward, backward);

/// The taps, `[taps, channels]`.
fn taps_of<T: Real>(w: &[T], taps: usize) -> Vec<T> {
    (0..taps).flat_map(|tap| w.chunks_exact(taps).map(move |w| w[tap])).collect()
}

/// The sum of what a row's inputs give: `inputs(tap)` are those of a tap, where there are any, and its weights begin
/// `stride` numbers after those of the tap before.
#[inline(always)]
fn sum_taps<'a, T: Real>(
    sum: &mut [T],
    w: &[T],
    stride: usize,
    taps: usize,
    inputs: impl Fn(usize) -> Option<&'a [T]>,
) {
    let width = sum.len();
    sum.fill(T::ZERO);
    for tap in 0..taps {
        let Some(x) = inputs(tap) else { continue };
        let w = &w[tap * stride..][..width];
        for ((sum, &x), &w) in sum.iter_mut().zip(x).zip(w) {
            *sum += x * w;
        }
    }
}

/// Consecutive rows of a sequence, and all rows of that sequence.
struct Piece {
    rows: Range<usize>,
    sequence: Range<usize>,
}

/// The rows of all sequences in tasks of [`ROWS`] or somewhat more. A task takes whole rows: the same columns of the
/// next row lie pages apart, where hardware prefetchers do not follow.
fn tasks(sequences: &[StateRows]) -> Vec<Vec<Piece>> {
    let mut tasks: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for StateRows { rows, .. } in sequences {
        for start in rows.clone().step_by(ROWS) {
            let piece = Piece { rows: start..(start + ROWS).min(rows.end), sequence: rows.clone() };
            if room == 0 {
                tasks.push(Vec::new());
                room = ROWS;
            }
            room = room.saturating_sub(piece.rows.len());
            tasks.last_mut().expect("one was pushed").push(piece);
        }
    }
    tasks
}

fn forward<T: Real>(Convolution(sequences): &Convolution, [x, w]: &[FlexTensor; 2]) -> FlexTensor {
    let ([rows, channels], [_, taps]) = (dims(x), dims(w));
    let (x, w): (&[T], &[T]) = (elements(x), elements(w));
    let w = taps_of(w, taps);
    let mut out = vec![T::ZERO; rows * channels];
    let target = SharedPtr(out.as_mut_ptr());
    tasks(sequences).par_iter().for_each(|task| {
        let places = task.iter().flat_map(|piece| {
            let blocks = (0..channels).step_by(BLOCK);
            blocks.map(move |first| (piece, first))
        });
        for (Piece { rows, sequence }, first) in places {
            let width = BLOCK.min(channels - first);
            vectorised!({
                for row in rows.clone() {
                    // SAFETY: no other task writes this row.
                    let y = unsafe { target.slice(row * channels + first, width) };
                    sum_taps(y, &w[first..], channels, taps, |tap| {
                        let source = (row + tap + 1).checked_sub(taps)?;
                        (source >= sequence.start).then(|| &x[source * channels + first..][..width])
                    });
                    for y in y {
                        *y = *y * sigmoid(*y);
                    }
                }
            });
        }
    });
    tensor(out, [rows, channels])
}

/// Gradients of inputs and taps. The sums before `SiLU` are computed again.
fn backward<T: Real>(
    Convolution(sequences): &Convolution,
    [x, w]: &[FlexTensor; 2],
    gradient: &FlexTensor,
) -> [FlexTensor; 2] {
    let ([rows, channels], [_, taps]) = (dims(x), dims(w));
    let (x, w): (&[T], &[T]) = (elements(x), elements(w));
    let pass = Pass { x, w: &taps_of(w, taps), g: elements(gradient), channels, taps };
    let mut dx = vec![T::ZERO; rows * channels];
    let target = SharedPtr(dx.as_mut_ptr());
    let partial: Vec<Vec<T>> = tasks(sequences)
        .par_iter()
        .map(|task| {
            let mut d_taps = vec![T::ZERO; taps * channels];
            let mut recent = vec![T::ZERO; taps * BLOCK];
            for piece in task {
                for first in (0..channels).step_by(BLOCK) {
                    pass.block(piece, first, &mut recent, &mut d_taps, target);
                }
            }
            d_taps
        })
        .collect();
    let mut dw = vec![T::ZERO; channels * taps];
    for part in partial {
        for (tap, part) in part.chunks_exact(channels).enumerate() {
            for (c, &d) in part.iter().enumerate() {
                dw[c * taps + tap] += d;
            }
        }
    }
    [tensor(dx, [rows, channels]), tensor(dw, [channels, taps])]
}

/// Inputs of a backward pass.
struct Pass<'a, T> {
    x: &'a [T],
    /// `[taps, channels]`.
    w: &'a [T],
    g: &'a [T],
    channels: usize,
    taps: usize,
}

impl<T: Real> Pass<'_, T> {
    /// Gradients of some channels of a piece's inputs, and what its rows add to those of the taps. An input has
    /// gradients of the sums of its own row and of the `taps − 1` rows after it: `recent` keeps so many of them.
    fn block(
        &self,
        Piece { rows, sequence }: &Piece,
        first: usize,
        recent: &mut [T],
        d_taps: &mut [T],
        target: SharedPtr<T>,
    ) {
        let (channels, taps) = (self.channels, self.taps);
        let width = BLOCK.min(channels - first);
        let columns = |row: usize| row * channels + first..row * channels + first + width;
        vectorised!({
            let end = (rows.end + taps - 1).min(sequence.end);
            for row in rows.start..rows.end + taps - 1 {
                if row < end {
                    let dz = &mut recent[row % taps * BLOCK..][..width];
                    let source = |tap: usize| {
                        let source = (row + tap + 1).checked_sub(taps)?;
                        (source >= sequence.start).then(|| &self.x[columns(source)])
                    };
                    sum_taps(dz, &self.w[first..], channels, taps, source);
                    for (z, &g) in dz.iter_mut().zip(&self.g[columns(row)]) {
                        let s = sigmoid(*z);
                        *z = g * s * (T::ONE + *z * (T::ONE - s));
                    }
                    for tap in (0..taps).filter(|_| row < rows.end) {
                        let Some(x) = source(tap) else { continue };
                        let d_tap = &mut d_taps[tap * channels + first..][..width];
                        for ((d, &x), &dz) in d_tap.iter_mut().zip(x).zip(&*dz) {
                            *d += x * dz;
                        }
                    }
                }
                // the last sum that an input is in has been there by now
                let Some(input) = (row + 1).checked_sub(taps) else {
                    continue;
                };
                if !rows.contains(&input) {
                    continue;
                }
                // SAFETY: no other task writes this row.
                let dx = unsafe { target.slice(input * channels + first, width) };
                sum_taps(dx, &self.w[first..], channels, taps, |tap| {
                    let reader = input + taps - 1 - tap;
                    (reader < end).then(|| &recent[reader % taps * BLOCK..][..width])
                });
            }
        });
    }
}

fn continued<T: Real>(x: &FlexTensor, w: &FlexTensor, pool: &mut FlexTensor, sequences: &[StateRows]) -> FlexTensor {
    let ([rows, channels], [_, taps]) = (dims(x), dims(w));
    let (x, w): (&[T], &[T]) = (elements(x), elements(w));
    let by_tap = taps_of(w, taps);
    let mut out = vec![T::ZERO; rows * channels];
    let (target, size) = (SharedPtr(out.as_mut_ptr()), (taps - 1) * channels);
    let pool = SharedPtr(elements_mut::<T>(pool).as_mut_ptr());
    for_each(sequences.len(), |sequence| {
        let StateRows { rows, slot, begins } = &sequences[sequence];
        // SAFETY: no two sequences have a slot or a row in common.
        let (last, y) =
            unsafe { (pool.slice(slot * size, size), target.slice(rows.start * channels, rows.len() * channels)) };
        if *begins {
            last.fill(T::ZERO);
        }
        vectorised!({
            for (i, y) in y.chunks_exact_mut(channels).enumerate() {
                // of the sequence's inputs, those before `taps − 1` are in the state
                sum_taps(y, &by_tap, channels, taps, |tap| {
                    Some(match (i + tap).checked_sub(taps - 1) {
                        None => &last[(i + tap) * channels..][..channels],
                        Some(new) => &x[(rows.start + new) * channels..][..channels],
                    })
                });
                for y in y {
                    *y = *y * sigmoid(*y);
                }
            }
        });
        let mut kept = Vec::with_capacity(size);
        for index in rows.len()..rows.len() + taps - 1 {
            kept.extend_from_slice(match index.checked_sub(taps - 1) {
                None => &last[index * channels..][..channels],
                Some(new) => &x[(rows.start + new) * channels..][..channels],
            });
        }
        last.copy_from_slice(&kept);
    });
    tensor(out, [rows, channels])
}
