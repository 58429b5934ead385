//! Products with weights in 8 bits.

use super::{assert_near, cases, fused, numbers, on_gpus, precisions, stored, values};
use crate::devices::backend;
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::device::Backend;
use firebrick_backends::kernels::{self, PackedWeights};

on_gpus!(
    codes_are_the_nearest_of_255_even_steps_up_to_an_output_s_largest,
    a_product_is_that_of_what_the_codes_stand_for,
    many_rows_meet_the_same_numbers_as_few,
    a_product_goes_onto_what_is_there_or_gates_another,
    cubes_of_large_matrices_have_several_panels,
    outputs_of_zeros_are_zeros_and_of_nan_are_nan,
    what_has_a_graph_has_no_copy,
);

/// A matrix, its copy, and the numbers that the copy stands for, as the products with single inputs say.
fn quantised([outputs, inner]: [usize; 2], dtype: DType, device: &Device) -> (Vec<f64>, PackedWeights, Vec<f64>) {
    let mut raw = numbers(outputs * inner, 31, 1.0);
    for (row, raw) in raw.chunks_mut(inner).enumerate() {
        for w in raw {
            *w *= 0.5 + (row % 7) as f64;
        }
    }
    let (w, ws) = stored(raw, [outputs, inner], dtype, device);
    let packed = PackedWeights::quantize(&w).expect("a kernel");
    let singles: Vec<f64> = (0..inner * inner).map(|i| f64::from(u8::from(i % inner == i / inner))).collect();
    let (singles, _) = stored(singles, [inner, inner], DType::F32, device);
    let back = packed.linear(&singles).transpose();
    (ws, packed, values(back))
}

fn codes_are_the_nearest_of_255_even_steps_up_to_an_output_s_largest(device: &Device) {
    for (dtype, _) in precisions(device) {
        cases((1_usize..80, 1_usize..60), |(outputs, inner)| {
            let (ws, packed, back) = quantised([outputs, inner], dtype, device);
            let words = inner.div_ceil(4);
            let bytes = outputs.next_multiple_of(32) * (words + 1) * 4;
            assert_eq!(packed.bytes(), bytes);
            for (ws, back) in ws.chunks(inner).zip(back.chunks(inner)) {
                let most = ws.iter().fold(0.0, |most: f64, w| most.max(w.abs()));
                let step = most / 127.0;
                for (&w, &b) in ws.iter().zip(back) {
                    let code = b / step;
                    assert!((code - code.round()).abs() < 1e-3, "{b} of steps {step}");
                    assert!((w - b).abs() <= step * 0.5001, "{b} for {w}, steps {step}");
                }
            }
        });
    }
}

/// `x · Wᵀ`.
fn product(x: &[f64], w: &[f64], inner: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(a, b)| a * b).sum::<f64>();
    let row = |x| w.chunks(inner).map(move |w| dot(x, w));
    x.chunks(inner).flat_map(row).collect()
}

fn hold_product(rows: usize, shape: [usize; 2], (dtype, tolerance): (DType, f64), device: &Device) {
    let [outputs, inner] = shape;
    let (_, packed, codes) = quantised(shape, dtype, device);
    let (x, xs) = stored(numbers(rows * inner, 32, 1.0), [rows, inner], dtype, device);
    let expected = product(&xs, &codes, inner);
    let found = packed.linear(&x);
    assert_eq!((found.dims(), found.dtype()), ([rows, outputs], dtype));
    let what = format!("{rows} rows of {inner}, {outputs} outputs, {dtype:?}");
    assert_near(&what, &values(found), &expected, tolerance);
}

fn a_product_is_that_of_what_the_codes_stand_for(device: &Device) {
    for precision in precisions(device) {
        // inputs in whole vectors, as tensor cores want them, and not
        let inner = (1_usize..300, 1_usize..40);
        cases((1_usize..40, 1_usize..80, inner), |(rows, outputs, inner)| {
            hold_product(rows, [outputs, inner.0], precision, device);
            hold_product(rows, [outputs, inner.1 * 8], precision, device);
        });
    }
}

fn many_rows_meet_the_same_numbers_as_few(device: &Device) {
    let few = kernels::table(Backend::Wgpu).quantized(false).max_fused_rows;
    let on_cores = kernels::table(Backend::Cuda).quantized(true).max_fused_rows;
    for precision in precisions(device) {
        for rows in [few, few + 1, 150, on_cores + 1] {
            hold_product(rows, [37, 24], precision, device);
        }
        hold_product(few + 1, [37, 23], precision, device);
    }
}

