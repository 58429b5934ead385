//! Products with matrices, and biases.

use super::{assert_near, cases, fused, leaf, numbers, on_gpus, precisions, stored, values};
use crate::devices::backend;
use crate::devices::own_process::again;
use crate::devices::stand_in::is_stand_in;
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::device::Backend;
use firebrick_backends::kernels::{self, Transposed};

on_gpus!(
    products_of_few_rows_are_their_formula,
    a_row_has_the_same_product_however_many_rows_there_are,
    products_and_their_gradients_are_their_formulas,
    products_of_whole_tiles_and_of_many_inputs_are_their_formulas,
    a_product_is_added_to_rows_of_a_sum,
    tensor_cores_of_each_generation_give_the_products_of_their_formulas,
    a_bias_is_added_to_every_row_and_its_gradient_is_the_sum_of_all,
);

/// `a · b` of `[m, k]` and `[k, n]`, each read by its strides of rows and columns.
pub(super) fn product(
    [m, k, n]: [usize; 3],
    (a, a_strides): (&[f64], [usize; 2]),
    (b, b_strides): (&[f64], [usize; 2]),
) -> Vec<f64> {
    let one = |i: usize| {
        let (row, column) = (i / n, i % n);
        let terms =
            (0..k).map(|j| a[row * a_strides[0] + j * a_strides[1]] * b[j * b_strides[0] + column * b_strides[1]]);
        terms.sum()
    };
    (0..m * n).map(one).collect()
}

/// Rows, `[rows, inner]`, and a matrix, `[outputs, inner]`.
pub(super) fn operands(
    [rows, inner, outputs]: [usize; 3],
    dtype: DType,
    device: &Device,
) -> [(Tensor<2>, Vec<f64>); 2] {
    [
        stored(numbers(rows * inner, 48, 1.0), [rows, inner], dtype, device),
        stored(numbers(outputs * inner, 49, 1.0), [outputs, inner], dtype, device),
    ]
}

fn products_of_few_rows_are_their_formula(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        // inputs that are no multiple of 16, and those that tensor cores take: one tile, several, more than a cube's,
        // fewer rows or outputs than a tile, fewer inputs than planes
        for size in [
            [6, 40, 56],
            [1, 144, 40],
            [15, 160, 16],
            [16, 48, 33],
            [17, 64, 33],
            [50, 272, 47],
            [131, 32, 70],
            [20, 64, 9],
        ] {
            let [rows, inner, outputs] = size;
            let [(x, xs), (w, ws)] = operands(size, dtype, device);
            let found = fused(|| kernels::linear_unpadded(&x, &w));
            let expected = product([rows, inner, outputs], (&xs, [inner, 1]), (&ws, [1, inner]));
            let what = format!("a product of {size:?} in {dtype:?}");
            assert_near(&what, &values(found), &expected, tolerance);
        }
    }
}

fn a_row_has_the_same_product_however_many_rows_there_are(device: &Device) {
    // elsewhere `CubeK` divides the inputs by the number of rows
    if backend(device) != Backend::Cuda {
        return;
    }
    let (inner, outputs) = (112, 48);
    for (dtype, _) in precisions(device).into_iter().skip(1) {
        let [(x, _), (w, _)] = operands([64, inner, outputs], dtype, device);
        let whole = values(fused(|| kernels::linear_unpadded(&x, &w)));
        for rows in [3, 16, 33, 50] {
            let few = fused(|| kernels::linear_unpadded(&x.clone().narrow(0, 0, rows), &w));
            assert_eq!(values(few), whole[..rows * outputs], "{rows} rows in {dtype:?}");
        }
    }
}

fn hold_product(size: [usize; 3], dtype: DType, tolerance: f64, device: &Device) {
    let [rows, inner, outputs] = size;
    let [(x, xs), (w, ws)] = operands(size, dtype, device);
    let (g, gs) = stored(numbers(rows * outputs, 50, 1.0), [rows, outputs], dtype, device);
    let what = format!("a product of {size:?} in {dtype:?}");
    let (x, w) = (leaf(&x), leaf(&w));
    let y = fused(|| kernels::linear(&x, &w));
    let expected = product([rows, inner, outputs], (&xs, [inner, 1]), (&ws, [1, inner]));
    assert_near(&what, &values(y.clone().inner()), &expected, tolerance);
    let mut grads = kernels::backward_root(y, g.clone()).backward();
    let dx = x.grad_remove(&mut grads).expect("a leaf");
    let dw = w.grad_remove(&mut grads).expect("a leaf");
    let expected = product([rows, outputs, inner], (&gs, [outputs, 1]), (&ws, [inner, 1]));
    assert_near(&format!("{what}: d x"), &values(dx), &expected, tolerance);
    let expected = product([outputs, rows, inner], (&gs, [1, outputs]), (&xs, [inner, 1]));
    assert_near(&format!("{what}: d w"), &values(dw), &expected, tolerance);

    // twice beside a sum, which takes each gradient from the product or leaves it on the tape
    let mut sum = None;
    for times in [1.0, 2.0] {
        let root = kernels::backward_root(kernels::linear(&x, &w), g.clone());
        let (mut tape, mut sums) = kernels::backward_with_sums(root, vec![(&w, sum.take())]);
        sum = sums.pop().expect("one sum for one leaf");
        match (w.grad_remove(&mut tape), &sum) {
            // not rounded to the matrix's type
            (None, Some(sum)) => {
                assert_eq!(sum.dtype(), DType::F32);
                let expected: Vec<f64> = expected.iter().map(|value| value * times).collect();
                assert_near(&format!("{what}: sum of {times} d w"), &values(sum.clone()), &expected, 1e-5);
            }
            (gradient, sum) => assert!(gradient.is_some() && sum.is_none() && !adds_gradients(size, dtype, device)),
        }
    }
}

