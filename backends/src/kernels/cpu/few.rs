//! Products of few rows, as decoding has them: several matrices at once, and what follows before a core lets go of its part.
//!
//! Each core takes parts of the outputs. Weights are read as they lie, once for all rows; the rows of `x` are what is packed.

use super::glu::sigmoid;
use super::linear::{Matrix, Size, Target, multiply};
use super::parallel::{Shared, dims, elements, tensor, vectorised};
use super::real::Real;
use super::tape::{each, exact, plain, wrap};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use gemm::Parallelism;
use rayon::prelude::*;
use std::ops::Range;

/// Rows up to which a product is made the other way round: those of decoding.
pub(super) const FEW: usize = 128;

/// Outputs that a core takes at a time.
const PART: usize = 128;

/// Multiplications from which products go to all cores.
const LARGE: usize = 1 << 18;

/// `x · Wᵀ` for each of several matrices `[outputs, inputs]`, with `x` of shape `[rows, inputs]`.
///
/// `None` where there are many rows, a graph, or tensors other than the CPU backend's f32 or f64.
#[must_use]
pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Tensor<2>; N]) -> Option<[Tensor<2>; N]> {
    if !(few(x) && w.iter().all(|w| alike(w, x))) {
        return None;
    }
    let (x, w) = (plain(x.clone()), w.map(|w| plain(w.clone())));
    let _span = span("product", w.iter().map(|w| flops(&x, w)).sum());
    let mut out = each!(x.dtype(), products(&x, &w, None)).into_iter();
    Some(
        w.each_ref()
            .map(|_| wrap(out.next().unwrap_or_else(|| unreachable!("one each")))),
    )
}

/// `base + x · Wᵀ`, with `base` of the result's shape.
///
/// `None` as in [`linear_each`].
#[must_use]
pub fn linear_onto(base: &Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    if !(few(x) && alike(w, x) && alike(base, x)) {
        return None;
    }
    let [base, x, w] = [base, x, w].map(|t| plain(t.clone()));
    let _span = span("product", flops(&x, &w));
    let out = each!(x.dtype(), products(&x, &[w], Some(&base)));
    out.into_iter().next().map(wrap)
}

/// `silu(x · gateᵀ) ∘ (x · upᵀ)`, the gated half of an MLP.
///
/// `None` as in [`linear_each`].
#[must_use]
pub fn linear_gated(x: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
    if !(few(x) && alike(gate, x) && alike(up, x)) {
        return None;
    }
    let [x, gate, up] = [x, gate, up].map(|t| plain(t.clone()));
    let _span = span("product", flops(&x, &gate) + flops(&x, &up));
    Some(wrap(each!(x.dtype(), gated(&x, &gate, &up))))
}

fn few(x: &Tensor<2>) -> bool {
    exact(x) && x.dims()[0] <= FEW && !x.device().is_autodiff()
}

fn alike(w: &Tensor<2>, x: &Tensor<2>) -> bool {
    exact(w) && w.dtype() == x.dtype() && !w.device().is_autodiff()
}

fn flops(x: &FlexTensor, w: &FlexTensor) -> f64 {
    let ([rows, inner], [outputs, _]) = (dims(x), dims(w));
    2.0 * (rows * inner * outputs) as f64
}

/// The rows of `x`.
struct Few<'a, T> {
    x: &'a [T],
    rows: usize,
    inner: usize,
}

impl<'a, T: Real> Few<'a, T> {
    fn of(x: &'a FlexTensor) -> Self {
        let [rows, inner] = dims(x);
        Self {
            x: elements(x),
            rows,
            inner,
        }
    }

    /// Some outputs of all rows, an output's behind each other: `[outputs, rows]`.
    fn turned(&self, w: &[T], outputs: &Range<usize>, out: &mut [T]) {
        let size = Size {
            m: outputs.len(),
            k: self.inner,
            n: self.rows,
        };
        let target = Target {
            start: out.as_mut_ptr(),
            row: self.rows,
            add: false,
        };
        let w = Matrix {
            start: w[outputs.start * self.inner..].as_ptr(),
            row: self.inner,
            column: 1,
        };
        let x = Matrix {
            start: self.x.as_ptr(),
            row: 1,
            column: self.inner,
        };
        multiply(size, target, w, x, Parallelism::None);
    }
}

