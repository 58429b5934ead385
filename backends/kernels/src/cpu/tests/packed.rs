//! Products with matrices in panels, as they are and in 8 bits.

use super::{assert_same, fused, numbers};
use crate::{PackedWeights, linear, linear_add, rms_norm, with_team};
use burn::tensor::activation::silu;
use burn::tensor::{DType, Device, Tensor, TensorData};

const KNOWN: &str = "f32 on the CPU";

/// Rows, inputs and outputs: fewer and more rows than a group has, inputs that end within a chunk and within a step of
/// it.
const SHAPES: [[usize; 3]; 6] = [[1, 3, 5], [11, 33, 71], [64, 128, 200], [150, 40, 32], [70, 303, 45], [2, 513, 96]];

#[test]
fn products_with_panels_are_their_formulas() {
    for [rows, inner, outer] in SHAPES {
        let x = numbers([rows, inner], 5);
        let [a, b] = [6, 7].map(|seed| numbers([outer, inner], seed));
        let c = numbers([3, inner], 8);
        let plain = |w: &Tensor<2>| x.clone().matmul(w.clone().transpose());
        let pack = |w: &Tensor<2>| PackedWeights::pack(w).expect(KNOWN);
        let [pa, pb, pc] = [&a, &b, &c].map(pack);
        let actual = fused(|| PackedWeights::linear_each(&x, [&pa, &pc, &pb]));
        for (actual, w) in actual.iter().zip([&a, &c, &b]) {
            assert_same("products", actual, &plain(w));
        }
        let base = numbers([rows, outer], 9);
        let actual = fused(|| pa.linear_add(base.clone(), &x));
        assert_same("on top", &actual, &(base + plain(&a)));
        let actual = fused(|| PackedWeights::linear_swiglu(&pa, &pb, &x));
        assert_same("gated", &actual, &(silu(plain(&a)) * plain(&b)));
        assert!(pa.bytes() >= 4 * outer * inner && pa.bytes() <= 4 * (outer + 31) * inner);
        let wide = x.cast(DType::F64);
        assert!(!pa.takes(&wide) && PackedWeights::pack(&wide).is_none(), "f32 alone");
    }
}

#[test]
fn a_row_has_the_same_products_in_panels_and_out_of_them_among_any_number_of_rows() {
    let most = 140;
    for (inner, outer) in [(1, 3), (2, 40), (33, 1), (512, 200), (515, 70), (1300, 64)] {
        let (x, w) = (numbers([most, inner], 5), numbers([outer, inner], 6));
        let panels = PackedWeights::pack(&w).expect(KNOWN);
        let expected = values(&fused(|| linear(&x, &w)));
        for rows in [1, 2, 7, 128, 129, most] {
            let x = x.clone().narrow(0, most - rows, rows);
            let wanted = &expected[(most - rows) * outer..];
            let base = numbers([rows, outer], 9);
            assert_eq!(values(&fused(|| linear(&x, &w))), wanted, "{rows} × {inner} × {outer}");
            assert_eq!(values(&panels.linear(&x)), wanted, "{rows} × {inner} × {outer} in panels");
            let added = values(&linear_add(base.clone(), &x, &w));
            assert_eq!(values(&panels.linear_add(base, &x)), added, "{rows} × {inner} × {outer}, added");
        }
    }
}

#[test]
fn a_row_has_the_same_products_among_any_number_of_rows_with_a_team_and_without() {
    let (inner, outer) = (333, 200);
    let x = numbers([20, inner], 5);
    let [gate, up] = [6, 7].map(|seed| numbers([outer, inner], seed));
    for pack in [PackedWeights::pack, PackedWeights::quantize] {
        let [gate, up] = [&gate, &up].map(|w| pack(w).expect(KNOWN));
        let products = |rows: usize| {
            let x = x.clone().narrow(0, 0, rows);
            let gated = fused(|| PackedWeights::linear_swiglu(&gate, &up, &x));
            let normed = fused(|| rms_norm(&gated, &numbers([1, outer], 8), 1e-6, 0.0));
            [gate.linear(&x), gated, normed].map(|y| values(&y))
        };
        let batched = products(20);
        for rows in 1..=20 {
            let alone = products(rows);
            let led = with_team(&Device::flex(), || products(rows));
            for ((batched, alone), led) in batched.iter().zip(alone).zip(led) {
                assert_eq!(alone, batched[..rows * outer], "{rows} rows");
                assert_eq!(led, alone, "{rows} rows on a team");
            }
        }
    }
}

