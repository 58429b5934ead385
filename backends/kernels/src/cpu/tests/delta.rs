//! Gated `DeltaNet`'s kernels against their formulas, token by token in f64: values, states, and gradients against
//! differences of values.

use super::fused;
use crate::formulas::{convolution, delta_rule};
use crate::{
    DeltaHeads, SequenceRows, StateRows, causal_convolution, continue_convolution, continue_delta_rule,
    gated_delta_rule, gated_rms_norm,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// Numbers between −1 and 1 that look random.
fn numbers(n: usize, salt: u32) -> Vec<f64> {
    let number = |i: u32| {
        let x = (i.wrapping_add(salt << 16)).wrapping_mul(0x9E37_79B9);
        let x = (x ^ (x >> 15)).wrapping_mul(0x85EB_CA6B);
        f64::from(x >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..n as u32).map(number).collect()
}

fn tensor(values: &[f64], columns: usize, dtype: DType) -> Tensor<2> {
    let shape = [values.len() / columns, columns];
    let data = TensorData::new(values.to_vec(), shape).convert_dtype(dtype);
    Tensor::from_data(data, (&Device::flex(), dtype))
}

fn values(tensor: Tensor<2>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

#[track_caller]
fn assert_near(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut actual.iter().zip(expected).map(|(a, b)| a - b));
    let apart = apart / norm(&mut expected.iter().copied()).max(1e-9);
    assert!(apart < tolerance, "{what}: {apart:e} relative L2 apart");
}

/// A formula of some tensors: their values and columns, and what it gives.
type Formula<'a> = &'a dyn Fn(&[Vec<f64>]) -> Vec<f64>;

/// Holds a kernel against its formula in f64 and in f32: values, and gradients in f64 against differences of the
/// formula in a random direction for each input, in f32 against those in f64.
fn hold(what: &str, inputs: &[(Vec<f64>, usize)], kernel: &dyn Fn(&[Tensor<2>]) -> Tensor<2>, formula: Formula<'_>) {
    let plain: Vec<Vec<f64>> = inputs.iter().map(|(v, _)| v.clone()).collect();
    let expected = formula(&plain);
    let weights = numbers(expected.len(), 77);
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        let out = formula(inputs);
        out.iter().zip(&weights).map(|(a, b)| a * b).sum()
    };
    let mut exact: Vec<Vec<f64>> = Vec::new();
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 3e-6)] {
        let tensors: Vec<Tensor<2>> = inputs.iter().map(|(v, c)| tensor(v, *c, dtype)).collect();
        let out = kernel(&tensors);
        let columns = out.dims()[1];
        let label = format!("{what} in {dtype:?}");
        assert_near(&label, &values(out), &expected, tolerance);
        let leaves: Vec<Tensor<2>> = tensors.iter().map(|t| t.clone().autodiff().require_grad()).collect();
        let upstream = tensor(&weights, columns, dtype).autodiff();
        let tape = (kernel(&leaves) * upstream).sum().backward();
        let gradients = leaves.iter().map(|leaf| leaf.grad(&tape).expect("a leaf"));
        let gradients: Vec<Vec<f64>> = gradients.map(values).collect();
        if dtype == DType::F32 {
            for (i, (actual, exact)) in gradients.iter().zip(&exact).enumerate() {
                assert_near(&format!("{label}: gradient {i}"), actual, exact, 2e-5);
            }
            continue;
        }
        for (i, gradient) in gradients.iter().enumerate() {
            let direction = numbers(gradient.len(), 100 + i as u32);
            let moved = |step: f64| {
                let mut inputs = plain.clone();
                for (x, d) in inputs[i].iter_mut().zip(&direction) {
                    *x += step * d;
                }
                loss(&inputs)
            };
            let step = 1e-5;
            let expected = (moved(step) - moved(-step)) / (2.0 * step);
            let actual: f64 = gradient.iter().zip(&direction).map(|(a, b)| a * b).sum();
            let size = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert!(
                (actual - expected).abs() < 2e-7 * size.max(expected.abs()).max(1e-3),
                "{label}: gradient {i} gives {actual}, differences {expected}"
            );
        }
        exact = gradients;
    }
}

