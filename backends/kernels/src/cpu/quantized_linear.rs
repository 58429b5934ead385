//! Products with frozen matrices in few bits: rows of the matrix are widened a tile at a time, forward and backward.

use super::half;
use super::prelude::*;
use firebrick_device::quantized::widen_rows;
use firebrick_spec::QuantizedLayout;
use firebrick_spec::quantized::CPU_TILE;
use std::fmt::Debug;

/// Rows of a task that widens.
const ROWS: usize = 8;

/// See [`crate::quantized_linear`].
pub(crate) fn quantized_linear(x: &Tensor<2>, words: &Tensor<2>, layout: QuantizedLayout) -> Tensor<2> {
    quantized_product(x, words, layout, All)
}

/// A product of rows with their matrices.
pub(super) fn quantized_product(
    x: &Tensor<2>,
    words: &Tensor<2>,
    layout: QuantizedLayout,
    rows: impl Rows,
) -> Tensor<2> {
    let matrices = Matrices { words: detached(words.clone()), layout, stored: x.dtype() };
    run(QuantizedProduct { matrices, rows }, [input(x.clone())])
}

/// Assignment of rows to matrices.
pub(super) trait Rows: Clone + Debug + Send + 'static {
    /// The kernel's name in recordings of [`firebrick_device::trace`].
    const NAME: &'static str;

    /// `x · Wᵀ`
    fn product<T: Real>(&self, matrices: &Matrices, x: &FlexTensor) -> FlexTensor;

    /// `g · W`
    fn gradient<T: Real>(&self, matrices: &Matrices, g: &FlexTensor) -> FlexTensor;
}

/// Matrices in few bits, all of one shape.
#[derive(Clone, Debug)]
pub(super) struct Matrices {
    /// `[matrices, words]`.
    words: FlexTensor,
    pub layout: QuantizedLayout,
    /// The type of the activations, which the widened numbers are rounded to.
    stored: DType,
}

impl Matrices {
    pub fn coded(&self, index: usize) -> Coded<'_> {
        let (words, each) = (elements(&self.words), self.layout.words());
        Coded { words: &words[index * each..(index + 1) * each], layout: self.layout.one(), stored: self.stored }
    }
}

#[derive(Clone, Debug)]
struct QuantizedProduct<R> {
    matrices: Matrices,
    rows: R,
}

impl<R: Rows> Kernel<1> for QuantizedProduct<R> {
    const NAME: &str = R::NAME;

    fn saves(&self) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: &[FlexTensor; 1]) -> FlexTensor {
        dispatch_float!(x.dtype(), forward(self, x))
    }

    fn backward(&self, _saved: Maybe<1>, gradient: FlexTensor, wanted: [bool; 1]) -> Maybe<1> {
        let back = || dispatch_float!(gradient.dtype(), backward(self, &gradient));
        [wanted[0].then(back)]
    }
}

fn forward<T: Real>(kernel: &QuantizedProduct<impl Rows>, x: &FlexTensor) -> FlexTensor {
    kernel.rows.product::<T>(&kernel.matrices, x)
}

fn backward<T: Real>(kernel: &QuantizedProduct<impl Rows>, g: &FlexTensor) -> FlexTensor {
    kernel.rows.gradient::<T>(&kernel.matrices, g)
}

/// All rows go with one matrix.
#[derive(Clone, Debug)]
struct All;

impl Rows for All {
    const NAME: &'static str = "product";

    fn product<T: Real>(&self, matrices: &Matrices, x: &FlexTensor) -> FlexTensor {
        let ([rows, inner], outputs) = (dims(x), matrices.layout.rows);
        let _span = span("product", 2.0 * (rows * inner * outputs) as f64);
        let mut out = vec![T::ZERO; rows * outputs];
        product(matrices.coded(0), elements::<T>(x), rows, &mut out);
        tensor(out, [rows, outputs])
    }

    fn gradient<T: Real>(&self, matrices: &Matrices, g: &FlexTensor) -> FlexTensor {
        let ([rows, outputs], inner) = (dims(g), matrices.layout.cols);
        let _span = span("product", 2.0 * (rows * inner * outputs) as f64);
        let mut out = vec![T::ZERO; rows * inner];
        gradient(matrices.coded(0), elements::<T>(g), rows, &mut out);
        tensor(out, [rows, inner])
    }
}

/// A matrix in few bits, and the type that its numbers are rounded to.
#[derive(Clone, Copy)]
pub(super) struct Coded<'a> {
    pub words: &'a [f32],
    pub layout: QuantizedLayout,
    pub stored: DType,
}

impl Coded<'_> {
    /// Rows of the matrix that are wide at a time: their number follows from its shape alone.
    fn tile(&self) -> usize {
        (CPU_TILE / self.layout.cols.max(1)).clamp(1, self.layout.rows.max(1))
    }

    /// Widens rows from `first` on, on all cores.
    fn widen<T: Real>(&self, first: usize, out: &mut [T]) {
        let (cols, words) = (self.layout.cols, self.words);
        by_rows(out, cols, ROWS, |part, out| {
            let first = first + part * ROWS;
            if T::dtype() == DType::F32 {
                let floats: &mut [f32] = bytemuck::cast_slice_mut(out);
                widen_rows(words, self.layout, first, floats);
                half::round(floats, self.stored);
                return;
            }
            let mut wide = vec![0.0_f32; out.len()];
            widen_rows(words, self.layout, first, &mut wide);
            for (out, wide) in out.iter_mut().zip(wide) {
                *out = T::of(f64::from(wide));
            }
        });
    }

    /// Runs `each` with every tile: its first row, how many it has, and its numbers.
    fn tiles<T: Real>(&self, mut each: impl FnMut(usize, usize, &[T])) {
        let [tile, outputs, inner] = [self.tile(), self.layout.rows, self.layout.cols];
        let mut wide = vec![T::ZERO; tile * inner];
        for first in (0..outputs).step_by(tile) {
            let count = tile.min(outputs - first);
            let floats = &mut wide[..count * inner];
            self.widen(first, floats);
            each(first, count, floats);
        }
    }
}

/// `x · Wᵀ` of so many rows: the outputs of a tile at a time.
pub(super) fn product<T: Real>(coded: Coded<'_>, x: &[T], rows: usize, out: &mut [T]) {
    let (outputs, inner) = (coded.layout.rows, coded.layout.cols);
    coded.tiles(|first, count, wide: &[T]| {
        let size = Size { m: rows, k: inner, n: count };
        let target = Target { start: out[first..].as_mut_ptr(), row: outputs, add: false };
        let by_row = Matrix { start: x.as_ptr(), row: inner, column: 1 };
        let transposed = Matrix { start: wide.as_ptr(), row: 1, column: inner };
        multiply(size, target, by_row, transposed, size.parallelism());
    });
}

/// `g · W` of so many rows: the sums over the outputs of a tile at a time, in their order.
pub(super) fn gradient<T: Real>(coded: Coded<'_>, g: &[T], rows: usize, out: &mut [T]) {
    let (outputs, inner) = (coded.layout.rows, coded.layout.cols);
    coded.tiles(|first, count, wide: &[T]| {
        let size = Size { m: rows, k: count, n: inner };
        let target = Target { start: out.as_mut_ptr(), row: inner, add: first > 0 };
        let columns = Matrix { start: g[first..].as_ptr(), row: outputs, column: 1 };
        let by_row = Matrix { start: wide.as_ptr(), row: inner, column: 1 };
        multiply_in_any_order(size, target, columns, by_row, size.parallelism());
    });
}
