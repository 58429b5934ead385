//! Causal depthwise convolution with `SiLU`, within each sequence, and its gradients.

use super::autodiff::{
    Kernel, all_saved, detached, dispatch_float, input, is_full_precision, run, supports, to_tensor,
};
use super::glu::sigmoid;
use super::parallel::{SharedPtr, dims, elements, elements_mut, for_each, tensor, vectorised};
use super::real::Real;
use crate::kernels::delta::{SequenceRows, StateRows};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use rayon::prelude::*;

/// Channels of a task.
const BLOCK: usize = 64;

/// `silu(Σₜ w[c, t] · x[row − (taps − 1) + t, c])` of `x`, `[rows, channels]`, and `w`, `[channels, taps]`.
///
/// `None` where the kernels do not support the tensors.
pub(super) fn causal_convolution(
    x: &Tensor<2>,
    w: &Tensor<2>,
    sequences: &SequenceRows,
) -> Option<Tensor<2>> {
    if !(supports(x) && supports(w)) || x.dtype() != w.dtype() {
        return None;
    }
    let kernel = Convolution(sequences.clone());
    Some(run(kernel, [input(x.clone()), input(w.clone())]))
}

/// The same of sequences that begin with their last inputs in a pool, `[slots, (taps − 1) · channels]`, where the new last ones go.
///
/// Gives the pool back where the kernels do not support the tensors.
pub(super) fn continue_convolution(
    x: &Tensor<2>,
    w: &Tensor<2>,
    pool: Tensor<2>,
    sequences: &SequenceRows,
) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
    let same = is_full_precision(x) && w.dtype() == x.dtype() && pool.dtype() == x.dtype();
    if !same || x.device().is_autodiff() {
        return Err(pool);
    }
    let (x, w, mut pool) = (
        detached(x.clone()),
        detached(w.clone()),
        detached::<2>(pool),
    );
    let out = dispatch_float!(x.dtype(), continued(&x, &w, &mut pool, sequences));
    Ok((to_tensor(out), to_tensor(pool)))
}

#[derive(Clone, Debug)]
struct Convolution(SequenceRows);

impl Kernel<2> for Convolution {
    const NAME: &str = "convolution";

    fn forward(&self, inputs: &[FlexTensor; 2]) -> FlexTensor {
        dispatch_float!(inputs[0].dtype(), forward(inputs, &self.0))
    }

    fn backward(
        &self,
        saved: [Option<FlexTensor>; 2],
        gradient: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let inputs = all_saved(saved);
        let [dx, dw] = dispatch_float!(inputs[0].dtype(), backward(&inputs, &gradient, &self.0));
        [wanted[0].then_some(dx), wanted[1].then_some(dw)]
    }
}

/// The taps of some channels, `[taps, channels]`.
fn taps_of<T: Real>(w: &[T], first: usize, width: usize, taps: usize) -> Vec<T> {
    let own = |tap: usize| (first..first + width).map(move |c| w[c * taps + tap]);
    (0..taps).flat_map(own).collect()
}

/// Adds to the sum of a row what its inputs give: `inputs(tap)` are those of a tap, where there are any.
#[inline(always)]
fn sum_taps<'a, T: Real>(
    sum: &mut [T],
    w: &[T],
    taps: usize,
    inputs: impl Fn(usize) -> Option<&'a [T]>,
) {
    let width = sum.len();
    sum.fill(T::ZERO);
    for tap in 0..taps {
        let Some(x) = inputs(tap) else { continue };
        let w = &w[tap * width..][..width];
        for ((sum, &x), &w) in sum.iter_mut().zip(x).zip(w) {
            *sum += x * w;
        }
    }
}

fn forward<T: Real>([x, w]: &[FlexTensor; 2], sequences: &[StateRows]) -> FlexTensor {
    let ([rows, channels], [_, taps]) = (dims(x), dims(w));
    let (x, w): (&[T], &[T]) = (elements(x), elements(w));
    let mut out = vec![T::ZERO; rows * channels];
    let target = SharedPtr(out.as_mut_ptr());
    (0..channels.div_ceil(BLOCK))
        .into_par_iter()
        .for_each(|block| {
            let first = block * BLOCK;
            let width = BLOCK.min(channels - first);
            let own = taps_of(w, first, width, taps);
            vectorised(
                #[inline(always)]
                || {
                    for StateRows { rows, .. } in sequences {
                        for row in rows.clone() {
                            // SAFETY: no other task writes these channels.
                            #[allow(
                                unsafe_code,
                                reason = "tasks write disjoint parts of one tensor"
                            )]
                            let y = unsafe {
                                let at = target.get().add(row * channels + first);
                                std::slice::from_raw_parts_mut(at, width)
                            };
                            sum_taps(y, &own, taps, |tap| {
                                let source = (row + tap + 1).checked_sub(taps)?;
                                (source >= rows.start)
                                    .then(|| &x[source * channels + first..][..width])
                            });
                            for y in y {
                                *y = *y * sigmoid(*y);
                            }
                        }
                    }
                },
            );
        });
    tensor(out, [rows, channels])
}

