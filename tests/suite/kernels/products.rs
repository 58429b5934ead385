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
    products_of_one_input_and_their_gradients_are_their_formulas,
    a_product_onto_a_residual_and_its_gradients_are_their_formulas,
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
    whole_tiles(device);
}

/// Products of dimensions that NVIDIA's tensor cores take, and their gradients: one each, three of the same rows, onto a
/// residual, and added to a sum.
#[cfg(feature = "cuda")]
pub fn on_tensor_cores(device: &Device) {
    whole_tiles(device);
    products_of_one_input_and_their_gradients_are_their_formulas(device);
    a_product_onto_a_residual_and_its_gradients_are_their_formulas(device);
    a_product_is_added_to_rows_of_a_sum(device);
}

fn whole_tiles(device: &Device) {
    for (dtype, tolerance) in precisions(device).into_iter().skip(1) {
        // dimensions that NVIDIA's tensor cores take: more than a tile of each, and inputs that are divided among
        // blocks
        for size in [[72, 40, 136], [264, 40, 136], [392, 72, 264], [4104, 40, 72]] {
            hold_product(size, dtype, tolerance, device);
        }
    }
}

/// `x · Wᵀ` of several matrices with biases: each product, and gradients of everything from those of the products that
/// are `used`.
fn hold_products(size: (usize, usize, [usize; 3]), used: [bool; 3], dtype: DType, tolerance: f64, device: &Device) {
    let (rows, inner, outputs) = size;
    let what = format!("products of {size:?} in {dtype:?}, of which are used {used:?}");
    let tensor = |salt: u32, shape: [usize; 2]| {
        let (tensor, exact) = stored(numbers(shape[0] * shape[1], salt, 1.0), shape, dtype, device);
        (leaf(&tensor), tensor, exact)
    };
    let of_each = |first: u32, height: Option<usize>| {
        let shape = |i: usize| height.map_or([outputs[i], inner], |height| [height, outputs[i]]);
        [0, 1, 2].map(|i| tensor(first + i as u32, shape(i)))
    };
    let (x, _, xs) = tensor(54, [rows, inner]);
    let [w, b, g] = [(60, None), (70, Some(1)), (80, Some(rows))].map(|(first, height)| of_each(first, height));
    let products = || kernels::linear_each(&x, w.each_ref().map(|w| &w.0), b.each_ref().map(|b| Some(&b.0)));
    let root = || {
        let roots = products().into_iter().zip(&g).zip(used).filter(|(_, used)| *used);
        roots.map(|((y, g), _)| kernels::backward_root(y, g.1.clone())).reduce(|a, b| a + b).expect("one is used")
    };
    for (i, y) in products().into_iter().enumerate() {
        let mut expected = product([rows, inner, outputs[i]], (&xs, [inner, 1]), (&w[i].2, [1, inner]));
        expected.iter_mut().enumerate().for_each(|(at, y)| *y += b[i].2[at % outputs[i]]);
        assert_near(&format!("{what}: product {i}"), &values(y.inner()), &expected, tolerance);
    }

    let mut grads = root().backward();
    let mut d_x = vec![0.0; rows * inner];
    for i in (0..3).filter(|&i| used[i]) {
        let n = outputs[i];
        let part = product([rows, n, inner], (&g[i].2, [n, 1]), (&w[i].2, [inner, 1]));
        d_x.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    let found = x.grad_remove(&mut grads).expect("a leaf");
    assert_near(&format!("{what}: d x"), &values(found), &d_x, tolerance);
    for i in 0..3 {
        let n = outputs[i];
        let (dw, db) = (w[i].0.grad_remove(&mut grads), b[i].0.grad_remove(&mut grads));
        assert_eq!([&dw, &db].map(Option::is_some), [used[i]; 2], "{what}: gradients {i}");
        if let Some((dw, db)) = dw.zip(db) {
            let expected = product([n, rows, inner], (&g[i].2, [1, n]), (&xs, [inner, 1]));
            assert_near(&format!("{what}: d w {i}"), &values(dw), &expected, tolerance);
            let sums: Vec<f64> = (0..n).map(|at| g[i].2[at..].iter().step_by(n).sum()).collect();
            assert_near(&format!("{what}: d bias {i}"), &values(db), &sums, tolerance);
        }
    }

    // beside sums, of which the first has a gradient already
    let gpu_adds = adds_gradients([rows, inner, outputs[0]], dtype, device);
    let start = Tensor::ones([outputs[0], inner], (device, DType::F32));
    let leaves = [(&w[0].0, Some(start)), (&w[1].0, None), (&w[2].0, None)];
    let (_, sums) = kernels::backward_with_sums(root(), leaves.into());
    for (i, sum) in sums.into_iter().enumerate().filter(|(i, _)| used[*i] && gpu_adds) {
        let n = outputs[i];
        let mut expected = product([n, rows, inner], (&g[i].2, [1, n]), (&xs, [inner, 1]));
        if i == 0 {
            for value in &mut expected {
                *value += 1.0;
            }
        }
        assert_near(&format!("{what}: sum of d w {i}"), &values(sum.expect("a sum")), &expected, 1e-5);
    }
}

fn products_of_one_input_and_their_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        // of outputs that are no whole tiles, of few rows, that no kernel takes, and of many outputs, whose sum is divided
        for (size, used) in [
            ((72, 40, [136, 24, 200]), [true; 3]),
            ((264, 72, [128, 64, 64]), [true, false, true]),
            ((20, 40, [24, 8, 16]), [true; 3]),
            ((70, 44, [24, 8, 10]), [false, true, true]),
            ((72, 40, [2056, 16, 2080]), [true; 3]),
        ] {
            hold_products(size, used, dtype, tolerance, device);
        }
    }
}

