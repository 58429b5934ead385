//! What is around the rule of gated `DeltaNet`: its convolution, its decays and its norm.

use super::{assert_near, cases, fused, leaf, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{self, SequenceRows, StateRows};

on_gpus!(
    the_convolution_and_its_gradients_are_their_formulas_within_each_sequence,
    a_convolution_that_goes_on_behind_another_sequence_is_that_of_both,
    logs_of_decays_and_their_gradients_are_their_formulas,
    the_gated_norm_and_its_gradients_are_their_formulas,
);

/// Sequences of these lengths, one behind the other, after so many rows that are in none. The first has the last slot.
pub(super) fn sequences(skipped: usize, lengths: &[usize], begins: bool) -> Vec<StateRows> {
    let mut row = skipped;
    let own = lengths.iter().enumerate().map(|(index, &n)| {
        row += n;
        StateRows { rows: row - n..row, slot: lengths.len() - 1 - index, begins }
    });
    own.collect()
}

pub(super) fn on(device: &Device, all: &[StateRows]) -> SequenceRows {
    SequenceRows::new(all.to_vec(), device)
}

fn silu(x: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-x).exp());
    (x * s, s * (1.0 + x * (1.0 - s)))
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Lengths and parents of sequences that go on behind others: prefixes of whole chunks, of fewer rows than there are
/// taps, and of prefixes.
pub(super) const TREES: [(&[usize], &[Option<usize>]); 3] = [
    (&[64, 130, 64, 9, 1, 4, 2], &[None, Some(0), Some(0), None, Some(3), None, Some(3)]),
    (&[70, 1, 2, 5, 130, 3, 1, 1], &[None, Some(0), Some(1), Some(1), Some(0), None, Some(3), Some(6)]),
    (&[2, 3, 1, 70], &[None, Some(0), Some(0), Some(0)]),
];

/// A tree of sequences, and the whole sequences that it holds, with the rows that several begin with repeated.
pub(super) struct Tree {
    pub shared: SequenceRows,
    pub whole: Vec<StateRows>,
    /// Of each row of whole sequences the one of the tree, and whether it is the first such row.
    rows: Vec<(usize, bool)>,
    pub tokens: usize,
}

impl Tree {
    pub fn new((lengths, parents): (&[usize], &[Option<usize>]), device: &Device) -> Self {
        let mut tokens = 0;
        let spans = lengths.iter().map(|&n| {
            tokens += n;
            tokens - n..tokens
        });
        let spans: Vec<std::ops::Range<usize>> = spans.collect();
        let (mut rows, mut whole, mut known) = (Vec::new(), Vec::new(), vec![false; tokens]);
        for leaf in (0..spans.len()).filter(|&i| !parents.contains(&Some(i))) {
            let path: Vec<usize> = std::iter::successors(Some(leaf), |&i| parents[i]).collect();
            let first = rows.len();
            for row in path.into_iter().rev().flat_map(|i| spans[i].clone()) {
                rows.push((row, !std::mem::replace(&mut known[row], true)));
            }
            whole.push(StateRows { rows: first..rows.len(), slot: whole.len(), begins: true });
        }
        Self {
            shared: SequenceRows::whole(spans.into_iter().zip(parents.iter().copied()), device),
            whole,
            rows,
            tokens,
        }
    }

    /// Numbers of the tree's rows for those of whole sequences; of gradients of a result only the first of each.
    pub fn repeated(&self, of_tree: &[f64], only_first: bool) -> Vec<f64> {
        let columns = of_tree.len() / self.tokens;
        let rows = self.rows.iter().flat_map(|&(row, is_first)| {
            let kept = f64::from(u8::from(is_first || !only_first));
            of_tree[row * columns..(row + 1) * columns].iter().map(move |x| kept * x)
        });
        rows.collect()
    }

    /// What is expected of the tree, given it of whole sequences with gradients of the first `inputs` inputs by rows.
    pub fn merged(&self, whole: Expected, inputs: usize) -> Expected {
        let merge = |values: &[f64], sums: bool| {
            let columns = values.len() / self.rows.len();
            let mut merged = vec![0.0; self.tokens * columns];
            for (values, &(row, is_first)) in values.chunks_exact(columns).zip(&self.rows) {
                for (merged, value) in merged[row * columns..].iter_mut().zip(values) {
                    *merged += if sums || is_first { *value } else { 0.0 };
                }
            }
            merged
        };
        let gradients = whole.gradients.into_iter().enumerate();
        let gradients = gradients.map(|(i, values)| if i < inputs { merge(&values, true) } else { values });
        Expected { gradients: gradients.collect(), y: merge(&whole.y, false) }
    }
}

