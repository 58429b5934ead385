//! The logs of the decays of gated `DeltaNet`, `−e^(A_log) softplus(a + dt_bias)`, and their gradients.

use super::column_sums::sum_rows;
use super::prelude::*;

/// Rows whose contributions to the gradients of `A_log` and `dt_bias` a unit sums.
const BLOCK: usize = 64;

/// See [`crate::log_decays`].
pub(crate) fn log_decays(a: &Tensor<2>, decay_log: &Tensor<2>, time_bias: &Tensor<2>) -> Tensor<2> {
    run(LogDecays, [a, decay_log, time_bias].map(|t| autodiff::input(t.clone())))
}

#[derive(Clone, Debug)]
struct LogDecays;

impl Kernel<Cube, 3> for LogDecays {
    const NAME: &str = "decays";
    type Saved = [CubeTensor; 3];

    fn forward(&self, inputs: [CubeTensor; 3]) -> (CubeTensor, Self::Saved) {
        let [a, decay_log, time_bias] = &inputs;
        let [rows, heads] = dims(a);
        let n = rows * heads;
        let out = empty(a, [rows, heads], DType::F32);
        launch!(log_decays_forward, Grid::elements([&out], n), [a, decay_log, time_bias, &out], n, heads, elem(a));
        (out, inputs)
    }

    fn backward(&self, saved: Self::Saved, gradient: CubeTensor, wanted: [bool; 3]) -> [Option<CubeTensor>; 3] {
        let [a, decay_log, time_bias] = saved;
        let [rows, heads] = dims(&a);
        let blocks = rows.div_ceil(BLOCK).max(1);
        let da = empty(&a, [rows, heads], a.dtype);
        let partial = [(); 2].map(|()| empty(&a, [blocks, heads], DType::F32));
        launch!(
            log_decays_backward,
            Grid::elements([&gradient], blocks * heads),
            [&a, &decay_log, time_bias, gradient, &da, &partial[0], &partial[1]],
            rows,
            heads,
            blocks,
            BLOCK,
            elem(&a),
        );
        let [of_log, of_bias] = partial.map(|sums| sum_rows(sums, [1, heads], decay_log.dtype));
        [wanted[0].then_some(da), wanted[1].then_some(of_log), wanted[2].then_some(of_bias)]
    }
}

/// `ln(1 + eˣ)`, also where 1 + eˣ is rounded to 1.
#[cube]
fn softplus(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    let mut rest = (1.0f32 + e).ln();
    if e < 0.01f32 {
        rest = e * (1.0f32 - e * (0.5f32 - e * f32::new(1.0 / 3.0)));
    }
    max(x, 0.0f32) + rest
}

#[cube(launch, address_type = "dynamic")]
fn log_decays_forward<F: Float>(
    a: &[F],
    decay_log: &[F],
    time_bias: &[F],
    out: &mut [f32],
    n: usize,
    heads: usize,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < n {
        let head = i % heads;
        let x = f32::cast_from(a[i]) + f32::cast_from(time_bias[head]);
        out[i] = -f32::cast_from(decay_log[head]).exp() * softplus(x);
    }
}

/// The gradient of a, and what a block of rows adds to those of `A_log` and `dt_bias`. A unit has a head of a block.
#[cube(launch, address_type = "dynamic")]
fn log_decays_backward<F: Float>(
    a: &[F],
    decay_log: &[F],
    time_bias: &[F],
    g: &[f32],
    da: &mut [F],
    of_log: &mut [f32],
    of_bias: &mut [f32],
    rows: usize,
    heads: usize,
    blocks: usize,
    height: usize,
    #[define(F)] _dtype: ElemType,
) {
    let head = ABSOLUTE_POS % heads;
    let block = ABSOLUTE_POS / heads;
    if block < blocks {
        let rate = f32::cast_from(decay_log[head]).exp();
        let bias = f32::cast_from(time_bias[head]);
        let mut log_sum = 0.0f32;
        let mut bias_sum = 0.0f32;
        let from = block * height;
        for row in from..min(from + height, rows) {
            let i = row * heads + head;
            let x = f32::cast_from(a[i]) + bias;
            let through = -g[i] * rate;
            let d = through / (1.0f32 + (-x).exp());
            log_sum += through * softplus(x);
            bias_sum += d;
            da[i] = F::cast_from(d);
        }
        of_log[ABSOLUTE_POS] = log_sum;
        of_bias[ABSOLUTE_POS] = bias_sum;
    }
}