fn a_product_onto_a_residual_and_its_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        // the last with inputs that are divided among blocks
        for size in [[264, 40, 136], [9, 40, 24], [72, 4104, 40]] {
            let [rows, inner, outputs] = size;
            let [(x, xs), (w, ws)] = operands(size, dtype, device);
            let shape = [rows, outputs];
            let (base, bases) = stored(numbers(rows * outputs, 57, 1.0), shape, dtype, device);
            let (g, gs) = stored(numbers(rows * outputs, 58, 1.0), shape, dtype, device);
            let what = format!("a product of {size:?} onto a residual in {dtype:?}");
            let leaves = [&base, &x, &w].map(leaf);
            let [b, x, w] = &leaves;
            let y = kernels::linear_add(b.clone(), x, w);
            let mut expected = product([rows, inner, outputs], (&xs, [inner, 1]), (&ws, [1, inner]));
            expected.iter_mut().zip(&bases).for_each(|(y, base)| *y += base);
            assert_near(&what, &values(y.clone().inner()), &expected, tolerance);
            assert_near("the residual", &values(base), &bases, 0.0);
            let mut grads = kernels::backward_root(y, g).backward();
            let d_x = product([rows, outputs, inner], (&gs, [outputs, 1]), (&ws, [inner, 1]));
            let d_w = product([outputs, rows, inner], (&gs, [1, outputs]), (&xs, [inner, 1]));
            for (leaf, (name, expected)) in leaves.iter().zip([("residual", &gs), ("x", &d_x), ("w", &d_w)]) {
                let found = leaf.grad_remove(&mut grads).expect("a leaf");
                assert_near(&format!("{what}: d {name}"), &values(found), expected, tolerance);
            }
        }
    }
}

/// On the stand-in for a card: an Ampere, which has other instructions than Hopper, and cards so small that large tiles
/// fill them.
fn tensor_cores_of_each_generation_give_the_products_of_their_formulas(device: &Device) {
    if backend(device) != Backend::Cuda || !is_stand_in() {
        return;
    }
    let tests = [
        "kernels::products::cuda::products_of_whole_tiles_and_of_many_inputs_are_their_formulas",
        "kernels::products::cuda::products_of_one_input_and_their_gradients_are_their_formulas",
    ];
    for (capability, multiprocessors) in [("80", "1"), ("80", "132"), ("90", "1")] {
        let card = [("STAND_IN_CAPABILITY", capability), ("STAND_IN_MULTIPROCESSORS", multiprocessors)];
        for test in &tests {
            again(test, &card);
        }
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