/// A result, and gradients of the inputs.
pub(super) struct Expected {
    pub y: Vec<f64>,
    pub gradients: Vec<Vec<f64>>,
}

/// Holds a kernel, given tensors and the gradient of its result, against what is expected.
pub(super) fn hold(
    what: &str,
    inputs: &[&Tensor<2>],
    upstream: &Tensor<2>,
    kernel: &dyn Fn(&[Tensor<2>]) -> Tensor<2>,
    expected: &Expected,
    tolerance: f64,
) {
    let leaves: Vec<Tensor<2>> = inputs.iter().map(|t| leaf(*t)).collect();
    let y = kernel(&leaves);
    assert_near(what, &values(y.clone().inner()), &expected.y, tolerance);
    let plain: Vec<Tensor<2>> = inputs.iter().map(|t| (*t).clone()).collect();
    let again = kernel(&plain);
    assert_near(what, &values(again), &expected.y, tolerance);
    let mut tape = (y * upstream.clone().autodiff()).sum().backward();
    for (i, (leaf, expected)) in leaves.iter().zip(&expected.gradients).enumerate() {
        let found = values(leaf.grad_remove(&mut tape).expect("a leaf"));
        assert_near(&format!("{what}: gradient {i}"), &found, expected, tolerance);
    }
}

/// The convolution by its definition.
pub(super) fn convolution(x: &[f64], w: &[f64], g: &[f64], channels: usize, all: &[StateRows]) -> Expected {
    let taps = w.len() / channels;
    let mut y = vec![0.0; x.len()];
    let (mut dx, mut dw) = (y.clone(), vec![0.0; w.len()]);
    for StateRows { rows, .. } in all {
        for (row, c) in rows.clone().flat_map(|row| (0..channels).map(move |c| (row, c))) {
            let seen = || (0..taps).filter(|back| row >= rows.start + back);
            let tap = |back: usize| c * taps + taps - 1 - back;
            let z = seen().map(|back| w[tap(back)] * x[(row - back) * channels + c]);
            let (value, slope) = silu(z.sum());
            let at = row * channels + c;
            y[at] = value;
            for back in seen() {
                dx[at - back * channels] += g[at] * slope * w[tap(back)];
                dw[tap(back)] += g[at] * slope * x[at - back * channels];
            }
        }
    }
    Expected { y, gradients: vec![dx, dw] }
}

fn the_convolution_and_its_gradients_are_their_formulas_within_each_sequence(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for (skipped, lengths, channels, taps) in
            [(0, vec![1], 1, 2), (0, vec![2, 9, 1, 130], 70, 4), (3, vec![5, 64, 65], 65, 4), (1, vec![70], 3, 1)]
        {
            let all = sequences(skipped, &lengths, true);
            let rows = skipped + lengths.iter().sum::<usize>();
            let (n, shape) = (rows * channels, [rows, channels]);
            let (x, xs) = stored(numbers(n, 4, 2.0), shape, dtype, device);
            let w = numbers(channels * taps, 5, 1.0);
            let (w, ws) = stored(w, [channels, taps], dtype, device);
            let (g, gs) = stored(numbers(n, 6, 1.0), shape, dtype, device);
            let own = on(device, &all);
            hold(
                &format!("convolution over {lengths:?} in {dtype:?}"),
                &[&x, &w],
                &g,
                &|t| fused(|| kernels::causal_convolution(&t[0], &t[1], &own)),
                &convolution(&xs, &ws, &gs, channels, &all),
                tolerance,
            );
        }
    }
}

fn a_convolution_that_goes_on_behind_another_sequence_is_that_of_both(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for (tree, (channels, taps)) in TREES.into_iter().zip([(70, 4), (65, 4), (3, 3)]) {
            let of = Tree::new(tree, device);
            let (n, shape) = (of.tokens * channels, [of.tokens, channels]);
            let (x, xs) = stored(numbers(n, 4, 2.0), shape, dtype, device);
            let (w, ws) = stored(numbers(channels * taps, 5, 1.0), [channels, taps], dtype, device);
            let (g, gs) = stored(numbers(n, 6, 1.0), shape, dtype, device);
            let whole = convolution(&of.repeated(&xs, false), &ws, &of.repeated(&gs, true), channels, &of.whole);
            hold(
                &format!("convolution over {tree:?} in {dtype:?}"),
                &[&x, &w],
                &g,
                &|t| fused(|| kernels::causal_convolution(&t[0], &t[1], &of.shared)),
                &of.merged(whole, 1),
                tolerance,
            );
        }
    }
}

