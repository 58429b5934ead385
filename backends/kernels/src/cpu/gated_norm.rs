//! `RMSNorm` with a gate, as gated `DeltaNet` ends, and its gradients.

use super::glu::sigmoid;
use super::norm::{column_sums, reciprocal};
use super::prelude::*;

/// Rows of a task.
const ROWS: usize = 64;

/// See [`crate::gated_rms_norm`].
pub(crate) fn gated_rms_norm(x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Tensor<2> {
    run(GatedNorm { eps }, [x, z, w].map(|t| input(t.clone())))
}

#[derive(Clone, Debug)]
struct GatedNorm {
    eps: f64,
}

float_kernel!(GatedNorm, 3, "gated norm", forward, backward);

fn forward<T: Real>(&GatedNorm { eps }: &GatedNorm, [x, z, w]: &[FlexTensor; 3]) -> FlexTensor {
    let [rows, n] = dims(x);
    let (x, z, w): (&[T], &[T], &[T]) = (elements(x), elements(z), elements(w));
    let mut out = vec![T::ZERO; rows * n];
    by_rows(&mut out, n, ROWS, |block, out| {
        let from = block * ROWS * n;
        let (x, z) = (&x[from..][..out.len()], &z[from..][..out.len()]);
        vectorised!({
            let parts = out.chunks_exact_mut(n).zip(x.chunks_exact(n));
            for ((out, x), z) in parts.zip(z.chunks_exact(n)) {
                let r = reciprocal(x, eps);
                for i in 0..n {
                    out[i] = x[i] * r * w[i] * z[i] * sigmoid(z[i]);
                }
            }
        });
    });
    tensor(out, [rows, n])
}

/// With u = x / rms(x) and s = silu(z): dz = dy · u · w · s′, dw = Σ dy · u · s, du = dy · w · s, dx = (du − u mean(du
/// · u)) / rms(x).
fn backward<T: Real>(
    &GatedNorm { eps }: &GatedNorm,
    [x, z, w]: &[FlexTensor; 3],
    gradient: &FlexTensor,
) -> [FlexTensor; 3] {
    let [rows, n] = dims(x);
    let (x, z, w): (&[T], &[T], &[T]) = (elements(x), elements(z), elements(w));
    let g: &[T] = elements(gradient);
    let size = ROWS * n;
    let mut dx = vec![T::ZERO; rows * n];
    let mut dz = vec![T::ZERO; rows * n];
    let outputs = dx.par_chunks_mut(size).zip(dz.par_chunks_mut(size));
    let inputs = x.par_chunks(size).zip(z.par_chunks(size));
    let tasks = outputs.zip(inputs).zip(g.par_chunks(size));
    let partial: Vec<Vec<T>> = tasks
        .map(|(((dx, dz), (x, z)), g)| {
            let mut dw = vec![T::ZERO; n];
            vectorised!({
                for at in (0..x.len()).step_by(n) {
                    let (x, z, g) = (&x[at..][..n], &z[at..][..n], &g[at..][..n]);
                    let (dx, dz) = (&mut dx[at..][..n], &mut dz[at..][..n]);
                    let r = reciprocal(x, eps);
                    for i in 0..n {
                        let (s, u) = (sigmoid(z[i]), x[i] * r);
                        let gu = g[i] * u;
                        dz[i] = gu * w[i] * s * (T::ONE + z[i] * (T::ONE - s));
                        dw[i] += gu * z[i] * s;
                        dx[i] = g[i] * w[i] * z[i] * s;
                    }
                    let mean = dot(dx, x) * r / T::of(n as f64);
                    for i in 0..n {
                        dx[i] = r * (dx[i] - x[i] * r * mean);
                    }
                }
            });
            dw
        })
        .collect();
    let dw = column_sums(partial.iter().map(Vec::as_slice), n);
    [tensor(dx, [rows, n]), tensor(dz, [rows, n]), tensor(dw, [1, n])]
}
