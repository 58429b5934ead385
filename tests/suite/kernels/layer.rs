//! Norm, gate and rotary embedding.

use super::{assert_near, cases, fused, leaf, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{self, Activation, JoinedHeads};

on_gpus!(
    a_norm_is_added_to_its_residual_in_one_pass,
    a_residual_is_added_and_normed_in_one_pass,
    a_norm_adds_its_gradient_to_that_of_its_residual,
    heads_of_queries_and_keys_are_normed_and_values_are_not,
    a_gate_of_joined_rows_is_that_of_separate_ones,
    norm_and_its_gradients_are_their_formulas,
    every_gate_and_its_gradients_are_their_formulas,
    a_gate_leaves_what_others_hold_as_it_was,
    rotary_turns_and_its_gradient_turns_back,
    queries_and_keys_turn_together_as_they_do_apart,
);

/// A function of two rows of numbers with its gradients, given that of the result.
pub(super) struct Expected {
    pub y: Vec<f64>,
    d_first: Vec<f64>,
    d_second: Vec<f64>,
}

pub(super) fn rms_norm(x: &[f64], w: &[f64], g: &[f64], eps: f64, offset: f64) -> Expected {
    let n = w.len();
    let mut all = Expected { y: Vec::new(), d_first: Vec::new(), d_second: vec![0.0; n] };
    for (x, g) in x.chunks(n).zip(g.chunks(n)) {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / n as f64;
        let r = 1.0 / (mean + eps).sqrt();
        let through: f64 = (0..n).map(|i| g[i] * (w[i] + offset) * x[i]).sum();
        for i in 0..n {
            all.y.push(x[i] * r * (w[i] + offset));
            let pull = x[i] * r * r * through / n as f64;
            all.d_first.push(r * (g[i] * (w[i] + offset) - pull));
            all.d_second[i] += g[i] * x[i] * r;
        }
    }
    all
}

fn hold_norm(shape: [usize; 2], offset: f64, dtype: DType, tolerance: f64, device: &Device) {
    let [rows, n] = shape;
    let (x, xs) = stored(numbers(rows * n, 1, 2.0), shape, dtype, device);
    let (w, ws) = stored(numbers(n, 2, 1.0), [1, n], dtype, device);
    let (g, gs) = stored(numbers(rows * n, 3, 1.0), shape, dtype, device);
    let expected = rms_norm(&xs, &ws, &gs, 1e-6, offset);
    let what = format!("norm of {shape:?} in {dtype:?}");

    let (x, w) = (leaf(&x), leaf(&w));
    let y = fused(|| kernels::rms_norm(&x, &w, 1e-6, offset));
    assert_near(&what, &values(y.clone().inner()), &expected.y, tolerance);
    let mut grads = (y * g.autodiff()).sum().backward();
    let dx = x.grad_remove(&mut grads).expect("a leaf");
    let dw = w.grad_remove(&mut grads).expect("a leaf");
    assert_near(&format!("{what}: dx"), &values(dx), &expected.d_first, tolerance);
    assert_near(&format!("{what}: dw"), &values(dw), &expected.d_second, tolerance);
}

fn hold_norm_onto(shape: [usize; 2], dtype: DType, tolerance: f64, device: &Device) {
    let [rows, n] = shape;
    let (base, bases) = stored(numbers(rows * n, 26, 2.0), shape, dtype, device);
    let (x, xs) = stored(numbers(rows * n, 27, 2.0), shape, dtype, device);
    let (w, ws) = stored(numbers(n, 28, 1.0), [1, n], dtype, device);
    let (g, gs) = stored(numbers(rows * n, 29, 1.0), shape, dtype, device);
    let normed = rms_norm(&xs, &ws, &gs, 1e-6, 1.0);
    let sum: Vec<f64> = bases.iter().zip(&normed.y).map(|(a, b)| a + b).collect();
    let what = format!("norm with a residual of {shape:?} in {dtype:?}");
    let leaves = [&base, &x, &w].map(leaf);
    let [b, x, w] = &leaves;
    let y = fused(|| kernels::rms_norm_add(b.clone(), x.clone(), w, 1e-6, 1.0));
    assert_near(&what, &values(y.clone().inner()), &sum, tolerance);
    let mut grads = (y * g.autodiff()).sum().backward();
    let expected = [&gs, &normed.d_first, &normed.d_second];
    for (leaf, expected) in leaves.iter().zip(expected) {
        let found = leaf.grad_remove(&mut grads).expect("a leaf");
        assert_near(&format!("{what}: gradient"), &values(found), expected, tolerance);
    }
    assert_near("the residual", &values(base), &bases, 0.0);
}

fn a_norm_is_added_to_its_residual_in_one_pass(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..90, 1_usize..150), |(rows, n)| {
            hold_norm_onto([rows, n], dtype, tolerance, device);
        });
    }
}