fn values(tensor: &Tensor<2>) -> Vec<f32> {
    tensor.clone().into_data().iter::<f32>().collect()
}

/// A matrix rounded to 8 bits: of each row's numbers the nearest of 255 between its largest and its negative.
fn rounded(matrix: &Tensor<2>) -> Vec<f64> {
    let [_, inner] = matrix.dims();
    let row = |row: &[f32]| {
        let scale = row.iter().fold(0.0_f32, |most, w| most.max(w.abs())) / 127.0;
        let round = |&w: &f32| f64::from(scale) * f64::from((w / scale).round_ties_even());
        row.iter().map(round).collect::<Vec<_>>()
    };
    values(matrix).chunks(inner).flat_map(row).collect()
}

/// `x · Wᵀ` in f64.
fn reference(x: &Tensor<2>, w: &[f64]) -> Tensor<2> {
    let [rows, inner] = x.dims();
    let (x, outer) = (values(x), w.len() / inner);
    let dot = |x: &[f32], w: &[f64]| x.iter().zip(w).map(|(&x, w)| f64::from(x) * w).sum::<f64>();
    let products = x.chunks(inner).flat_map(|x| w.chunks(inner).map(move |w| dot(x, w) as f32));
    let products: Vec<f32> = products.collect();
    Tensor::from_data(TensorData::new(products, [rows, outer]), &Device::flex())
}

#[test]
fn products_with_8_bit_panels_are_those_of_the_rounded_matrices() {
    for [rows, inner, outer] in SHAPES {
        let x = numbers([rows, inner], 5);
        let [a, b, c] = [(outer, 6), (outer, 7), (3, 8)].map(|(n, salt)| numbers([n, inner], salt));
        let pack = |w: &Tensor<2>| PackedWeights::quantize(w).expect(KNOWN);
        let [pa, pb, pc] = [&a, &b, &c].map(pack);
        let [ra, rb, rc] = [&a, &b, &c].map(|w| reference(&x, &rounded(w)));
        let actual = fused(|| PackedWeights::linear_each(&x, [&pa, &pc, &pb]));
        for (actual, expected) in actual.iter().zip([&ra, &rc, &rb]) {
            assert_same("products", actual, expected);
        }
        let base = numbers([rows, outer], 9);
        let actual = fused(|| pa.linear_add(base.clone(), &x));
        assert_same("on top", &actual, &(base + ra.clone()));
        let actual = fused(|| PackedWeights::linear_swiglu(&pa, &pb, &x));
        assert_same("gated", &actual, &(silu(ra) * rb));
        // a byte a number and four an output, of whole panels
        assert_eq!(pa.bytes(), outer.next_multiple_of(32) * (inner + 4));
    }
}

#[test]
fn rounding_to_8_bits_moves_no_number_by_more_than_half_a_step_and_keeps_the_largest() {
    let w = numbers([40, 70], 3) * numbers([40, 1], 4);
    let identity: Tensor<2> = Tensor::eye(70, &Device::flex());
    let packed = PackedWeights::quantize(&w).expect(KNOWN);
    let actual = values(&packed.linear(&identity).transpose());
    for (row, (actual, w)) in actual.chunks(70).zip(values(&w).chunks(70)).enumerate() {
        let most = w.iter().fold(0.0_f32, |most, w| most.max(w.abs()));
        for (actual, w) in actual.iter().zip(w) {
            let step = if w.abs() < most { 0.5001 / 127.0 } else { 1e-6 };
            let bound = step * most;
            assert!((actual - w).abs() <= bound, "row {row}: {actual} for {w}");
        }
    }
}

#[test]
fn rows_of_nothing_stay_nothing_and_what_is_not_finite_is_not_hidden() {
    let mut w = vec![0.0_f32; 4 * 9];
    w[9..18].fill(1e-44);
    w[18] = f32::NAN;
    w[30] = f32::INFINITY;
    let w = Tensor::<2>::from_data(TensorData::new(w, [4, 9]), &Device::flex());
    let packed = PackedWeights::quantize(&w).expect(KNOWN);
    let y = values(&packed.linear(&numbers([1, 9], 1)));
    assert!(y[..2].iter().all(|y| y.abs() < f32::MIN_POSITIVE), "{y:?}");
    assert!(y[2].is_nan() && y[3].is_nan(), "{y:?}");
    assert!(
        PackedWeights::quantize(&w.clone().cast(DType::F64)).is_none()
            && PackedWeights::quantize(&w.autodiff()).is_none(),
        "f32 off the graph alone"
    );
}