/// Sequences of these lengths, one behind the other, after so many rows that are in none.
fn sequences(skipped: usize, lengths: &[usize], begins: bool) -> SequenceRows {
    let mut row = skipped;
    let rows = lengths.iter().enumerate().map(|(slot, &n)| {
        row += n;
        StateRows { rows: row - n..row, slot, begins }
    });
    SequenceRows::new(rows.collect(), &Device::flex())
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The convolution of the rows of each sequence, by its definition.
fn convolved(x: &[f64], w: &[f64], rows: usize, sequences: &[StateRows]) -> Vec<f64> {
    let channels = x.len() / rows;
    let taps = w.len() / channels;
    let mut out = vec![0.0; x.len()];
    for StateRows { rows, .. } in sequences {
        for (row, c) in rows.clone().flat_map(|row| (0..channels).map(move |c| (row, c))) {
            let sum: f64 = (0..taps)
                .filter(|back| row >= rows.start + back)
                .map(|back| w[c * taps + taps - 1 - back] * x[(row - back) * channels + c])
                .sum();
            out[row * channels + c] = silu(sum);
        }
    }
    out
}

/// The delta rule token by token, and the states after each sequence.
fn recurrent([qkv, g, beta]: [&[f64]; 3], heads: DeltaHeads, sequences: &[StateRows]) -> (Vec<f64>, Vec<f64>) {
    let (dk, dv, channels) = (heads.key_dim, heads.value_dim, heads.channels());
    let rows = qkv.len() / channels;
    let mut out = vec![0.0; rows * heads.values * dv];
    let mut states = Vec::new();
    for StateRows { rows, .. } in sequences {
        for head in 0..heads.values {
            let mut state = vec![0.0; dk * dv];
            for row in rows.clone() {
                let unit = |first: usize| {
                    let x = &qkv[row * channels + first..][..dk];
                    let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.iter().map(|x| x / norm).collect::<Vec<f64>>()
                };
                let key_head = head / heads.group();
                let (q, k) = (unit(key_head * dk), unit((heads.keys + key_head) * dk));
                let v = &qkv[row * channels + 2 * heads.keys * dk + head * dv..][..dv];
                let at = row * heads.values + head;
                for s in &mut state {
                    *s *= g[at].exp();
                }
                for d in 0..dv {
                    let held: f64 = (0..dk).map(|i| state[i * dv + d] * k[i]).sum();
                    let delta = beta[at] * (v[d] - held);
                    for i in 0..dk {
                        state[i * dv + d] += k[i] * delta;
                    }
                    let read: f64 = (0..dk).map(|i| state[i * dv + d] * q[i]).sum();
                    out[at * dv + d] = read / (dk as f64).sqrt();
                }
            }
            states.extend(state);
        }
    }
    (out, states)
}

/// Queries, keys and values, log decays and β of so many rows. Decays are slow and fast, and some keys repeat.
fn rule_inputs(rows: usize, heads: DeltaHeads) -> [(Vec<f64>, usize); 3] {
    let channels = heads.channels();
    let mut qkv = numbers(rows * channels, 1);
    for row in (3..rows).step_by(5) {
        let (before, after) = qkv.split_at_mut(row * channels);
        after[..channels].copy_from_slice(&before[(row - 1) * channels..]);
    }
    let g = numbers(rows * heads.values, 2);
    let g = g.iter().map(|x| -(2.0 * x).exp() * 0.3).collect();
    let beta = numbers(rows * heads.values, 3);
    let beta = beta.iter().map(|x| 0.5 + 0.49 * x).collect();
    [(qkv, channels), (g, heads.values), (beta, heads.values)]
}

const HEADS: [DeltaHeads; 3] = [
    DeltaHeads { keys: 1, values: 1, key_dim: 4, value_dim: 4 },
    DeltaHeads { keys: 2, values: 4, key_dim: 6, value_dim: 10 },
    DeltaHeads { keys: 2, values: 2, key_dim: 17, value_dim: 5 },
];

#[test]
fn the_convolution_is_its_formula_within_each_sequence() {
    for (skipped, lengths, channels, taps) in [
        (0, vec![1], 1, 2),
        (0, vec![2, 9, 1, 30], 70, 4),
        (3, vec![5, 40], 65, 3),
        (1, vec![70, 1, 64, 130], 5, 4),
        (0, vec![66], 1030, 4),
    ] {
        let sequences = sequences(skipped, &lengths, true);
        let rows = skipped + lengths.iter().sum::<usize>();
        let inputs = [(numbers(rows * channels, 4), channels), (numbers(channels * taps, 5), taps)];
        hold(
            &format!("convolution over {lengths:?}"),
            &inputs,
            &|t| fused(|| causal_convolution(&t[0], &t[1], &sequences)),
            &|v| convolved(&v[0], &v[1], rows, &sequences),
        );
    }
}

#[test]
fn the_delta_rule_in_chunks_is_the_rule_token_by_token() {
    for (heads, (skipped, lengths)) in HEADS
        .into_iter()
        .flat_map(|heads| [(0, vec![1, 2]), (2, vec![70, 3, 64]), (0, vec![150])].map(|lengths| (heads, lengths)))
    {
        let sequences = sequences(skipped, &lengths, true);
        let inputs = rule_inputs(skipped + lengths.iter().sum::<usize>(), heads);
        hold(
            &format!("delta rule over {lengths:?}, {heads:?}"),
            &inputs,
            &|t| fused(|| gated_delta_rule([&t[0], &t[1], &t[2]], heads, &sequences)),
            &|v| recurrent([&v[0], &v[1], &v[2]], heads, &sequences).0,
        );
    }
}

#[test]
fn the_gated_norm_is_its_formula() {
    let (rows, n) = (131, 10);
    let inputs = [(numbers(rows * n, 6), n), (numbers(rows * n, 7), n), (numbers(n, 8), n)];
    hold("gated norm", &inputs, &|t| fused(|| gated_rms_norm(&t[0], &t[1], &t[2], 1e-6)), &|v| {
        let rows = v[0].chunks(n).zip(v[1].chunks(n));
        let row = |(x, z): (&[f64], &[f64])| {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / n as f64;
            let columns = x.iter().zip(z).zip(&v[2]);
            columns.map(|((x, z), w)| x / (mean + 1e-6).sqrt() * w * silu(*z)).collect::<Vec<f64>>()
        };
        rows.flat_map(row).collect()
    });
}

#[test]
fn sequences_that_continue_from_states_give_what_whole_ones_give() {
    let (heads, lengths, taps) = (HEADS[1], [90, 70, 5], 4);
    let rows: usize = lengths.iter().sum();
    let whole = sequences(0, &lengths, true);
    let inputs = rule_inputs(rows, heads);
    let [(qkv, channels), (g, _), (beta, values_of)] = &inputs;
    let w = numbers(channels * taps, 5);
    let (expected, states) = recurrent([qkv, g, beta], heads, &whole);
    let convolution = convolved(qkv, &w, rows, &whole);
    let dtype = DType::F64;
    // pools that hold something else where sequences begin
    let mut pool = tensor(&vec![3.0; 3 * heads.state()], heads.state(), dtype);
    let mut last = tensor(&vec![3.0; 3 * 3 * channels], 3 * channels, dtype);
    let mut done = [0; 3];
    let mut begins = true;
    // a long piece, one that is shorter than the taps, single tokens, and the rest
    for most in [67, 2, 1, 1, 1000] {
        let taken: Vec<usize> = (0..3).map(|i| most.min(lengths[i] - done[i])).collect();
        let piece = |values: &[f64], columns: usize| {
            let pieces = whole.iter().zip(&done).zip(&taken);
            let rows = |((s, done), n): ((&StateRows, &usize), &usize)| {
                values[(s.rows.start + done) * columns..][..n * columns].to_vec()
            };
            pieces.flat_map(rows).collect::<Vec<f64>>()
        };
        let layout = sequences(0, &taken, begins);
        let x = tensor(&piece(qkv, *channels), *channels, dtype);
        let (g, beta) =
            (tensor(&piece(g, *values_of), *values_of, dtype), tensor(&piece(beta, *values_of), *values_of, dtype));
        let (out, next) = fused(|| continue_delta_rule([&x, &g, &beta], pool, heads, &layout));
        pool = next;
        let columns = heads.values * heads.value_dim;
        assert_near("output", &values(out), &piece(&expected, columns), 1e-12);
        let taps = tensor(&w, taps, dtype);
        let (out, next) = fused(|| continue_convolution(&x, &taps, last, &layout));
        last = next;
        assert_near("sums", &values(out), &piece(&convolution, *channels), 1e-12);
        for (done, n) in done.iter_mut().zip(&taken) {
            *done += n;
        }
        begins = false;
    }
    assert_eq!(done, lengths);
    assert_near("states", &values(pool), &states, 1e-12);
    let kept: Vec<f64> =
        whole.iter().flat_map(|s| qkv[(s.rows.end - 3) * channels..s.rows.end * channels].to_vec()).collect();
    assert_near("last inputs", &values(last), &kept, 1e-12);
}

/// Sequences that go on behind others: rows before them that are in none, their lengths, and their parents.
type Tree<'a> = (usize, &'a [usize], &'a [Option<usize>]);

const TREES: [Tree<'_>; 6] = [
    (0, &[5, 3, 7, 1], &[None, Some(0), Some(0), Some(0)]),
    // a prefix that is shorter than the taps, and one of a single row
    (1, &[2, 3, 1, 70], &[None, Some(0), Some(0), Some(0)]),
    (0, &[1, 2, 65], &[None, Some(0), Some(0)]),
    // whole chunks, several trees, a sequence by itself, and prefixes of prefixes
    (0, &[64, 130, 64, 9, 1, 4, 2], &[None, Some(0), Some(0), None, Some(3), None, Some(3)]),
    (2, &[70, 1, 2, 5, 130, 3, 1, 1], &[None, Some(0), Some(1), Some(1), Some(0), None, Some(3), Some(6)]),
    // nothing but its parent
    (0, &[4, 0, 3, 2], &[None, Some(0), Some(1), Some(1)]),
];

/// A forward pass over a tree, and one that repeats the rows that several sequences begin with.
struct Repeated {
    shared: SequenceRows,
    whole: SequenceRows,
    /// Of each row of the second the one of the first.
    rows: Tensor<1, Int>,
    tokens: usize,
}

impl Repeated {
    fn new((skipped, lengths, parents): Tree<'_>) -> Self {
        let device = Device::flex();
        let mut row = skipped;
        let spans = lengths.iter().map(|&n| {
            row += n;
            row - n..row
        });
        let spans: Vec<Range<usize>> = spans.collect();
        let (mut rows, mut whole) = (Vec::new(), Vec::new());
        for leaf in (0..spans.len()).filter(|&i| !parents.contains(&Some(i))) {
            let mut path = vec![spans[leaf].clone()];
            let mut parent = parents[leaf];
            while let Some(i) = parent {
                path.insert(0, spans[i].clone());
                parent = parents[i];
            }
            let first = rows.len();
            rows.extend(path.into_iter().flatten().map(|row| row as i32));
            whole.push((first..rows.len(), None));
        }
        let count = rows.len();
        Self {
            shared: SequenceRows::whole(spans.into_iter().zip(parents.iter().copied()), &device),
            whole: SequenceRows::whole(whole, &device),
            rows: Tensor::from_data(TensorData::new(rows, [count]), &device),
            tokens: row,
        }
    }

    /// Holds an operation over the tree against the same one that repeats rows: values and gradients.
    fn hold(
        &self,
        what: &str,
        inputs: &[(Vec<f64>, usize)],
        operation: &dyn Fn(&[Tensor<2>], &SequenceRows) -> Tensor<2>,
    ) {
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 2e-5)] {
            let passes = [true, false, true].map(|shares| {
                let leaves: Vec<Tensor<2>> =
                    inputs.iter().map(|(v, c)| tensor(v, *c, dtype).autodiff().require_grad()).collect();
                // inputs of rows, not weights
                let repeat = |t: &Tensor<2>| if t.dims()[0] == self.tokens { self.repeated(t) } else { t.clone() };
                let out = if shares {
                    self.repeated(&operation(&leaves, &self.shared))
                } else {
                    let whole: Vec<Tensor<2>> = leaves.iter().map(repeat).collect();
                    operation(&whole, &self.whole)
                };
                let [rows, columns] = out.dims();
                let upstream = tensor(&numbers(rows * columns, 77), columns, dtype).autodiff();
                let tape = (out.clone() * upstream).sum().backward();
                let gradients = leaves.iter().map(|leaf| values(leaf.grad(&tape).expect("a leaf")));
                [values(out.inner())].into_iter().chain(gradients).collect::<Vec<_>>()
            });
            let [shared, whole, again] = passes;
            assert_eq!(shared, again, "{what} in {dtype:?} repeats its bits");
            for (i, (actual, expected)) in shared.iter().zip(&whole).enumerate() {
                assert_near(&format!("{what} in {dtype:?}: values and gradients, {i}"), actual, expected, tolerance);
            }
        }
    }

    fn repeated(&self, rows: &Tensor<2>) -> Tensor<2> {
        rows.clone()
            .select(0, if rows.device().is_autodiff() { self.rows.clone().autodiff() } else { self.rows.clone() })
    }
}