fn a_residual_is_added_and_normed_in_one_pass(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..90, 1_usize..150), |(rows, n)| {
            let shape = [rows, n];
            let (base, bases) = stored(numbers(rows * n, 41, 2.0), shape, dtype, device);
            let (x, xs) = stored(numbers(rows * n, 42, 2.0), shape, dtype, device);
            let (w, ws) = stored(numbers(n, 43, 1.0), [1, n], dtype, device);
            let sum = bases.iter().zip(&xs).map(|(a, b)| a + b).collect();
            let (_, sums) = stored::<2>(sum, shape, dtype, device);
            let expected = rms_norm(&sums, &ws, &vec![0.0; rows * n], 1e-6, 1.0);
            let what = format!("a residual and its norm of {shape:?} in {dtype:?}");
            let both = fused(|| kernels::add_rms_norm(base.clone(), &x, &w, 1e-6, 1.0));
            let [sum, normed] = both;
            assert_near(&what, &values(sum), &sums, tolerance);
            assert_near(&what, &values(normed), &expected.y, tolerance);
            assert_near("a residual that others hold", &values(base.clone()), &bases, 0.0);

            // in parts, whose sum is rounded
            let halves =
                [xs.iter().map(|x| x / 2.0).collect::<Vec<f64>>(), xs.iter().map(|x| x / 2.0).collect()].concat();
            let (parts, _) = stored(halves, [2, rows * n], DType::F32, device);
            let [again, normed] = fused(|| kernels::add_rms_norm_parts(base.clone(), &parts, &w, 1e-6, 1.0));
            assert_near(&format!("{what} in parts"), &values(again), &sums, 0.0);
            assert_near(&format!("{what} in parts"), &values(normed), &expected.y, tolerance);
        });
    }
}

fn a_norm_adds_its_gradient_to_that_of_its_residual(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..90, 1_usize..150), |(rows, n)| {
            let shape = [rows, n];
            let (x, xs) = stored(numbers(rows * n, 54, 2.0), shape, dtype, device);
            let (w, ws) = stored(numbers(n, 55, 1.0), [1, n], dtype, device);
            let [(g, gs), (r, rs)] = [56, 57].map(|salt| stored(numbers(rows * n, salt, 1.0), shape, dtype, device));
            let expected = rms_norm(&xs, &ws, &gs, 1e-6, 1.0);
            let what = format!("a norm beside its residual of {shape:?} in {dtype:?}");
            // a frozen weight, and a norm that nothing depends on
            for (trained, normed_used) in [(true, true), (false, true), (true, false)] {
                let (x, w) = (leaf(&x), if trained { leaf(&w) } else { w.clone().autodiff() });
                let [normed, residual] = fused(|| kernels::rms_norm_residual(x.clone(), &w, 1e-6, 1.0));
                assert_near(&what, &values(normed.clone().inner()), &expected.y, tolerance);
                assert_near(&what, &values(residual.clone().inner()), &xs, 0.0);
                let root = kernels::backward_root(residual, r.clone());
                let root = if normed_used { root + kernels::backward_root(normed, g.clone()) } else { root };
                let mut grads = root.backward();
                let through = |i: usize| if normed_used { expected.d_first[i] } else { 0.0 };
                let d_x: Vec<f64> = rs.iter().enumerate().map(|(i, r)| r + through(i)).collect();
                let found = x.grad_remove(&mut grads).expect("a leaf");
                assert_near(&format!("{what}: dx"), &values(found), &d_x, tolerance);
                let d_w = if trained { w.grad_remove(&mut grads) } else { None };
                assert_eq!(d_w.is_some(), trained && normed_used);
                if let Some(d_w) = d_w {
                    assert_near(&format!("{what}: dw"), &values(d_w), &expected.d_second, tolerance);
                }
            }
            assert_near("gradients that others hold", &values(g), &gs, 0.0);
            assert_near("gradients that others hold", &values(r), &rs, 0.0);
        });
    }
}