fn cubes_of_large_matrices_have_several_panels(device: &Device) {
    for precision in precisions(device).into_iter().filter(|(dtype, _)| *dtype != DType::F32) {
        // as many cubes as an H200 wants, with two panels and with four, and a last block that is not full
        for outputs in [1160, 2340] {
            hold_product(1000, [outputs, 24], precision, device);
            // elsewhere a matrix is widened as a whole for so many rows
            if backend(device) == Backend::Cuda {
                hold_ends(1000, [outputs, 24], precision, device);
            }
        }
    }
}

fn hold_ends(rows: usize, shape: [usize; 2], (dtype, tolerance): (DType, f64), device: &Device) {
    let [outputs, inner] = shape;
    let what = format!("{rows} rows of {inner}, {outputs} outputs, {dtype:?}");
    let (_, gate, gates) = quantised(shape, dtype, device);
    let raw = numbers(outputs * inner, 36, 0.5);
    let (up, _) = stored(raw, shape, dtype, device);
    let up = PackedWeights::quantize(&up).expect("a kernel");
    let (x, xs) = stored(numbers(rows * inner, 37, 0.1), [rows, inner], dtype, device);
    let (base, bases) = stored(numbers(rows * outputs, 38, 1.0), [rows, outputs], dtype, device);

    let products = product(&xs, &gates, inner);
    let expected: Vec<f64> = products.iter().zip(&bases).map(|(y, b)| y + b).collect();
    let onto = fused(|| gate.linear_add(base.clone(), &x));
    assert_near(&format!("{what}: onto"), &values(onto), &expected, tolerance);
    assert_near("a base that others hold", &values(base.clone()), &bases, 0.0);
    // which is then nobody's
    let onto = fused(|| gate.linear_add(base, &x));
    assert_near(&format!("{what}: in place"), &values(onto), &expected, tolerance);

    let ups = values(up.linear(&x.clone().cast(DType::F32)));
    let silu = |y: f64| y / (1.0 + (-y).exp());
    let expected: Vec<f64> = products.iter().zip(ups).map(|(y, u)| silu(*y) * u).collect();
    let gated = fused(|| PackedWeights::linear_swiglu(&gate, &up, &x));
    assert_near(&format!("{what}: gated"), &values(gated), &expected, tolerance);
}

fn a_product_goes_onto_what_is_there_or_gates_another(device: &Device) {
    for precision in precisions(device) {
        let inner = (1_usize..300, 1_usize..40);
        cases((1_usize..40, 1_usize..80, inner), |(rows, outputs, inner)| {
            hold_ends(rows, [outputs, inner.0], precision, device);
            hold_ends(rows, [outputs, inner.1 * 8], precision, device);
        });
    }
    // what is widened as a whole is added and gated by another kernel
    let rows = kernels::table(Backend::Wgpu).quantized(false).max_fused_rows + 1;
    let (w, _) = stored(numbers(21, 39, 1.0), [3, 7], DType::F32, device);
    let packed = PackedWeights::quantize(&w).expect("a kernel");
    let (x, _) = stored(numbers(rows * 7, 40, 1.0), [rows, 7], DType::F32, device);
    let (base, bases) = stored(numbers(rows * 3, 41, 1.0), [rows, 3], DType::F32, device);
    let expected: Vec<f64> = values(packed.linear(&x)).iter().zip(&bases).map(|(y, b)| y + b).collect();
    assert_near("a sum", &values(packed.linear_add(base.clone(), &x)), &expected, 1e-5);
    assert!(kernels::fused(|| packed.linear_add(base, &x)).is_none());
    assert!(kernels::fused(|| PackedWeights::linear_swiglu(&packed, &packed, &x)).is_none());
}

fn outputs_of_zeros_are_zeros_and_of_nan_are_nan(device: &Device) {
    let inner = 8;
    let mut raw = numbers(4 * inner, 33, 1.0);
    raw[inner..2 * inner].fill(0.0);
    raw[2 * inner + 3] = f64::NAN;
    raw[3 * inner + 1] = f64::INFINITY;
    let (w, _) = stored(raw, [4, inner], DType::F32, device);
    let packed = PackedWeights::quantize(&w).expect("a kernel");
    let (x, _) = stored(numbers(inner, 34, 1.0), [1, inner], DType::F32, device);
    let y = values(packed.linear(&x));
    assert!(y[0].is_finite() && y[0] != 0.0, "{y:?}");
    assert!(y[1] == 0.0 && y[2].is_nan() && y[3].is_nan(), "{y:?}");
}

fn what_has_a_graph_has_no_copy(device: &Device) {
    let (w, _) = stored(numbers(64, 35, 1.0), [8, 8], DType::F32, device);
    let packed = PackedWeights::quantize(&w).expect("a kernel");
    let graph: Tensor<2> = w.autodiff();
    assert!(PackedWeights::quantize(&graph).is_none() && !packed.takes(&graph));
}
