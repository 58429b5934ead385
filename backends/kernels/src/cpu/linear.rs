//! Matrix products: x · Wᵀ with its gradients, which have the memory layout of `W`, and products without autodiff.

use super::half;
use super::prelude::*;
use super::skinny_gemm::{self, MAX_ROWS, products};
use crate::shapes::Transposed;

/// See [`crate::linear`].
pub(crate) fn linear(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    run(Linear { trains: w.is_require_grad() }, [x, w].map(|t| input(t.clone())))
}

#[derive(Clone, Debug)]
struct Linear {
    trains: bool,
}

impl Kernel<2> for Linear {
    const NAME: &str = "product";

    fn saves(&self) -> [bool; 2] {
        [self.trains, true]
    }

    fn forward(&self, [x, w]: &[FlexTensor; 2]) -> FlexTensor {
        let ([rows, inner], [outputs, _]) = (dims(x), dims(w));
        if rows <= MAX_ROWS {
            let out = dispatch_float!(x.dtype(), products(x, std::slice::from_ref(w), None));
            let one = out.into_iter().next();
            one.unwrap_or_else(|| unreachable!("one each"))
        } else {
            let size = [rows, inner, outputs];
            dispatch_float!(x.dtype(), multiplied(size, (x, [inner, 1]), (w, [1, inner]), multiply))
        }
    }

    fn backward(&self, [x, w]: Maybe<2>, gradient: FlexTensor, wanted: [bool; 2]) -> Maybe<2> {
        let [w] = all_saved([w]);
        let ([rows, outputs], [_, inner]) = (dims(&gradient), dims(&w));
        let g = &gradient;
        let dx = || {
            let size = [rows, outputs, inner];
            dispatch_float!(w.dtype(), multiplied(size, (g, [outputs, 1]), (&w, [inner, 1]), multiply_in_any_order))
        };
        let dw = |x: FlexTensor| {
            let size = [outputs, rows, inner];
            dispatch_float!(w.dtype(), multiplied(size, (g, [1, outputs]), (&x, [inner, 1]), multiply_in_any_order))
        };
        // a weight that is neither leaf nor constant would silently lose its gradient
        assert!(x.is_some() || !wanted[1], "the matrix of kernels::linear must be a leaf or a constant");
        [wanted[0].then(dx), x.filter(|_| wanted[1]).map(dw)]
    }
}

/// The product of a `[m, k]` and a `[k, n]` matrix, each with its strides of rows and columns.
fn multiplied<T: Real>(
    [m, k, n]: [usize; 3],
    (a, a_strides): (&FlexTensor, [usize; 2]),
    (b, b_strides): (&FlexTensor, [usize; 2]),
    multiply: Multiply<T>,
) -> FlexTensor {
    let _span = span("product", 2.0 * (m * k * n) as f64);
    let (size, mut out) = (Size { m, k, n }, Vec::with_capacity(m * n));
    multiply(
        size,
        Target { start: out.as_mut_ptr(), row: n, add: false },
        Matrix { start: elements::<T>(a).as_ptr(), row: a_strides[0], column: a_strides[1] },
        Matrix { start: elements::<T>(b).as_ptr(), row: b_strides[0], column: b_strides[1] },
        size.parallelism(),
    );
    // SAFETY: the product has written every one of the m · n elements.
    unsafe {
        out.set_len(m * n);
    }
    tensor(out, [m, n])
}

/// Returns true if [`matmul`] and [`linear_wide`] take these matrices, which may be stored in different types.
pub(crate) fn takes(a: &Tensor<2>, b: &Tensor<2>) -> bool {
    supports(a) && supports(b) && compute_dtype(a.dtype()) == compute_dtype(b.dtype())
}

/// See [`crate::linear_wide`].
pub(crate) fn linear_wide(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    if skinny_gemm::takes(x, &[w]) {
        let [y] = skinny_gemm::linear_each(x, [w], [None]);
        return y;
    }
    matmul(x, w, Transposed::Right)
}

/// See [`crate::matmul`]: in f32 where they are stored in half precision.
pub(crate) fn matmul(a: &Tensor<2>, b: &Tensor<2>, transposed: Transposed) -> Tensor<2> {
    let [a, b] = [a, b].map(|t| half::widened(detached(t.clone())));
    let ([rows, columns], [b_rows, b_columns]) = (dims(&a), dims(&b));
    let (size, a_strides, b_strides) = match transposed {
        Transposed::Neither => ([rows, columns, b_columns], [columns, 1], [b_columns, 1]),
        Transposed::Left => ([columns, rows, b_columns], [1, columns], [b_columns, 1]),
        Transposed::Right => ([rows, columns, b_rows], [columns, 1], [1, columns]),
    };
    to_tensor(match transposed {
        Transposed::Right => dispatch_float!(a.dtype(), multiplied(size, (&a, a_strides), (&b, b_strides), multiply)),
        // only gradients multiply so
        _ => dispatch_float!(a.dtype(), multiplied(size, (&a, a_strides), (&b, b_strides), multiply_in_any_order)),
    })
}