fn heads_of_queries_and_keys_are_normed_and_values_are_not(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        let sizes = (1_usize..9, 1_usize..5, 1_usize..4, 1_usize..70);
        cases(sizes, |(rows, group, keys, dim)| {
            let heads = JoinedHeads { queries: group * keys, keys, dim };
            let shape = [rows, heads.width()];
            let n = rows * heads.width();
            let (qkv, all) = stored(numbers(n, 44, 2.0), shape, dtype, device);
            let (q, qs) = stored(numbers(dim, 45, 1.0), [1, dim], dtype, device);
            let (k, ks) = stored(numbers(dim, 46, 1.0), [1, dim], dtype, device);
            let mut expected = Vec::new();
            for (index, head) in all.chunks(dim).enumerate() {
                let head_of = index % (heads.queries + 2 * keys);
                let norm = |w: &[f64]| rms_norm(head, w, &vec![0.0; dim], 1e-6, 0.0).y;
                expected.extend(match head_of {
                    i if i < heads.queries => norm(&qs),
                    i if i < heads.queries + keys => norm(&ks),
                    _ => head.to_vec(),
                });
            }
            let normed = fused(|| kernels::norm_heads(qkv.clone(), [&q, &k], heads, 1e-6, 0.0));
            let what = format!("heads {heads:?} in {dtype:?}");
            let found = values(normed);
            assert_near(&what, &found, &expected, tolerance);
            assert_near("rows that others hold", &values(qkv), &all, 0.0);
        });
    }
}

fn a_gate_of_joined_rows_is_that_of_separate_ones(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for gate in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            cases((1_usize..40, 1_usize..40), |(rows, n)| {
                let shape = [rows, 2 * n];
                let (x, _) = stored(numbers(rows * 2 * n, 47, 2.0), shape, dtype, device);
                let half = |first| x.clone().narrow(1, first, n);
                let expected = fused(|| kernels::glu(half(0), half(n), gate));
                let found = fused(|| kernels::glu_joined(&x, gate));
                let what = format!("{gate:?} of {shape:?} in {dtype:?}");
                assert_near(&what, &values(found), &values(expected), tolerance);
            });
        }
    }
}

fn norm_and_its_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        let offset = 1.0;
        cases((1_usize..200, 1_usize..150), |(rows, n)| {
            hold_norm([rows, n], offset, dtype, tolerance, device);
        });
        // several blocks of rows, and rows that need all units of a cube
        hold_norm([131, 1027], 0.0, dtype, tolerance, device);
    }
}

pub(super) fn gated(gate: Activation, x: f64) -> (f64, f64) {
    match gate {
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
        Activation::Gelu => {
            // Φ by Simpson's rule from 0 on
            let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
            let steps = 200;
            let h = x / f64::from(steps);
            let weight = |i: i32| match i {
                0 => 1.0,
                i if i == steps => 1.0,
                i if i % 2 == 1 => 4.0,
                _ => 2.0,
            };
            let sum: f64 = (0..=steps).map(|i| weight(i) * density(h * f64::from(i))).sum();
            let below = 0.5 + sum * h / 3.0;
            (x * below, below + x * density(x))
        }
        Activation::GeluTanh => {
            let a = (2.0 / std::f64::consts::PI).sqrt();
            let t = (a * (x + 0.044_715 * x.powi(3))).tanh();
            let slope = a * (1.0 + 3.0 * 0.044_715 * x * x);
            let half = 0.5 * (1.0 + t);
            (x * half, half + 0.5 * x * (1.0 - t * t) * slope)
        }
    }
}

fn hold_gate(gate: Activation, shape: [usize; 2], dtype: DType, tolerance: f64, device: &Device) {
    let n = shape[0] * shape[1];
    let (x, xs) = stored(numbers(n, 4, 6.0), shape, dtype, device);
    let (u, us) = stored(numbers(n, 5, 1.0), shape, dtype, device);
    let (g, gs) = stored(numbers(n, 6, 1.0), shape, dtype, device);
    let what = format!("{gate:?} of {shape:?} in {dtype:?}");
    let along = |f: &dyn Fn(usize) -> f64| (0..n).map(f).collect::<Vec<f64>>();

    let (x, u) = (leaf(&x), leaf(&u));
    let y = fused(|| kernels::glu(x.clone(), u.clone(), gate));
    let expected = along(&|i| gated(gate, xs[i]).0 * us[i]);
    assert_near(&what, &values(y.clone().inner()), &expected, tolerance);
    let mut grads = (y * g.autodiff()).sum().backward();
    let dx = x.grad_remove(&mut grads).expect("a leaf");
    let du = u.grad_remove(&mut grads).expect("a leaf");
    let expected = along(&|i| gs[i] * us[i] * gated(gate, xs[i]).1);
    assert_near(&format!("{what}: d gate"), &values(dx), &expected, tolerance);
    let expected = along(&|i| gs[i] * gated(gate, xs[i]).0);
    assert_near(&format!("{what}: d up"), &values(du), &expected, tolerance);
}

fn every_gate_and_its_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for gate in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
            cases((1_usize..40, 1_usize..40), |(rows, n)| {
                hold_gate(gate, [rows, n], dtype, tolerance, device);
            });
        }
    }
}

