//! Kernels against the same formulas in tensor operations, forward and backward. Shapes are no multiples of a vector or
//! block.

mod attention;
mod delta;
mod kv_pool;
mod packed;
mod paged;

use attention::groups;

use crate::{
    Activation, AttentionShape, PrefixGroups, Scaling, ScoreGradients, attention, glu, linear, linear_add, linear_each,
    linear_swiglu, rms_norm, rotary, score_gradient, score_rows,
};
use burn::tensor::activation::{log_softmax, silu};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The result of operations that all run through kernels.
#[track_caller]
fn fused<R>(work: impl FnOnce() -> R) -> R {
    crate::fused(work).expect("floats on the CPU")
}

/// Numbers between −1 and 1 that look random and are the same every time.
fn numbers<const D: usize>(shape: [usize; D], salt: u32) -> Tensor<D> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n as u32)
        .map(|i| {
            let x = (i.wrapping_add(salt << 16)).wrapping_mul(0x9E37_79B9);
            let x = (x ^ (x >> 15)).wrapping_mul(0x85EB_CA6B);
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

fn leaf<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    tensor.clone().autodiff().require_grad()
}

#[track_caller]
fn assert_same<const D: usize>(what: &str, actual: &Tensor<D>, expected: &Tensor<D>) {
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    let vec = |t: &Tensor<D>| t.clone().into_data().iter::<f64>().collect::<Vec<_>>();
    let (actual, expected) = (vec(actual), vec(expected));
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b));
    let size = norm(&mut expected.iter().copied()).max(1e-6);
    assert!(apart / size < 2e-6, "{what}: {:e} relative L2 apart", apart / size);
}

/// Holds a kernel of two inputs against its formula: values, and gradients under random weights.
fn hold<const A: usize, const B: usize, const O: usize>(
    a: &Tensor<A>,
    b: &Tensor<B>,
    kernel: impl Fn(&Tensor<A>, &Tensor<B>) -> Tensor<O>,
    formula: impl Fn(Tensor<A>, Tensor<B>) -> Tensor<O>,
) {
    let expected = formula(a.clone(), b.clone());
    assert_same("off the tape", &kernel(a, b), &expected);
    let weights = numbers(expected.dims(), 99).autodiff();
    let (ka, kb, fa, fb) = (leaf(a), leaf(b), leaf(a), leaf(b));
    let y = kernel(&ka, &kb);
    assert_same("on the tape", &y.clone().inner(), &expected);
    let actual = (y * weights.clone()).sum().backward();
    let wanted = (formula(fa.clone(), fb.clone()) * weights.clone()).sum().backward();
    let grad = "a leaf of this graph";
    assert_same("first gradient", &ka.grad(&actual).expect(grad), &fa.grad(&wanted).expect(grad));
    assert_same("second gradient", &kb.grad(&actual).expect(grad), &fb.grad(&wanted).expect(grad));
    // an input that is no leaf gets no gradient, and the other the same
    let y = kernel(&ka, b);
    let alone = (y * weights).sum().backward();
    assert_same("gradient beside a constant", &ka.grad(&alone).expect(grad), &fa.grad(&wanted).expect(grad));
}

#[test]
fn rms_norm_is_its_formula_with_and_without_an_offset() {
    for (shape, offset) in [([1, 7], 0.0), ([131, 48], 0.0), ([700, 67], 1.0)] {
        let (x, w) = (numbers(shape, 1), numbers([1, shape[1]], 2));
        hold(
            &x,
            &w,
            |x, w| fused(|| rms_norm(x, w, 1e-6, offset)),
            |x, w| {
                let mean = (x.clone() * x.clone()).mean_dim(1);
                x * (mean + 1e-6).sqrt().recip() * (w + offset)
            },
        );
    }
}

#[test]
fn glu_is_its_formula() {
    for shape in [[1, 5], [77, 130], [300, 129]] {
        let (gate, up) = (numbers(shape, 3) * 9.0, numbers(shape, 4));
        hold(&gate, &up, |a, b| fused(|| glu(a.clone(), b.clone(), Activation::Silu)), |a, b| silu(a) * b);
    }
}

#[test]
fn linear_is_its_formula() {
    for [rows, inner, outer] in [[1, 3, 5], [130, 33, 71], [257, 128, 200]] {
        let (x, w) = (numbers([rows, inner], 5), numbers([outer, inner], 6));
        hold(&x, &w, |x, w| fused(|| linear(x, w)), |x, w| x.matmul(w.transpose()));
    }
}

