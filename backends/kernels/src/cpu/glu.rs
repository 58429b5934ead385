//! The gate of a gated MLP: silu(gate) · up (`SwiGLU`; Shazeer, 2020), and that of gpt-oss's experts.

use super::prelude::*;
use crate::clamped_swiglu::ALPHA;
use firebrick_spec::Activation;

/// Elements of a task.
const BLOCK: usize = 1 << 13;

/// See [`crate::glu`]: of `SiLU` alone.
pub(crate) fn glu(gate: Tensor<2>, up: Tensor<2>, _silu: Activation) -> Tensor<2> {
    run(Glu, [gate, up].map(input))
}

#[derive(Clone, Debug)]
struct Glu;

float_kernel!(Glu, 2, "gate", forward, backward);

fn forward<T: Real>(_: &Glu, [gate, up]: &[FlexTensor; 2]) -> FlexTensor {
    let shape = gate.layout().shape().clone();
    let (gate, up): (&[T], &[T]) = (elements(gate), elements(up));
    let mut out = vec![T::ZERO; gate.len()];
    by_rows(&mut out, BLOCK, 1, |block, out| {
        let from = block * BLOCK;
        let (gate, up) = (&gate[from..][..out.len()], &up[from..][..out.len()]);
        vectorised!({
            for i in 0..out.len() {
                out[i] = gate[i] * sigmoid(gate[i]) * up[i];
            }
        });
    });
    tensor(out, shape)
}

/// With s = σ(gate): d up = g · gate · s, d gate = g · up · s (1 + gate (1 − s)).
fn backward<T: Real>(_: &Glu, [gate, up]: &[FlexTensor; 2], g: &FlexTensor) -> [FlexTensor; 2] {
    let shape = gate.layout().shape().clone();
    let (gate, up, g): (&[T], &[T], &[T]) = (elements(gate), elements(up), elements(g));
    let mut d_gate = vec![T::ZERO; gate.len()];
    let mut d_up = vec![T::ZERO; gate.len()];
    by_rows_of_two((&mut d_gate, BLOCK), (&mut d_up, BLOCK), 1, |block, d_gate, d_up| {
        let (from, n) = (block * BLOCK, d_gate.len());
        let (gate, up, g) = (&gate[from..][..n], &up[from..][..n], &g[from..][..n]);
        let d_up = &mut d_up[..n];
        vectorised!({
            for i in 0..n {
                let s = sigmoid(gate[i]);
                d_up[i] = g[i] * gate[i] * s;
                d_gate[i] = g[i] * up[i] * s * (T::ONE + gate[i] * (T::ONE - s));
            }
        });
    });
    [tensor(d_gate, shape.clone()), tensor(d_up, shape)]
}

/// See [`crate::clamped_swiglu`].
pub(crate) fn clamped_swiglu(x: &Tensor<2>, limit: f64) -> Tensor<2> {
    run(Clamped { limit }, [input(x.clone())])
}

#[derive(Clone, Debug)]
struct Clamped {
    limit: f64,
}

float_kernel!(Clamped, 1, "gate", clamped_forward, clamped_backward);

/// Rows of a task whose rows have so many numbers.
fn rows_of(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

fn clamped_forward<T: Real>(&Clamped { limit }: &Clamped, [x]: &[FlexTensor; 1]) -> FlexTensor {
    let [rows, columns] = dims(x);
    let (x, width, limit, alpha): (&[T], _, _, _) = (elements(x), columns / 2, T::of(limit), T::of(ALPHA));
    let mut out = vec![T::ZERO; rows * width];
    let each = rows_of(width);
    by_rows(&mut out, width, each, |block, out| {
        let x = &x[block * each * columns..];
        vectorised!({
            for (x, out) in x.chunks_exact(columns).zip(out.chunks_exact_mut(width)) {
                let (gate, up) = x.split_at(width);
                for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                    let gate = smaller(gate, limit);
                    let up = smaller(up, limit).larger(-limit);
                    *out = (up + T::ONE) * gate * sigmoid(alpha * gate);
                }
            }
        });
    });
    tensor(out, [rows, width])
}

/// With s = σ(α gate): `d up = g · gate · s` and `d gate = g · (up + 1) · s · (1 + α gate (1 − s))`, zero where the
/// limit holds.
fn clamped_backward<T: Real>(&Clamped { limit }: &Clamped, [x]: &[FlexTensor; 1], g: &FlexTensor) -> [FlexTensor; 1] {
    let [rows, columns] = dims(x);
    let (x, g): (&[T], &[T]) = (elements(x), elements(g));
    let (width, limit, alpha) = (columns / 2, T::of(limit), T::of(ALPHA));
    let mut out = vec![T::ZERO; rows * columns];
    let each = rows_of(columns);
    by_rows(&mut out, columns, each, |block, out| {
        let (x, g) = (&x[block * each * columns..], &g[block * each * width..]);
        vectorised!({
            let rows = x.chunks_exact(columns).zip(g.chunks_exact(width));
            for (out, (x, g)) in out.chunks_exact_mut(columns).zip(rows) {
                let (gates, ups) = x.split_at(width);
                let (d_gates, d_ups) = out.split_at_mut(width);
                for i in 0..width {
                    let gate = smaller(gates[i], limit);
                    let up = smaller(ups[i], limit).larger(-limit);
                    let s = sigmoid(alpha * gate);
                    let slope = s * (T::ONE + alpha * gate * (T::ONE - s));
                    let open = |x: T| if x > limit { T::ZERO } else { T::ONE };
                    d_ups[i] = g[i] * gate * s * open(ups[i]) * open(-ups[i]);
                    d_gates[i] = g[i] * (up + T::ONE) * slope * open(gates[i]);
                }
            }
        });
    });
    [tensor(out, [rows, columns])]
}

#[inline(always)]
fn smaller<T: Real>(a: T, b: T) -> T {
    -(-a).larger(-b)
}

#[inline(always)]
pub(super) fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}
