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

/// A sequence, and the rows of others that taps join with its own.
struct Span {
    rows: Range<usize>,
    /// Inputs before the first one, the last of them first: those of sequences that this one goes on behind.
    before: Vec<usize>,
    /// For each of the `taps − 1` places behind the last row the rows there, and their spans, of sequences that go on
    /// behind this one; nothing where none does.
    after: Vec<Vec<(usize, usize)>>,
}

impl Span {
    fn all(sequences: &SequenceRows, taps: usize) -> Vec<Self> {
        let span = |(i, StateRows { rows, .. }): (usize, &StateRows)| {
            let readers = sequences.readers(i, taps - 1);
            let mut after = vec![Vec::new(); readers.last().map_or(0, |last| last.offset + 1)];
            for reader in readers {
                after[reader.offset].push((reader.row, reader.sequence));
            }
            Self { rows: rows.clone(), before: sequences.rows_before(i, taps - 1), after }
        };
        sequences.iter().enumerate().map(span).collect()
    }

    /// The input so many rows before a row of the sequence.
    #[inline(always)]
    fn input(&self, row: usize, back: usize) -> Option<usize> {
        let index = row - self.rows.start;
        if back <= index { Some(row - back) } else { self.before.get(back - index - 1).copied() }
    }
}

/// Consecutive rows of a sequence.
struct Piece<'a> {
    rows: Range<usize>,
    span: &'a Span,
}

/// The rows of all sequences in tasks of [`ROWS`] or somewhat more. A task takes whole rows: the same columns of the
/// next row lie pages apart, where hardware prefetchers do not follow.
fn tasks(spans: &[Span]) -> Vec<Vec<Piece<'_>>> {
    let mut tasks: Vec<Vec<Piece<'_>>> = Vec::new();
    let mut room = 0;
    for span in spans {
        for start in span.rows.clone().step_by(ROWS) {
            let piece = Piece { rows: start..(start + ROWS).min(span.rows.end), span };
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
    tasks(&Span::all(sequences, taps)).par_iter().for_each(|task| {
        let places = task.iter().flat_map(|piece| {
            let blocks = (0..channels).step_by(BLOCK);
            blocks.map(move |first| (piece, first))
        });
        for (Piece { rows, span }, first) in places {
            let width = BLOCK.min(channels - first);
            vectorised!({
                for row in rows.clone() {
                    // SAFETY: no other task writes this row.
                    let y = unsafe { target.slice(row * channels + first, width) };
                    sum_taps(y, &w[first..], channels, taps, |tap| {
                        let source = span.input(row, taps - 1 - tap)?;
                        Some(&x[source * channels + first..][..width])
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
    let spans = Span::all(sequences, taps);
    let pass = Pass { x, w: &taps_of(w, taps), g: elements(gradient), spans: &spans, channels, taps };
    let mut dx = vec![T::ZERO; rows * channels];
    let target = SharedPtr(dx.as_mut_ptr());
    let partial: Vec<Vec<T>> = tasks(&spans)
        .par_iter()
        .map(|task| {
            let mut d_taps = vec![T::ZERO; taps * channels];
            // of the rows that see an input, and of one of a sequence behind
            let mut recent = vec![T::ZERO; (taps + 1) * BLOCK];
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
    spans: &'a [Span],
    channels: usize,
    taps: usize,
}

impl<T: Real> Pass<'_, T> {
    /// Columns of the input that a row multiplies with a tap.
    #[inline(always)]
    fn input(&self, span: &Span, row: usize, tap: usize, first: usize, width: usize) -> Option<&[T]> {
        let source = span.input(row, self.taps - 1 - tap)?;
        Some(&self.x[source * self.channels + first..][..width])
    }

    /// Gradients of some columns of a row's sums.
    #[inline(always)]
    fn of_sums(&self, dz: &mut [T], span: &Span, row: usize, first: usize) {
        let width = dz.len();
        let source = |tap| self.input(span, row, tap, first, width);
        sum_taps(dz, &self.w[first..], self.channels, self.taps, source);
        for (z, &g) in dz.iter_mut().zip(&self.g[row * self.channels + first..]) {
            let s = sigmoid(*z);
            *z = g * s * (T::ONE + *z * (T::ONE - s));
        }
    }

    /// Gradients of some channels of a piece's inputs, and what its rows add to those of the taps. An input has
    /// gradients of the sums of its row and of the `taps − 1` rows after it: `recent` keeps so many of them. Behind a
    /// sequence's last row these are sums over the sequences that go on there.
    fn block(
        &self,
        Piece { rows, span }: &Piece<'_>,
        first: usize,
        recent: &mut [T],
        d_taps: &mut [T],
        target: SharedPtr<T>,
    ) {
        let (channels, taps) = (self.channels, self.taps);
        let width = BLOCK.min(channels - first);
        vectorised!({
            let end = (rows.end + taps - 1).min(span.rows.end + span.after.len());
            for row in rows.start..rows.end + taps - 1 {
                let (recent, one) = recent.split_at_mut(taps * BLOCK);
                if row < end {
                    let dz = &mut recent[row % taps * BLOCK..][..width];
                    match row.checked_sub(span.rows.end) {
                        None => self.of_sums(dz, span, row, first),
                        Some(place) => {
                            dz.fill(T::ZERO);
                            for &(row, behind) in &span.after[place] {
                                let one = &mut one[..width];
                                self.of_sums(one, &self.spans[behind], row, first);
                                for (dz, &one) in dz.iter_mut().zip(&*one) {
                                    *dz += one;
                                }
                            }
                        }
                    }
                    for tap in (0..taps).filter(|_| row < rows.end) {
                        let Some(x) = self.input(span, row, tap, first, width) else { continue };
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
