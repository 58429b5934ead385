//! Products of a decoding step with the norm before them and the gate or the residual stream after them.

use super::layer::{gated, rms_norm};
use super::products::{operands, product};
use super::{assert_near, fused, numbers, on_gpus, precisions, stored, values};
use crate::devices::backend;
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::device::Backend;
use firebrick_backends::kernels::{self, Activation, RmsNorm, SquaredRows};

on_gpus!(
    a_product_is_gated_as_products_and_a_gate_are,
    a_product_is_added_to_the_residual_as_one_by_one,
    a_product_of_normed_rows_is_that_of_their_norm,
    parts_of_a_product_are_added_as_their_sum_is,
    fused_products_of_a_row_are_the_same_however_many_rows_there_are,
);

const ACTIVATIONS: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

/// Types that fused products are made in: none but on NVIDIA's tensor cores.
fn fused_precisions(device: &Device) -> Vec<(DType, f64)> {
    let halves = precisions(device).into_iter().skip(1);
    halves.filter(|_| backend(device) == Backend::Cuda).collect()
}

/// `activation(x · gateᵀ) ∘ (x · upᵀ)`, with products rounded.
fn formula(
    activation: Activation,
    [rows, inner, n]: [usize; 3],
    x: &[f64],
    [gate, up]: [&[f64]; 2],
    dtype: DType,
    device: &Device,
) -> Vec<f64> {
    let rounded =
        |w: &[f64]| stored(product([rows, inner, n], (x, [inner, 1]), (w, [1, inner])), [rows, n], dtype, device).1;
    let (gate, up) = (rounded(gate), rounded(up));
    gate.iter().zip(up).map(|(&gate, up)| gated(activation, gate).0 * up).collect()
}

fn a_product_is_gated_as_products_and_a_gate_are(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        // in turns or one below the other; few rows, many, and inputs that tiles of many rows divide or do not take
        for size in [[1, 40, 8], [17, 72, 24], [64, 48, 40], [100, 64, 72], [100, 4104, 16], [70, 20, 8], [9, 24, 21]] {
            let [_, inner, n] = size;
            let [(x, xs), (gate, gates)] = operands(size, dtype, device);
            let (up, ups) = stored(numbers(n * inner, 61, 1.0), [n, inner], dtype, device);
            let joined = kernels::joined_gate_up([gate.clone(), up.clone()]);
            assert_eq!(joined.dims(), [2 * n, inner]);
            for activation in ACTIVATIONS {
                let what = format!("{activation:?} of {size:?} in {dtype:?}");
                let expected = formula(activation, size, &xs, [&gates, &ups], dtype, device);
                let found = fused(|| kernels::linear_glu(&x, &joined, activation));
                assert_near(&what, &values(found), &expected, tolerance);
            }
        }
    }
}

/// A sum of rows and a product, and its squares, where the device makes both at once.
fn residual([rows, inner, n]: [usize; 3], dtype: DType, device: &Device) -> (Option<SquaredRows>, Vec<f64>) {
    let [(x, xs), (w, ws)] = operands([rows, inner, n], dtype, device);
    let (base, bases) = stored(numbers(rows * n, 62, 2.0), [rows, n], dtype, device);
    let added = product([rows, inner, n], (&xs, [inner, 1]), (&ws, [1, inner]));
    let (_, added) = stored::<2>(added, [rows, n], dtype, device);
    let sum = bases.iter().zip(&added).map(|(a, b)| a + b).collect();
    let found = kernels::linear_residual(&base, &x, &w);
    assert_near("the residual", &values(base), &bases, 0.0);
    (found, stored::<2>(sum, [rows, n], dtype, device).1)
}

fn a_product_is_added_to_the_residual_as_one_by_one(device: &Device) {
    let taken: Vec<DType> = fused_precisions(device).iter().map(|(dtype, _)| *dtype).collect();
    for (dtype, tolerance) in precisions(device) {
        for size in [[1, 40, 32], [19, 264, 96], [64, 528, 64]] {
            let (found, expected) = residual(size, dtype, device);
            assert_eq!(found.is_some(), taken.contains(&dtype), "{size:?} in {dtype:?}");
            let Some(SquaredRows { rows, squares }) = found else { continue };
            let rows = values(rows);
            assert_near(&format!("a residual of {size:?} in {dtype:?}"), &rows, &expected, tolerance);
            let chunks: Vec<f64> = rows.chunks(32).map(|chunk| chunk.iter().map(|x| x * x).sum()).collect();
            assert_near(&format!("squares of {size:?} in {dtype:?}"), &values(squares), &chunks, 1e-6);
        }
        // many rows, and columns that are no multiple of 32
        for size in [[65, 64, 32], [3, 64, 40]] {
            assert!(residual(size, dtype, device).0.is_none(), "{size:?} in {dtype:?}");
        }
    }
}