#[test]
fn a_convolution_that_goes_on_behind_another_sequence_is_that_of_both() {
    for (tree, channels, taps) in TREES.into_iter().flat_map(|tree| [(tree, 3, 4), (tree, 1030, 3), (tree, 2, 1)]) {
        let repeated = Repeated::new(tree);
        let inputs = [(numbers(repeated.tokens * channels, 4), channels), (numbers(channels * taps, 5), taps)];
        let what = format!("convolution over {tree:?} with {taps} taps");
        repeated.hold(&what, &inputs, &|t, sequences| fused(|| causal_convolution(&t[0], &t[1], sequences)));
        repeated
            .hold(&format!("formula of {what}"), &inputs, &|t, sequences| convolution::whole(&t[0], &t[1], sequences));
    }
}

#[test]
fn a_delta_rule_that_goes_on_behind_another_sequence_is_that_of_both() {
    for (tree, heads) in TREES.into_iter().flat_map(|tree| HEADS.map(|heads| (tree, heads))) {
        let repeated = Repeated::new(tree);
        let inputs = rule_inputs(repeated.tokens, heads);
        let what = format!("delta rule over {tree:?}, {heads:?}");
        repeated
            .hold(&what, &inputs, &|t, sequences| fused(|| gated_delta_rule([&t[0], &t[1], &t[2]], heads, sequences)));
        repeated.hold(&format!("formula of {what}"), &inputs, &|t, sequences| {
            delta_rule::whole([&t[0], &t[1], &t[2]], heads, sequences)
        });
    }
}