/// Logs of decays by their definition.
fn log_decays([a, decay_log, time_bias]: [&[f64]; 3], g: &[f64]) -> Expected {
    let heads = decay_log.len();
    let (mut y, mut da) = (Vec::new(), Vec::new());
    let (mut of_log, mut of_bias) = (vec![0.0; heads], vec![0.0; heads]);
    for (i, (a, g)) in a.iter().zip(g).enumerate() {
        let head = i % heads;
        let (rate, x) = (decay_log[head].exp(), a + time_bias[head]);
        let value = -rate * x.exp().ln_1p();
        let d = -g * rate / (1.0 + (-x).exp());
        y.push(value);
        da.push(d);
        of_log[head] += g * value;
        of_bias[head] += d;
    }
    Expected { y, gradients: vec![da, of_log, of_bias] }
}

fn logs_of_decays_and_their_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        cases((1_usize..300, 1_usize..40), |(rows, heads)| {
            let n = rows * heads;
            let (a, all) = stored(numbers(n, 11, 9.0), [rows, heads], dtype, device);
            let of_head = |salt| stored(numbers(heads, salt, 2.0), [1, heads], dtype, device);
            let ((log, logs), (bias, biases)) = (of_head(12), of_head(13));
            let (g, gs) = stored(numbers(n, 14, 1.0), [rows, heads], DType::F32, device);
            hold(
                &format!("decays of {rows} rows and {heads} heads in {dtype:?}"),
                &[&a, &log, &bias],
                &g,
                &|t| fused(|| kernels::log_decays(&t[0], &t[1], &t[2])),
                &log_decays([&all, &logs, &biases], &gs),
                tolerance,
            );
        });
    }
}

/// The norm by its definition.
fn gated_norm([x, z, w]: [&[f64]; 3], g: &[f64], eps: f64) -> Expected {
    let n = w.len();
    let (mut y, mut dx, mut dz) = (Vec::new(), Vec::new(), Vec::new());
    let mut dw = vec![0.0; n];
    for ((x, z), g) in x.chunks(n).zip(z.chunks(n)).zip(g.chunks(n)) {
        let r = 1.0 / (dot(x, x) / n as f64 + eps).sqrt();
        let gates: Vec<(f64, f64)> = z.iter().map(|z| silu(*z)).collect();
        let through: f64 = (0..n).map(|i| g[i] * w[i] * gates[i].0 * x[i]).sum();
        for i in 0..n {
            let (gate, slope) = gates[i];
            y.push(x[i] * r * w[i] * gate);
            dx.push(r * (g[i] * w[i] * gate - x[i] * r * r * through / n as f64));
            dz.push(g[i] * x[i] * r * w[i] * slope);
            dw[i] += g[i] * x[i] * r * gate;
        }
    }
    Expected { y, gradients: vec![dx, dz, dw] }
}

fn the_gated_norm_and_its_gradients_are_their_formulas(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        for (wide, [rows, n]) in [(DType::F32, [3, 7]), (DType::F32, [531, 128]), (dtype, [40, 33])] {
            let shape = [rows, n];
            let (x, xs) = stored(numbers(rows * n, 6, 2.0), shape, wide, device);
            let (z, zs) = stored(numbers(rows * n, 7, 4.0), shape, dtype, device);
            let (w, ws) = stored(numbers(n, 8, 1.0), [1, n], dtype, device);
            let (g, gs) = stored(numbers(rows * n, 9, 1.0), shape, dtype, device);
            hold(
                &format!("gated norm of {shape:?} in {wide:?} and {dtype:?}"),
                &[&x, &z, &w],
                &g,
                &|t| fused(|| kernels::gated_rms_norm(&t[0], &t[1], &t[2], 1e-6)),
                &gated_norm([&xs, &zs, &ws], &gs, 1e-6),
                tolerance,
            );
        }
    }
}
