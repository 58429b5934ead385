//! The gate of a gated MLP: silu(gate) · up (`SwiGLU`; Shazeer, 2020).

use super::autodiff::{Kernel, all_saved, dispatch_float, input, run, supports};
use super::parallel::{by_rows, by_rows_of_two, elements, tensor, vectorised};
use super::real::Real;
use crate::kernels::shapes::Gate;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

/// Elements of a task.
const BLOCK: usize = 1 << 13;

/// `silu(gate) · up`, element by element.
///
/// `None` where the kernel does not support the activation or the tensors.
pub(super) fn glu(activation: Gate, gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
    let known = activation == Gate::Silu && supports(gate) && supports(up);
    if !known || gate.dtype() != up.dtype() {
        return None;
    }
    Some(run(Glu, [input(gate.clone()), input(up.clone())]))
}

#[derive(Clone, Debug)]
struct Glu;

impl Kernel<2> for Glu {
    const NAME: &str = "gate";

    fn forward(&self, [gate, up]: &[FlexTensor; 2]) -> FlexTensor {
        dispatch_float!(gate.dtype(), forward(gate, up))
    }

    fn backward(
        &self,
        saved: [Option<FlexTensor>; 2],
        gradient: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [gate, up] = all_saved(saved);
        let [d_gate, d_up] = dispatch_float!(gate.dtype(), backward(&gate, &up, &gradient));
        [wanted[0].then_some(d_gate), wanted[1].then_some(d_up)]
    }
}

fn forward<T: Real>(gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let shape = gate.layout().shape().clone();
    let (gate, up): (&[T], &[T]) = (elements(gate), elements(up));
    let mut out = vec![T::ZERO; gate.len()];
    by_rows(&mut out, BLOCK, 1, |block, out| {
        let from = block * BLOCK;
        let (gate, up) = (&gate[from..][..out.len()], &up[from..][..out.len()]);
        vectorised(
            #[inline(always)]
            || {
                for i in 0..out.len() {
                    out[i] = gate[i] * sigmoid(gate[i]) * up[i];
                }
            },
        );
    });
    tensor(out, shape)
}

/// With s = σ(gate): d up = g · gate · s, d gate = g · up · s (1 + gate (1 − s)).
fn backward<T: Real>(gate: &FlexTensor, up: &FlexTensor, g: &FlexTensor) -> [FlexTensor; 2] {
    let shape = gate.layout().shape().clone();
    let (gate, up, g): (&[T], &[T], &[T]) = (elements(gate), elements(up), elements(g));
    let mut d_gate = vec![T::ZERO; gate.len()];
    let mut d_up = vec![T::ZERO; gate.len()];
    by_rows_of_two(
        (&mut d_gate, BLOCK),
        (&mut d_up, BLOCK),
        1,
        |block, d_gate, d_up| {
            let (from, n) = (block * BLOCK, d_gate.len());
            let (gate, up, g) = (&gate[from..][..n], &up[from..][..n], &g[from..][..n]);
            let d_up = &mut d_up[..n];
            vectorised(
                #[inline(always)]
                || {
                    for i in 0..n {
                        let s = sigmoid(gate[i]);
                        d_up[i] = g[i] * gate[i] * s;
                        d_gate[i] = g[i] * up[i] * s * (T::ONE + gate[i] * (T::ONE - s));
                    }
                },
            );
        },
    );
    [tensor(d_gate, shape.clone()), tensor(d_up, shape)]
}

#[inline(always)]
pub(super) fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}