#[test]
fn rotary_turns_and_its_gradient_turns_back() {
    for [tokens, heads, dim] in [[1, 1, 2], [37, 3, 10], [300, 4, 32]] {
        let angle = numbers([tokens, 1, dim / 2], 7) * 3.0;
        let (cos, sin) = (angle.clone().cos(), angle.sin());
        let formula = |x: Tensor<3>, _: Tensor<1>| {
            let on = |t: &Tensor<3>| {
                if x.device().is_autodiff() { t.clone().autodiff() } else { t.clone() }
            };
            let (cos, sin) = (on(&cos), on(&sin));
            let (a, b) = (x.clone().narrow(2, 0, dim / 2), x.narrow(2, dim / 2, dim / 2));
            let first = a.clone() * cos.clone() - b.clone() * sin.clone();
            Tensor::cat(vec![first, b * cos + a * sin], 2)
        };
        let x = numbers([tokens, heads, dim], 8);
        let actual = fused(|| rotary(x.clone(), &cos, &sin));
        let nothing = numbers([1], 0);
        assert_same("values", &actual, &formula(x.clone(), nothing.clone()));
        let weights = numbers(x.dims(), 9).autodiff();
        let (a, b) = (leaf(&x), leaf(&x));
        let y = fused(|| rotary(a.clone(), &cos, &sin));
        let actual = (y * weights.clone()).sum().backward();
        let wanted = (formula(b.clone(), nothing) * weights).sum().backward();
        assert_same("gradient", &a.grad(&actual).expect("a leaf"), &b.grad(&wanted).expect("a leaf"));
    }
}

#[test]
fn products_of_few_rows_are_their_formulas() {
    for [rows, inner, outer] in [[1, 3, 5], [9, 33, 71], [64, 128, 200]] {
        let x = numbers([rows, inner], 5);
        let [a, b] = [6, 7].map(|seed| numbers([outer, inner], seed));
        let c = numbers([3, inner], 8);
        let plain = |w: &Tensor<2>| x.clone().matmul(w.clone().transpose());
        let actual = fused(|| linear_each(&x, [&a, &c, &b], [None; 3]));
        for (actual, w) in actual.iter().zip([&a, &c, &b]) {
            assert_same("products", actual, &plain(w));
        }
        let base = numbers([rows, outer], 9);
        let actual = fused(|| linear_add(base.clone(), &x, &a));
        assert_same("on top", &actual, &(base + plain(&a)));
        let actual = fused(|| linear_swiglu(&x, &a, &b));
        assert_same("gated", &actual, &(silu(plain(&a)) * plain(&b)));
        let graph = x.clone().autodiff();
        assert!(crate::fused(|| linear_each(&graph, [&a.clone().autodiff()], [None])).is_none(), "a graph");
    }
}

#[test]
fn scores_and_their_gradient_are_those_of_log_softmax() {
    let cases = [([1, 3], 1.0, None), ([9, 130], 0.7, None), ([70, 1001], 1.3, Some(3.0))];
    for ([rows, vocab], temperature, softcap) in cases {
        let logits = numbers([rows, vocab], 17) * 8.0;
        let targets: Vec<i64> = (0..rows).map(|r| (r * 31 % vocab) as i64).collect();
        let targets = Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), &Device::flex());
        let formula = |logits: Tensor<2>, targets: Tensor<1, Int>| {
            let capped = match softcap {
                Some(cap) => (logits / cap).tanh() * cap,
                None => logits,
            };
            let logp = log_softmax(capped / temperature, 1);
            let entropy = -(logp.clone().exp() * logp.clone()).sum_dim(1).reshape([rows]);
            (logp.gather(1, targets.reshape([rows, 1])).reshape([rows]), entropy)
        };
        let scaling = Scaling { temperature, softcap };
        let actual = fused(|| score_rows(&logits, &targets, scaling));
        let (logp, entropy) = formula(logits.clone(), targets.clone());
        assert_same("log-probs", &actual.logp, &logp);
        assert_same("entropies", &actual.entropy, &entropy);
        let (d_logp, d_entropy) = (numbers([rows], 18), numbers([rows], 19));
        for d_entropy in [None, Some(&d_entropy)] {
            let upstream = ScoreGradients { d_logp: &d_logp, d_entropy };
            let gradient = fused(|| score_gradient(logits.clone(), &targets, &actual, upstream, scaling));
            let leaf = leaf(&logits);
            let (logp, entropy) = formula(leaf.clone(), targets.clone().autodiff());
            let mut loss = (logp * d_logp.clone().autodiff()).sum();
            if let Some(d) = d_entropy {
                loss = loss + (entropy * d.clone().autodiff()).sum();
            }
            let expected = leaf.grad(&loss.backward()).expect("a leaf");
            assert_same("gradient", &gradient, &expected);
        }
    }
}