/// Gradients of inputs and taps. The sums before `SiLU` are computed again.
fn backward<T: Real>(
    [x, w]: &[FlexTensor; 2],
    gradient: &FlexTensor,
    sequences: &[StateRows],
) -> [FlexTensor; 2] {
    let ([rows, channels], [_, taps]) = (dims(x), dims(w));
    let (x, w): (&[T], &[T]) = (elements(x), elements(w));
    let g: &[T] = elements(gradient);
    let mut dx = vec![T::ZERO; rows * channels];
    let mut dw = vec![T::ZERO; channels * taps];
    let target = SharedPtr(dx.as_mut_ptr());
    dw.par_chunks_mut(BLOCK * taps)
        .enumerate()
        .for_each(|(block, dw)| {
            let first = block * BLOCK;
            let width = dw.len() / taps;
            let own = taps_of(w, first, width, taps);
            let (mut dz, mut d_taps) = (vec![T::ZERO; width], vec![T::ZERO; taps * width]);
            vectorised(
                #[inline(always)]
                || {
                    for StateRows { rows, .. } in sequences {
                        for row in rows.clone() {
                            let source = |tap: usize| {
                                let source = (row + tap + 1).checked_sub(taps)?;
                                (source >= rows.start).then_some(source * channels + first)
                            };
                            sum_taps(&mut dz, &own, taps, |tap| Some(&x[source(tap)?..][..width]));
                            let g = &g[row * channels + first..][..width];
                            for (z, &g) in dz.iter_mut().zip(g) {
                                let s = sigmoid(*z);
                                *z = g * s * (T::ONE + *z * (T::ONE - s));
                            }
                            for tap in 0..taps {
                                let Some(at) = source(tap) else { continue };
                                // SAFETY: no other task writes these channels.
                                #[allow(
                                    unsafe_code,
                                    reason = "tasks write disjoint parts of one tensor"
                                )]
                                let dx = unsafe {
                                    std::slice::from_raw_parts_mut(target.get().add(at), width)
                                };
                                let (w, d_tap) = (&own[tap * width..], &mut d_taps[tap * width..]);
                                let (x, d_tap) = (&x[at..][..width], &mut d_tap[..width]);
                                for c in 0..width {
                                    dx[c] += w[c] * dz[c];
                                    d_tap[c] += x[c] * dz[c];
                                }
                            }
                        }
                    }
                },
            );
            for (c, dw) in dw.chunks_exact_mut(taps).enumerate() {
                for (tap, dw) in dw.iter_mut().enumerate() {
                    *dw = d_taps[tap * width + c];
                }
            }
        });
    [tensor(dx, [rows, channels]), tensor(dw, [channels, taps])]
}

fn continued<T: Real>(
    x: &FlexTensor,
    w: &FlexTensor,
    pool: &mut FlexTensor,
    sequences: &[StateRows],
) -> FlexTensor {
    let ([rows, channels], [_, taps]) = (dims(x), dims(w));
    let (x, w): (&[T], &[T]) = (elements(x), elements(w));
    let own = taps_of(w, 0, channels, taps);
    let mut out = vec![T::ZERO; rows * channels];
    let (target, size) = (SharedPtr(out.as_mut_ptr()), (taps - 1) * channels);
    let pool = SharedPtr(elements_mut::<T>(pool).as_mut_ptr());
    for_each(sequences.len(), |sequence| {
        let StateRows { rows, slot, begins } = &sequences[sequence];
        // SAFETY: no two sequences have a slot or a row in common.
        #[allow(unsafe_code, reason = "tasks write disjoint parts of two tensors")]
        let (last, y) = unsafe {
            let last = std::slice::from_raw_parts_mut(pool.get().add(slot * size), size);
            let first = target.get().add(rows.start * channels);
            (
                last,
                std::slice::from_raw_parts_mut(first, rows.len() * channels),
            )
        };
        if *begins {
            last.fill(T::ZERO);
        }
        vectorised(
            #[inline(always)]
            || {
                for (i, y) in y.chunks_exact_mut(channels).enumerate() {
                    // of the sequence's inputs, those before `taps − 1` are in the state
                    sum_taps(y, &own, taps, |tap| {
                        Some(match (i + tap).checked_sub(taps - 1) {
                            None => &last[(i + tap) * channels..][..channels],
                            Some(new) => &x[(rows.start + new) * channels..][..channels],
                        })
                    });
                    for y in y {
                        *y = *y * sigmoid(*y);
                    }
                }
            },
        );
        let kept: Vec<T> = (rows.len()..rows.len() + taps - 1)
            .flat_map(|index| match index.checked_sub(taps - 1) {
                None => &last[index * channels..][..channels],
                Some(new) => &x[(rows.start + new) * channels..][..channels],
            })
            .copied()
            .collect();
        last.copy_from_slice(&kept);
    });
    tensor(out, [rows, channels])
}