/// True if products of this size have a kernel that adds the gradient of their matrix to its sum.
fn adds_gradients([_, inner, outputs]: [usize; 3], dtype: DType, device: &Device) -> bool {
    let chunks = inner.is_multiple_of(8) && outputs.is_multiple_of(8);
    backend(device) == Backend::Cuda && dtype != DType::F32 && chunks
}

fn a_product_is_added_to_rows_of_a_sum(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        // with parts of the inputs, and a shape that only Burn multiplies
        for [rows, inner, outputs] in [[72, 40, 136], [16, 4104, 24], [7, 5, 9]] {
            let [(a, left), (b, right)] = operands([rows, inner, outputs], dtype, device);
            let (before, place) = (numbers(3 * rows * outputs, 51, 1.0), rows..2 * rows);
            let (sum, mut expected) = stored(before, [3 * rows, outputs], DType::F32, device);
            let added = product([rows, inner, outputs], (&left, [inner, 1]), (&right, [1, inner]));
            expected[place.start * outputs..place.end * outputs].iter_mut().zip(added).for_each(|(e, a)| *e += a);
            let sum = kernels::add_matmul(&a, &b, Transposed::Right, sum, place);
            assert_eq!(sum.dtype(), DType::F32);
            let what = format!("a product of {rows} × {inner} × {outputs} in {dtype:?} added to a sum");
            let by_kernel = adds_gradients([rows, inner, outputs], dtype, device);
            assert_near(&what, &values(sum), &expected, if by_kernel { 1e-5 } else { tolerance });
        }
    }
}

fn products_and_their_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..60, 1_usize..50, 1_usize..70), |(rows, inner, outputs)| {
            hold_product([rows, inner, outputs], dtype, tolerance, device);
        });
        // of many rows in another way, and with them the gradient of a matrix of many outputs
        hold_product([520, 24, 40], dtype, tolerance, device);
        hold_product([30, 24, 530], dtype, tolerance, device);
    }
}

fn products_of_whole_tiles_and_of_many_inputs_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device).into_iter().skip(1) {
        // dimensions that NVIDIA's tensor cores take: more than a tile of each, and inputs that are divided among
        // blocks
        for size in [[72, 40, 136], [264, 40, 136], [392, 72, 264], [4104, 40, 72]] {
            hold_product(size, dtype, tolerance, device);
        }
    }
}

/// On the stand-in for a card: an Ampere, which has other instructions than Hopper, and cards so small that large tiles
/// fill them.
fn tensor_cores_of_each_generation_give_the_products_of_their_formulas(device: &Device) {
    if backend(device) != Backend::Cuda || !is_stand_in() {
        return;
    }
    let test = "kernels::products::cuda::products_of_whole_tiles_and_of_many_inputs_are_their_formulas";
    for (capability, multiprocessors) in [("80", "1"), ("80", "132"), ("90", "1")] {
        let card = [("STAND_IN_CAPABILITY", capability), ("STAND_IN_MULTIPROCESSORS", multiprocessors)];
        again(test, &card);
    }
}

fn a_bias_is_added_to_every_row_and_its_gradient_is_the_sum_of_all(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for [rows, n] in [[1, 1], [7, 300], [200, 33]] {
            let (y, ys) = stored(numbers(rows * n, 51, 1.0), [rows, n], dtype, device);
            let (b, bs) = stored(numbers(n, 52, 1.0), [1, n], dtype, device);
            let (g, gs) = stored(numbers(rows * n, 53, 1.0), [rows, n], dtype, device);
            let what = format!("a bias of [{rows}, {n}] in {dtype:?}");
            let expected: Vec<f64> = (0..rows * n).map(|i| ys[i] + bs[i % n]).collect();
            let plain = fused(|| kernels::add_bias(y.clone(), &b));
            assert_near(&what, &values(plain), &expected, tolerance);
            assert_near("what somebody else holds", &values(y.clone()), &ys, 0.0);
            let (y, b) = (leaf(&y), leaf(&b));
            let sum = fused(|| kernels::add_bias(y.clone(), &b));
            assert_near(&what, &values(sum.clone().inner()), &expected, tolerance);
            let mut grads = kernels::backward_root(sum, g).backward();
            let dy = y.grad_remove(&mut grads).expect("a leaf");
            let db = b.grad_remove(&mut grads).expect("a leaf");
            assert_near(&format!("{what}: d y"), &values(dy), &gs, tolerance);
            let sums: Vec<f64> = (0..n).map(|i| gs[i..].iter().step_by(n).sum()).collect();
            assert_near(&format!("{what}: d bias"), &values(db), &sums, tolerance);
        }
    }
}