#[test]
fn exponentials_are_exact_to_two_units_and_end_well() {
    use super::real::Real;
    let mut worst = 0.0_f64;
    for i in -87_000..88_500 {
        let x = i as f32 * 1e-3;
        let (actual, exact) = (f64::from(Real::exp(x)), f64::from(x).exp());
        worst = worst.max(((actual - exact) / exact).abs());
    }
    assert!(worst < 2.5e-7, "{worst:e}");
    assert!(Real::exp(-1e9_f32) < 1e-37 && Real::exp(f32::NEG_INFINITY) < 1e-37);
    assert!(Real::exp(f32::NAN).is_nan());
    assert!(Real::exp(200.0_f32) > 3e38);
}

#[test]
fn samples_invert_the_cumulative_distribution_and_greedy_ones_are_the_argmax() {
    use crate::sample_rows;
    let (rows, vocab, temperature) = (7, 1003, 0.8);
    let logits = numbers([rows, vocab], 21) * 6.0;
    let logp = log_softmax(logits.clone() / temperature, 1);
    let logp: Vec<f64> = logp.into_data().iter::<f64>().collect();
    let uniforms: Vec<f32> = (0..rows).map(|r| (r as f32 + 0.37) / rows as f32).collect();
    let drawn = fused(|| sample_rows(&logits, temperature, Some(&uniforms)));
    for (row, sampled) in drawn.iter().enumerate() {
        let row_logp = &logp[row * vocab..][..vocab];
        let (token, u) = (sampled.token as usize, f64::from(uniforms[row]));
        let up_to = |end: usize| row_logp[..end].iter().map(|l| l.exp()).sum::<f64>();
        assert!(up_to(token) <= u + 1e-5 && up_to(token + 1) >= u - 1e-5, "row {row}");
        assert!((f64::from(sampled.logp) - row_logp[token]).abs() < 1e-5, "row {row}");
    }
    let greedy = fused(|| sample_rows(&logits, 1.0, None));
    for (row, sampled) in greedy.into_iter().enumerate() {
        let row_logp = &logp[row * vocab..][..vocab];
        let largest = row_logp[sampled.token as usize];
        assert!(row_logp.iter().all(|&l| l <= largest), "row {row}");
    }
}

/// Holds a kernel's result and both gradients to those in f32, rounded to the inputs' type.
fn hold_half<const D: usize, const O: usize>(
    a: &Tensor<D>,
    b: &Tensor<D>,
    kernel: impl Fn(&Tensor<D>, &Tensor<D>) -> Tensor<O>,
) {
    for dtype in [DType::BF16, DType::F16] {
        let (a, b) = (a.clone().cast(dtype), b.clone().cast(dtype));
        let run = |a: &Tensor<D>, b: &Tensor<D>| {
            let (a, b) = (leaf(a), leaf(b));
            let y = kernel(&a, &b);
            let weights = numbers(y.dims(), 99).cast(dtype).cast(y.dtype());
            let grads = (y.clone() * weights.autodiff()).sum().backward();
            let leaf = "a leaf of this graph";
            let of = |t: &Tensor<D>| t.grad(&grads).expect(leaf);
            (y.inner(), of(&a), of(&b))
        };
        let (y, da, db) = run(&a, &b);
        assert_eq!([y.dtype(), da.dtype(), db.dtype()], [dtype; 3]);
        let (wy, wa, wb) = run(&a.cast(DType::F32), &b.cast(DType::F32));
        assert_same("result", &y, &wy.cast(dtype));
        assert_same("first gradient", &da, &wa.cast(dtype));
        assert_same("second gradient", &db, &wb.cast(dtype));
    }
}

#[test]
fn half_precision_is_f32_rounded_once() {
    hold_half(&numbers([13, 37], 1), &numbers([1, 37], 2), |x, w| fused(|| rms_norm(x, w, 1e-6, 1.0)));
    hold_half(&numbers([13, 37], 3), &numbers([13, 37], 4), |a, b| {
        fused(|| glu(a.clone(), b.clone(), Activation::Silu))
    });
    hold_half(&numbers([150, 37], 5), &numbers([21, 37], 6), |x, w| fused(|| linear(x, w)));
    let shape = AttentionShape {
        groups: PrefixGroups::new(groups(&[(0, &[7, 12])]), &Device::flex()),
        window: Some(5),
        scale: 0.3,
        softcap: None,
    };
    let values = numbers([19, 2, 8], 11).cast(DType::BF16);
    hold_half(&numbers([19, 2, 8], 7), &numbers([19, 2, 8], 8), |q, k| {
        attention([q, k, &values.clone().cast(q.dtype())], None, &shape)
    });
    let zeros: Tensor<3> = Tensor::zeros([19, 2, 8], &Device::flex());
    let (cos, sin) = (numbers([19, 1, 4], 9), numbers([19, 1, 4], 10));
    hold_half(&numbers([19, 2, 8], 7), &zeros, |x, y| fused(|| rotary(x.clone(), &cos, &sin)) + y.clone());
}
