//! `RMSNorm` (Zhang & Sennrich, 2019): y = x / rms(x) · w over the last dimension.

use super::prelude::*;

/// Rows of a task.
const FORWARD_ROWS: usize = 8;

/// Rows of a task of the backward pass, whose weight gradients are summed first.
const ROWS: usize = 64;

/// See [`crate::rms_norm`].
pub(crate) fn rms_norm(x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Tensor<2> {
    run(RmsNorm { eps, offset }, [x, w].map(|t| input(t.clone())))
}

#[derive(Clone, Debug)]
struct RmsNorm {
    eps: f64,
    offset: f64,
}

float_kernel!(RmsNorm, 2, "norm", forward, backward);

fn forward<T: Real>(norm: &RmsNorm, [x, w]: &[FlexTensor; 2]) -> FlexTensor {
    let [rows, n] = dims(x);
    let weight = scaled::<T>(norm, w);
    let x: &[T] = elements(x);
    let mut out = vec![T::ZERO; rows * n];
    by_rows(&mut out, n, FORWARD_ROWS, |block, out| {
        let x = &x[block * FORWARD_ROWS * n..][..out.len()];
        vectorised!({
            for (out, x) in out.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
                let r = reciprocal(x, norm.eps);
                for ((out, &x), &w) in out.iter_mut().zip(x).zip(&weight) {
                    *out = x * r * w;
                }
            }
        });
    });
    tensor(out, [rows, n])
}

/// With r = 1 / rms and ĝ = g · w: dx = r (ĝ − x r² mean(ĝ x)), dw = Σ g x r.
fn backward<T: Real>(norm: &RmsNorm, [x, w]: &[FlexTensor; 2], g: &FlexTensor) -> [FlexTensor; 2] {
    let [rows, n] = dims(x);
    let w_shape: [usize; 2] = dims(w);
    let weight = scaled::<T>(norm, w);
    let (x, g): (&[T], &[T]) = (elements(x), elements(g));
    let mut dx = vec![T::ZERO; rows * n];
    let mut partial = vec![T::ZERO; rows.div_ceil(ROWS) * n];
    by_rows_of_two((&mut dx, ROWS * n), (&mut partial, n), 1, |block, dx, dw| {
        let from = block * ROWS * n;
        let (x, g) = (&x[from..][..dx.len()], &g[from..][..dx.len()]);
        vectorised!({
            // slices of known length need no bounds checks, which would prevent vector code
            let (weight, dw) = (&weight[..n], &mut dw[..n]);
            let rows = dx.chunks_exact_mut(n).zip(x.chunks_exact(n)).zip(g.chunks_exact(n));
            for ((dx, x), g) in rows {
                let (dx, x, g) = (&mut dx[..n], &x[..n], &g[..n]);
                let r = reciprocal(x, norm.eps);
                for i in 0..n {
                    dx[i] = g[i] * weight[i];
                    dw[i] += g[i] * x[i] * r;
                }
                let pull = r * r * (dot(dx, x) / T::of(n as f64));
                for i in 0..n {
                    dx[i] = r * (dx[i] - x[i] * pull);
                }
            }
        });
    });
    [tensor(dx, [rows, n]), tensor(column_sums(partial.chunks_exact(n), n), w_shape)]
}

fn scaled<T: Real>(norm: &RmsNorm, w: &FlexTensor) -> Vec<T> {
    let offset = T::of(norm.offset);
    elements::<T>(w).iter().map(|&w| w + offset).collect()
}

/// 1 / rms.
#[inline(always)]
pub(super) fn reciprocal<T: Real>(x: &[T], eps: f64) -> T {
    let mean = dot(x, x) / T::of(x.len() as f64);
    T::ONE / (mean + T::of(eps)).sqrt()
}

/// The sums of columns, row by row.
pub(super) fn column_sums<'a, T: Real>(rows: impl Iterator<Item = &'a [T]>, n: usize) -> Vec<T> {
    let mut sums = vec![T::ZERO; n];
    for row in rows {
        for (sum, &value) in sums.iter_mut().zip(row) {
            *sum += value;
        }
    }
    sums
}