fn a_product_of_normed_rows_is_that_of_their_norm(device: &Device) {
    for (dtype, tolerance) in fused_precisions(device) {
        for [rows, n, outputs] in [[1, 32, 32], [23, 288, 64], [64, 928, 40]] {
            let (x, _) = residual([rows, 16, n], dtype, device);
            let x = x.expect("a kernel");
            let (weight, weights) = stored(numbers(n, 63, 1.0), [1, n], dtype, device);
            let norm = RmsNorm { weight, eps: 1e-6, offset: 1.0 };
            let what = format!("{rows} normed rows of {n} by {outputs} in {dtype:?}");
            // the identity shows the norm: to the bit what its own kernel computes
            let identity = Tensor::<2>::eye(n, device).cast(dtype_of(dtype));
            let seen = kernels::rms_norm_linear(&x, &norm, &identity, None).expect("a kernel");
            let own = kernels::rms_norm(&x.rows, &norm.weight, norm.eps, norm.offset);
            let own = values(own);
            assert_eq!(values(seen), own, "{what}");
            let xs = values(x.rows.clone());
            let expected = rms_norm(&xs, &weights, &vec![0.0; rows * n], norm.eps, norm.offset).y;
            assert_near(&what, &own, &expected, tolerance);

            let (w, ws) = stored(numbers(outputs * n, 64, 1.0), [outputs, n], dtype, device);
            let found = kernels::rms_norm_linear(&x, &norm, &w, None).expect("a kernel");
            let expected = product([rows, n, outputs], (&own, [n, 1]), (&ws, [1, n]));
            assert_near(&what, &values(found), &expected, tolerance);
            let half = outputs / 2;
            let both = [0, half].map(|first| w.clone().narrow(0, first, half));
            let joined = kernels::joined_gate_up(both);
            let found = kernels::rms_norm_linear(&x, &norm, &joined, Some(Activation::Silu));
            // matrices that are no multiple of eight take no turns
            assert_eq!(found.is_some(), half % 8 == 0, "{what}");
            if let Some(found) = found {
                let split = [&ws[..half * n], &ws[half * n..]];
                let expected = formula(Activation::Silu, [rows, n, half], &own, split, dtype, device);
                assert_near(&format!("{what}, gated"), &values(found), &expected, tolerance);
            }
        }
    }
}

/// Of many rows and inputs, which several blocks divide.
fn parts_of_a_product_are_added_as_their_sum_is(device: &Device) {
    for (dtype, _) in fused_precisions(device) {
        let size = [80, 4128, 40];
        let [rows, _, n] = size;
        let [(x, _), (w, _)] = operands(size, dtype, device);
        let (base, _) = stored(numbers(rows * n, 68, 20.0), [rows, n], dtype, device);
        let (weight, _) = stored(numbers(n, 69, 1.0), [1, n], dtype, device);
        let parts = kernels::linear_parts(&x, &w).expect("parts");
        assert!(parts.dims()[0] > 1 && kernels::linear_parts(&x.clone().narrow(0, 0, 64), &w).is_none());
        let whole = kernels::linear_unpadded(&x, &w);
        let expected = kernels::add_rms_norm(base.clone(), &whole, &weight, 1e-6, 0.0);
        let found = kernels::add_rms_norm_parts(base, &parts, &weight, 1e-6, 0.0);
        for (found, expected) in found.into_iter().zip(expected) {
            assert_eq!(values(found), values(expected), "{dtype:?}");
        }
    }
}

fn dtype_of(dtype: DType) -> burn::tensor::FloatDType {
    if dtype == DType::F16 { burn::tensor::FloatDType::F16 } else { burn::tensor::FloatDType::BF16 }
}

fn fused_products_of_a_row_are_the_same_however_many_rows_there_are(device: &Device) {
    let (inner, n) = (544, 64);
    for (dtype, _) in fused_precisions(device) {
        let [(x, _), (w, _)] = operands([64, inner, n], dtype, device);
        let (base, _) = stored(numbers(64 * n, 65, 2.0), [64, n], dtype, device);
        let (weight, _) = stored(numbers(n, 66, 1.0), [1, n], dtype, device);
        let (next, _) = stored(numbers(n * n, 67, 1.0), [n, n], dtype, device);
        let norm = RmsNorm { weight, eps: 1e-6, offset: 0.0 };
        let first = |rows: usize| {
            let part = |t: &Tensor<2>| kernels::duplicate(&t.clone().narrow(0, 0, rows));
            let sum = kernels::linear_residual(&part(&base), &part(&x), &w).expect("a kernel");
            let gated = kernels::rms_norm_linear(&sum, &norm, &next, Some(Activation::Gelu)).expect("a kernel");
            [values(sum.rows), values(sum.squares), values(gated)]
        };
        let whole = first(64);
        for rows in [1, 16, 33] {
            for (few, all) in first(rows).iter().zip(&whole) {
                assert_eq!(few[..], all[..few.len()], "{rows} rows in {dtype:?}");
            }
        }
    }
}
