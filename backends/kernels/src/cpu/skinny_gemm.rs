//! Skinny matrix products: few rows, as in decoding, several matrices in one call, with an epilogue (add, `SwiGLU`) on
//! results that are still in cache.
//!
//! A task has some outputs of all rows. Weights are read once, in place; only the rows of `x` are packed.

use super::glu::sigmoid;
use super::prelude::*;

/// Rows up to which a product is computed transposed, `W · xᵀ`: those of decoding.
pub(super) const MAX_ROWS: usize = 128;

/// Outputs of a task.
const PART: usize = 128;

/// Multiplications from which products run in parallel.
const LARGE: usize = 1 << 18;

/// Returns true if the kernels take these tensors: few rows, and others of their type.
pub(crate) fn takes(x: &Tensor<2>, others: &[&Tensor<2>]) -> bool {
    x.dims()[0] <= MAX_ROWS && plain(&[x]) && others.iter().all(|&w| plain(&[x, w]))
}

/// See [`crate::linear_each`].
pub(crate) fn linear_each<const N: usize>(
    x: &Tensor<2>,
    w: [&Tensor<2>; N],
    _biases: [Option<&Tensor<2>>; N],
) -> [Tensor<2>; N] {
    let x = detached(x.clone());
    let w = w.map(|w| detached(w.clone()));
    let _span = span("product", w.iter().map(|w| flops(&x, w)).sum());
    let out = dispatch_float!(x.dtype(), products(&x, &w, None));
    let mut out = out.into_iter().map(to_tensor);
    w.map(|_| out.next().unwrap_or_else(|| unreachable!("one each")))
}

/// See [`crate::linear_add`].
pub(crate) fn linear_add(base: Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    let [base, x, w] = [base, x.clone(), w.clone()].map(detached);
    let _span = span("product", flops(&x, &w));
    let out = dispatch_float!(x.dtype(), products(&x, &[w], Some(&base)));
    let mut out = out.into_iter().map(to_tensor);
    out.next().unwrap_or_else(|| unreachable!("one each"))
}

/// See [`crate::linear_swiglu`].
pub(crate) fn linear_swiglu(x: &Tensor<2>, gate: &Tensor<2>, up: &Tensor<2>) -> Tensor<2> {
    let [x, gate, up] = [x, gate, up].map(|t| detached(t.clone()));
    let _span = span("product", flops(&x, &gate) + flops(&x, &up));
    to_tensor(dispatch_float!(x.dtype(), gated(&x, &gate, &up)))
}

fn flops(x: &FlexTensor, w: &FlexTensor) -> f64 {
    let ([rows, inner], [outputs, _]) = (dims(x), dims(w));
    2.0 * (rows * inner * outputs) as f64
}

/// The rows of `x`.
struct Input<'a, T> {
    x: &'a [T],
    rows: usize,
    inner: usize,
}

impl<'a, T: Real> Input<'a, T> {
    fn new(x: &'a FlexTensor) -> Self {
        let [rows, inner] = dims(x);
        Self { x: elements(x), rows, inner }
    }

    /// Some outputs of all rows, transposed: `[outputs, rows]`.
    fn multiply_transposed(&self, w: &[T], outputs: &Range<usize>, out: &mut [T]) {
        let size = Size { m: outputs.len(), k: self.inner, n: self.rows };
        let target = Target { start: out.as_mut_ptr(), row: self.rows, add: false };
        let w = Matrix { start: w[outputs.start * self.inner..].as_ptr(), row: self.inner, column: 1 };
        let x = Matrix { start: self.x.as_ptr(), row: 1, column: self.inner };
        multiply(size, target, w, x, Parallelism::None);
    }
}

/// The tasks of several matrices: the index of the matrix, and its outputs.
fn parts(outputs: impl Iterator<Item = usize>) -> Vec<(usize, Range<usize>)> {
    let cut = |(i, n): (usize, usize)| {
        let starts = (0..n).step_by(PART);
        starts.map(move |start| (i, start..(start + PART).min(n)))
    };
    outputs.enumerate().flat_map(cut).collect()
}

/// The products of `x` with several matrices, each added to `base` where there is one.
pub(super) fn products<T: Real>(x: &FlexTensor, w: &[FlexTensor], base: Option<&FlexTensor>) -> Vec<FlexTensor> {
    let x = Input::<T>::new(x);
    let outputs: Vec<usize> = w.iter().map(|w| dims::<2>(w)[0]).collect();
    let mut out: Vec<Vec<T>> = outputs.iter().map(|n| vec![T::ZERO; x.rows * n]).collect();
    let targets: Vec<SharedPtr<T>> = out.iter_mut().map(|o| SharedPtr(o.as_mut_ptr())).collect();
    let w: Vec<&[T]> = w.iter().map(elements).collect();
    let base = base.map(elements::<T>);
    let parts = parts(outputs.iter().copied());
    let total: usize = outputs.iter().sum();
    for_each_if(x.rows * x.inner * total >= LARGE, parts.len(), Vec::new, |scratch, part| {
        let (matrix, part) = &parts[part];
        scratch.resize(part.len() * x.rows, T::ZERO);
        x.multiply_transposed(w[*matrix], part, scratch);
        let columns = Columns { out: targets[*matrix], row: outputs[*matrix], first: part.start };
        vectorised!(columns.write(scratch, x.rows, base));
    });
    let sized = out.into_iter().zip(outputs);
    sized.map(|(out, n)| tensor(out, [x.rows, n])).collect()
}

fn gated<T: Real>(x: &FlexTensor, gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let x = Input::<T>::new(x);
    let [n, _] = dims(gate);
    let (gate, up): (&[T], &[T]) = (elements(gate), elements(up));
    let mut out = vec![T::ZERO; x.rows * n];
    let target = SharedPtr(out.as_mut_ptr());
    let parts = parts(std::iter::once(n));
    for_each_if(2 * x.rows * x.inner * n >= LARGE, parts.len(), Vec::new, |scratch, part| {
        let (_, outputs) = &parts[part];
        let size = outputs.len() * x.rows;
        scratch.resize(2 * size, T::ZERO);
        let (gates, ups) = scratch.split_at_mut(size);
        x.multiply_transposed(gate, outputs, gates);
        x.multiply_transposed(up, outputs, ups);
        let columns = Columns { out: target, row: n, first: outputs.start };
        vectorised!({
            for (gate, &up) in gates.iter_mut().zip(ups.iter()) {
                *gate = *gate * sigmoid(*gate) * up;
            }
            columns.write(gates, x.rows, None);
        });
    });
    tensor(out, [x.rows, n])
}

/// The columns of the result that a task writes.
struct Columns<T> {
    out: SharedPtr<T>,
    /// Columns of the result.
    row: usize,
    /// The first of this task's.
    first: usize,
}

impl<T: Real> Columns<T> {
    /// Writes `[outputs, rows]` as rows of outputs, plus what `base` has there.
    #[inline(always)]
    fn write(&self, transposed: &[T], rows: usize, base: Option<&[T]>) {
        const SIDE: usize = 16;
        let outputs = transposed.len() / rows;
        for left in (0..outputs).step_by(SIDE) {
            let width = SIDE.min(outputs - left);
            let transposed = &transposed[left * rows..];
            for row in 0..rows {
                let at = row * self.row + self.first + left;
                // SAFETY: no other task writes these outputs.
                let out = unsafe { self.out.slice(at, width) };
                for (i, out) in out.iter_mut().enumerate() {
                    *out = transposed[i * rows + row];
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
