//! Gemma's soft-cap (arXiv:2408.00118).

use super::prelude::*;

/// Elements of a task.
const BLOCK: usize = 1 << 13;

/// See [`crate::softcap`].
pub(crate) fn softcap(x: Tensor<2>, cap: f64) -> Tensor<2> {
    run(Softcap { cap }, [input(x)])
}

#[derive(Clone, Debug)]
struct Softcap {
    cap: f64,
}

float_kernel!(Softcap, 1, "soft-cap", forward, backward);

fn forward<T: Real>(&Softcap { cap }: &Softcap, [x]: &[FlexTensor; 1]) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let (x, cap): (&[T], _) = (elements(x), T::of(cap));
    let mut out = vec![T::ZERO; x.len()];
    by_rows(&mut out, BLOCK, 1, |block, out| {
        for (out, &x) in out.iter_mut().zip(&x[block * BLOCK..]) {
            *out = cap * (x / cap).tanh();
        }
    });
    tensor(out, shape)
}

/// dx = g · (1 − tanh²(x / cap)).
fn backward<T: Real>(&Softcap { cap }: &Softcap, [x]: &[FlexTensor; 1], g: &FlexTensor) -> [FlexTensor; 1] {
    let shape = x.layout().shape().clone();
    let (x, g, cap): (&[T], &[T], _) = (elements(x), elements(g), T::of(cap));
    let mut out = vec![T::ZERO; x.len()];
    by_rows(&mut out, BLOCK, 1, |block, out| {
        let from = block * BLOCK;
        for ((out, &x), &g) in out.iter_mut().zip(&x[from..]).zip(&g[from..]) {
            let t = (x / cap).tanh();
            *out = g * (T::ONE - t * t);
        }
    });
    [tensor(out, shape)]
}