fn a_gate_leaves_what_others_hold_as_it_was(device: &Device) {
    let (gate, numbers_in) = stored(numbers(35, 7, 2.0), [5, 7], DType::F32, device);
    let x = leaf(&gate);
    let y = fused(|| kernels::glu(x.clone(), x.clone(), Activation::Silu));
    let _ = y.sum().backward();
    assert_near("the input", &values(gate), &numbers_in, 0.0);
}

fn hold_rotary([tokens, heads, half]: [usize; 3], dtype: DType, tolerance: f64, device: &Device) {
    let n = tokens * heads * half * 2;
    let shape = [tokens, heads, half * 2];
    let (x, xs) = stored(numbers(n, 8, 1.0), shape, dtype, device);
    let (g, gs) = stored(numbers(n, 9, 1.0), shape, dtype, device);
    let angles = numbers(tokens * half, 10, 3.0);
    let turn = |f: fn(f64) -> f64| angles.iter().map(|&a| f(a)).collect();
    let (cos, cosines) = stored(turn(f64::cos), [tokens, 1, half], dtype, device);
    let (sin, sines) = stored(turn(f64::sin), [tokens, 1, half], dtype, device);
    let turned = |x: &[f64], way: f64| {
        let mut y = vec![0.0; n];
        for row in 0..tokens * heads {
            for i in 0..half {
                let (at, angle) = (row * half * 2 + i, row / heads * half + i);
                let (c, s) = (cosines[angle], sines[angle] * way);
                y[at] = x[at] * c - x[at + half] * s;
                y[at + half] = x[at + half] * c + x[at] * s;
            }
        }
        y
    };
    let what = format!("rotary of {shape:?} in {dtype:?}");
    let own = leaf(&x);
    let y = fused(|| kernels::rotary(own.clone(), &cos, &sin));
    assert_near(&what, &values(y.clone().inner()), &turned(&xs, 1.0), tolerance);
    let mut grads = (y * g.autodiff()).sum().backward();
    let dx = own.grad_remove(&mut grads).expect("a leaf");
    assert_near(&format!("{what}: gradient"), &values(dx), &turned(&gs, -1.0), tolerance);
    // somebody else holds it: it stays as it was
    let again = fused(|| kernels::rotary(x.clone(), &cos, &sin));
    assert_near(&what, &values(again), &turned(&xs, 1.0), tolerance);
    assert_near("the input", &values(x), &xs, 0.0);
}

fn rotary_turns_and_its_gradient_turns_back(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..30, 1_usize..5, 1_usize..20), |(t, h, d)| {
            hold_rotary([t, h, d], dtype, tolerance, device);
        });
    }
}

fn queries_and_keys_turn_together_as_they_do_apart(device: &Device) {
    for (dtype, _) in precisions(device) {
        // 16 are read 16 bytes at a time on CUDA
        for [tokens, heads, others, half] in [[7, 4, 2, 16], [5, 3, 3, 9], [1, 1, 2, 4]] {
            let tensor = |heads: usize, salt| {
                let shape = [tokens, heads, 2 * half];
                stored::<3>(numbers(tokens * heads * 2 * half, salt, 1.0), shape, dtype, device).0
            };
            let angle = |salt| stored(numbers(tokens * half, salt, 1.0), [tokens, 1, half], dtype, device).0;
            let (x, g) = ([tensor(heads, 60), tensor(others, 61)], [tensor(heads, 62), tensor(others, 63)]);
            let (cos, sin) = (angle(64), angle(65));
            let leaves = x.each_ref().map(leaf);
            let turned = fused(|| kernels::rotary_each(leaves.clone(), &cos, &sin));
            let apart = leaves.clone().map(|x| kernels::rotary(x, &cos, &sin));
            let gradients = |turned: [Tensor<3>; 2], used: usize| {
                let roots = turned.into_iter().zip(&g).take(used).map(|(y, g)| kernels::backward_root(y, g.clone()));
                let mut grads = roots.reduce(|a, b| a + b).expect("one is used").backward();
                leaves.each_ref().map(|x| x.grad_remove(&mut grads).map(values))
            };
            let what = format!("{heads} and {others} heads of {half} pairs in {dtype:?}");
            for (both, one) in turned.iter().zip(&apart) {
                assert_eq!(values(both.clone().inner()), values(one.clone().inner()), "{what}");
            }
            assert_eq!(gradients(turned, 2), gradients(apart, 2), "{what}: gradients");
            let again = || leaves.clone().map(|x| kernels::rotary(x, &cos, &sin));
            let together = kernels::rotary_each(leaves.clone(), &cos, &sin);
            assert_eq!(gradients(together, 1), gradients(again(), 1), "{what}: gradients of one");
            for (x, salt) in x.into_iter().zip([60, 61]) {
                let [_, heads, _] = x.dims();
                assert_eq!(values(x), values(tensor(heads, salt)), "{what}: what somebody else holds");
            }
        }
    }
}