/// Parts of the outputs of several matrices: which matrix, which outputs.
fn parts(outputs: impl Iterator<Item = usize>) -> Vec<(usize, Range<usize>)> {
    let cut = |(i, n): (usize, usize)| {
        let starts = (0..n).step_by(PART);
        starts.map(move |start| (i, start..(start + PART).min(n)))
    };
    outputs.enumerate().flat_map(cut).collect()
}

/// `body(scratch, part)` for all parts, on all cores where that pays.
fn on_cores<T: Real>(
    multiplications: usize,
    parts: &[(usize, Range<usize>)],
    body: impl Fn(&mut Vec<T>, &(usize, Range<usize>)) + Sync + Send,
) {
    if multiplications < LARGE {
        let mut scratch = Vec::new();
        for part in parts {
            body(&mut scratch, part);
        }
    } else {
        parts.par_iter().for_each_init(Vec::new, body);
    }
}

/// The products of `x` with several matrices, each on top of `base` where there is one.
pub(super) fn products<T: Real>(
    x: &FlexTensor,
    w: &[FlexTensor],
    base: Option<&FlexTensor>,
) -> Vec<FlexTensor> {
    let x = Few::<T>::of(x);
    let outputs: Vec<usize> = w.iter().map(|w| dims::<2>(w)[0]).collect();
    let mut out: Vec<Vec<T>> = outputs.iter().map(|n| vec![T::ZERO; x.rows * n]).collect();
    let targets: Vec<Shared<T>> = out.iter_mut().map(|o| Shared(o.as_mut_ptr())).collect();
    let w: Vec<&[T]> = w.iter().map(elements).collect();
    let base = base.map(elements::<T>);
    let parts = parts(outputs.iter().copied());
    let all: usize = outputs.iter().sum();
    on_cores(x.rows * x.inner * all, &parts, |scratch, (matrix, part)| {
        scratch.resize(part.len() * x.rows, T::ZERO);
        x.turned(w[*matrix], part, scratch);
        let place = Place {
            out: targets[*matrix],
            row: outputs[*matrix],
            first: part.start,
        };
        vectorised(
            #[inline(always)]
            || place.write(scratch, x.rows, base),
        );
    });
    let sized = out.into_iter().zip(outputs);
    sized.map(|(out, n)| tensor(out, [x.rows, n])).collect()
}

fn gated<T: Real>(x: &FlexTensor, gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let x = Few::<T>::of(x);
    let [n, _] = dims(gate);
    let (gate, up): (&[T], &[T]) = (elements(gate), elements(up));
    let mut out = vec![T::ZERO; x.rows * n];
    let target = Shared(out.as_mut_ptr());
    let parts = parts(std::iter::once(n));
    on_cores(2 * x.rows * x.inner * n, &parts, |scratch, (_, outputs)| {
        let size = outputs.len() * x.rows;
        scratch.resize(2 * size, T::ZERO);
        let (gates, ups) = scratch.split_at_mut(size);
        x.turned(gate, outputs, gates);
        x.turned(up, outputs, ups);
        let place = Place {
            out: target,
            row: n,
            first: outputs.start,
        };
        vectorised(
            #[inline(always)]
            || {
                for (gate, &up) in gates.iter_mut().zip(ups.iter()) {
                    *gate = *gate * sigmoid(*gate) * up;
                }
                place.write(gates, x.rows, None);
            },
        );
    });
    tensor(out, [x.rows, n])
}

/// Where a core's outputs go.
struct Place<T> {
    out: Shared<T>,
    /// Outputs of a row.
    row: usize,
    /// The first of this core's.
    first: usize,
}

impl<T: Real> Place<T> {
    /// Writes `[outputs, rows]` as rows of outputs, on top of what `base` has there.
    #[inline(always)]
    fn write(&self, turned: &[T], rows: usize, base: Option<&[T]>) {
        const SIDE: usize = 16;
        let outputs = turned.len() / rows;
        for left in (0..outputs).step_by(SIDE) {
            let width = SIDE.min(outputs - left);
            let turned = &turned[left * rows..];
            for row in 0..rows {
                let at = row * self.row + self.first + left;
                // SAFETY: no other core has these outputs.
                #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
                let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), width) };
                for (i, out) in out.iter_mut().enumerate() {
                    *out = turned[i * rows + row];
                }
                if let Some(base) = base {
                    for (out, &base) in out.iter_mut().zip(&base[at..]) {
                        *out += base;
                    }
                }
            }
        }
    }
}
