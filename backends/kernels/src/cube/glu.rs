//! The gate of a gated MLP: activation(gate) · up.

use super::prelude::*;
use firebrick_spec::Activation;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// See [`crate::glu`].
pub(crate) fn glu(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
    run(Glu(activation), [gate, up].map(autodiff::input))
}

/// See [`crate::glu_joined`].
pub(crate) fn glu_joined(x: &Tensor<2>, activation: Activation) -> Tensor<2> {
    glu_of(&detached(x.clone()), x.dims()[1] / 2, activation)
}

/// The gate of contiguous rows in which `turn` columns of the gate lie before as many that they open.
pub(super) fn glu_of(x: &CubeTensor, turn: usize, activation: Activation) -> Tensor<2> {
    let _span = span("gate", 0.0);
    let [rows, columns] = dims(x);
    let out = empty(x, [rows, columns / 2], x.dtype);
    let n = rows * columns / 2;
    let size = vector_size([x, &out], turn);
    let (grid, [n, turn]) = (Grid::elements([x], n / size), [n, turn].map(|n| n / size));
    launch!(forward, grid, size, [x, x, &out], n, turn, activation, true, elem(&out));
    Cube::tensor(out)
}

#[derive(Clone, Copy, Debug)]
struct Glu(Activation);

impl Kernel<Cube, 2> for Glu {
    const NAME: &str = "gate";
    type Saved = [CubeTensor; 2];

    fn forward(&self, inputs: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let [gate, up] = &inputs;
        let out = empty(gate, gate.shape(), gate.dtype);
        let n = gate.shape().num_elements();
        let size = vector_size([gate, up, &out], n);
        let n = n / size;
        launch!(forward, Grid::elements([gate], n), size, [gate, up, &out], n, n, self.0, false, elem(&out));
        (out, inputs)
    }

    fn backward(&self, [gate, up]: Self::Saved, gradient: CubeTensor, wanted: [bool; 2]) -> [Option<CubeTensor>; 2] {
        let n = gate.shape().num_elements();
        // a unit reads its elements before it writes them
        let (d_gate, gate_in_place) = reuse_or_alloc(&gate);
        let (d_up, up_in_place) = reuse_or_alloc(&up);
        let size = vector_size([&gate, &up, &gradient, &d_gate, &d_up], n);
        let n = n / size;
        let (grid, dtype) = (Grid::elements([&gate], n), elem(&gate));
        let outputs = (output_arg(&d_gate, gate_in_place, 0), output_arg(&d_up, up_in_place, 1));
        launch!(backward, grid, size, [gate, up, gradient, outputs.0, outputs.1], n, self.0, dtype);
        [wanted[0].then_some(d_gate), wanted[1].then_some(d_up)]
    }
}

/// tanh; some drivers give NaN for large arguments.
#[cube]
pub(super) fn tanh(x: f32) -> f32 {
    clamp(x, -15.0f32, 15.0f32).tanh()
}

/// The activation and its derivative.
#[cube]
pub(super) fn activation(x: f32, #[comptime] gate: Activation) -> (f32, f32) {
    match gate {
        Activation::Silu => {
            let s = 1.0f32 / (1.0f32 + (-x).exp());
            (x * s, s * (1.0f32 + x * (1.0f32 - s)))
        }
        Activation::Gelu => {
            // x Φ(x), whose slope is Φ(x) + x φ(x)
            let below = 0.5f32 * (1.0f32 + Erf::erf(x * FRAC_1_SQRT_2 as f32));
            let density = (FRAC_2_SQRT_PI * FRAC_1_SQRT_2 / 2.0) as f32 * (-0.5f32 * x * x).exp();
            (x * below, below + x * density)
        }
        Activation::GeluTanh => {
            let a = (FRAC_2_SQRT_PI * FRAC_1_SQRT_2) as f32;
            let t = tanh(a * (x + 0.044_715f32 * x * x * x));
            let slope = a * (1.0f32 + 3.0f32 * 0.044_715f32 * x * x);
            let half = 0.5f32 * (1.0f32 + t);
            (x * half, half + 0.5f32 * x * (1.0f32 - t * t) * slope)
        }
    }
}

/// activation(gate) · up. If `joined`, both are in one tensor, interleaved by `width` vectors.
#[cube(launch, address_type = "dynamic")]
fn forward<F: Float, N: Size>(
    gates: &[Vector<F, N>],
    up: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    vectors: usize,
    width: usize,
    #[comptime] kind: Activation,
    #[comptime] joined: bool,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < vectors {
        let mut gate_at = i;
        let mut up_at = i;
        if joined {
            gate_at = i / width * width + i;
            up_at = gate_at + width;
        }
        let (gate, factor) = (gates[gate_at], up[up_at]);
        let mut y = Vector::<F, N>::cast_from(0u32);
        #[unroll]
        for e in 0..N::value() {
            let (value, _) = activation(f32::cast_from(gate.extract(e)), kind);
            y.insert(e, F::cast_from(value * f32::cast_from(factor.extract(e))));
        }
        out[i] = y;
    }
}

#[cube(launch, address_type = "dynamic")]
fn backward<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    g: &[Vector<F, N>],
    d_gate: &mut [Vector<F, N>],
    d_up: &mut [Vector<F, N>],
    vectors: usize,
    #[comptime] kind: Activation,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < vectors {
        let (x, factor, incoming) = (gate[i], up[i], g[i]);
        let mut of_gate = Vector::<F, N>::cast_from(0u32);
        let mut of_up = Vector::<F, N>::cast_from(0u32);
        #[unroll]
        for e in 0..N::value() {
            let (value, slope) = activation(f32::cast_from(x.extract(e)), kind);
            let incoming = f32::cast_from(incoming.extract(e));
            let through = incoming * f32::cast_from(factor.extract(e));
            of_gate.insert(e, F::cast_from(through * slope));
            of_up.insert(e, F::cast_from(incoming * value));
        }
        d_gate[i] = of_gate;
        d_up[i] = of_up;
    }
}
