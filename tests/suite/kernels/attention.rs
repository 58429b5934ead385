//! Attention of packed sequences and its gradients.

use super::{assert_near, leaf, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device};
use firebrick_backends::kernels::{self, AttentionShape, PrefixGroups, PrefixRun, PrefixTree};

on_gpus!(
    attention_of_packed_sequences_and_its_gradients_are_their_formulas,
    sinks_join_the_softmax_of_every_row_and_have_gradients,
);

/// The rows of a run of a tree, and its parent.
type Run = (usize, Option<usize>);

/// Trees laid out one after the other, with a row between them that is in none.
fn laid_out(trees: &[Vec<Run>]) -> (Vec<PrefixTree>, usize) {
    let mut at = 0;
    let mut next = |n: usize| {
        at += n;
        at - n..at
    };
    let tree = |runs: &Vec<Run>| {
        let tree = PrefixTree::new(runs.iter().map(|&(n, parent)| PrefixRun { rows: next(n), parent }).collect());
        next(1);
        tree
    };
    let trees = trees.iter().map(tree).collect();
    (trees, at)
}

/// Trees of one level: the lengths of a prefix and of its members.
fn one_level(lengths: &[(usize, &[usize])]) -> Vec<Vec<Run>> {
    let tree = |&(prefix, members): &(usize, &[usize])| {
        std::iter::once((prefix, None)).chain(members.iter().map(|&n| (n, Some(0)))).collect()
    };
    lengths.iter().map(tree).collect()
}

/// A system prompt, prompts, and completions of which one goes on in two turns; beside it another tree.
fn three_levels() -> Vec<Vec<Run>> {
    let first = [
        (70, None),
        (30, Some(0)),
        (9, Some(1)),
        (65, Some(1)),
        (5, Some(3)),
        (1, Some(3)),
        (3, Some(0)),
        (40, Some(6)),
        (2, Some(6)),
    ];
    vec![first.to_vec(), vec![(4, None), (66, Some(0)), (7, Some(1)), (20, Some(1))]]
}

/// Heads, key heads, dimensions.
#[derive(Clone, Copy, Debug)]
struct Heads {
    query: usize,
    kv: usize,
    dim: usize,
}

struct Rows<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    gradient: &'a [f64],
    /// A number a head.
    sinks: Option<&'a [f64]>,
    heads: Heads,
}

/// Mixed values, and gradients of queries, keys, values and sinks.
struct Expected([Vec<f64>; 5]);

impl Expected {
    /// Adds one head of one query, which sees some rows of keys.
    fn add(&mut self, rows: &Rows<'_>, shape: &AttentionShape, row: usize, head: usize, keys: &[usize]) {
        let Heads { query, kv, dim } = rows.heads;
        let at = (row * query + head) * dim..(row * query + head + 1) * dim;
        let key = |row: usize| {
            let first = (row * kv + head / (query / kv)) * dim;
            first..first + dim
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (q, g) = (&rows.q[at.clone()], &rows.gradient[at.clone()]);
        let scored = keys.iter().map(|&row| {
            let s = dot(q, &rows.k[key(row)]) * shape.scale;
            shape.softcap.map_or((s, 1.0), |cap| {
                let t = (s / cap).tanh();
                (t * cap, 1.0 - t * t)
            })
        });
        let scored: Vec<(f64, f64)> = scored.collect();
        let sink = rows.sinks.map_or(0.0, |all| all[head].exp());
        let total = scored.iter().map(|(s, _)| s.exp()).sum::<f64>() + sink;
        let probs: Vec<f64> = scored.iter().map(|(s, _)| s.exp() / total).collect();
        let through: Vec<f64> = keys.iter().map(|&row| dot(g, &rows.v[key(row)])).collect();
        let mean = dot(&probs, &through);
        let [out, d_q, d_k, d_v, d_sinks] = &mut self.0;
        if rows.sinks.is_some() {
            d_sinks[head] -= sink / total * mean;
        }
        for (i, &row) in keys.iter().enumerate() {
            let d = probs[i] * (through[i] - mean) * scored[i].1 * shape.scale;
            for j in 0..dim {
                let (own, other) = (at.start + j, key(row).start + j);
                out[own] += probs[i] * rows.v[other];
                d_q[own] += d * rows.k[other];
                d_k[other] += d * q[j];
                d_v[other] += probs[i] * g[j];
            }
        }
    }
}

/// Rows of keys that a row of the last run of a path sees: those of the path up to itself.
fn seen(tree: &PrefixTree, path: &[usize], row: usize, window: Option<usize>) -> Vec<usize> {
    let rows = path.iter().flat_map(|&run| tree.runs()[run].rows.clone());
    let mut keys: Vec<usize> = rows.take_while(|&key| key != row).chain([row]).collect();
    let unseen = keys.len().saturating_sub(window.unwrap_or(usize::MAX));
    keys.split_off(unseen)
}

fn hold(
    runs: &[Vec<Run>],
    heads: Heads,
    (window, softcap): (Option<usize>, Option<f64>),
    precision: (DType, f64),
    device: &Device,
) {
    let numbers = (2.0, false);
    hold_sized(runs, heads, (window, softcap), precision, numbers, device);
}

/// Of queries and keys up to `size`, with or without sinks.
fn hold_sized(
    runs: &[Vec<Run>],
    heads: Heads,
    (window, softcap): (Option<usize>, Option<f64>),
    (dtype, tolerance): (DType, f64),
    (size, with_sinks): (f64, bool),
    device: &Device,
) {
    let (trees, rows) = laid_out(runs);
    let Heads { query, kv, dim } = heads;
    let wide = |n: usize, salt, size| {
        let raw = numbers(rows * n * dim, salt, size);
        stored(raw, [rows, n, dim], dtype, device)
    };
    let ((q, qs), (k, ks), (v, vs), (g, gs)) =
        (wide(query, 51, size), wide(kv, 52, size), wide(kv, 53, 2.0), wide(query, 54, 2.0));
    let sinks = with_sinks.then(|| stored(numbers(query, 55, 3.0), [1, query], dtype, device));
    let shape = AttentionShape {
        groups: PrefixGroups::new(trees.clone(), device),
        window,
        scale: 1.0 / (dim as f64).sqrt(),
        softcap,
    };
    let numbers =
        Rows { q: &qs, k: &ks, v: &vs, gradient: &gs, sinks: sinks.as_ref().map(|(_, own)| own.as_slice()), heads };
    let sizes = [qs.len(), qs.len(), ks.len(), vs.len(), query];
    let mut expected = Expected(sizes.map(|n| vec![0.0; n]));
    for tree in &trees {
        for (path, run) in tree.paths().iter().zip(tree.runs()) {
            for row in run.rows.clone() {
                let keys = seen(tree, path, row, window);
                for head in 0..query {
                    expected.add(&numbers, &shape, row, head, &keys);
                }
            }
        }
    }
    let what = format!("{runs:?}, {heads:?}, window {window:?}, cap {softcap:?} in {dtype:?}");
    let leaves = [&q, &k, &v].map(leaf);
    let sinks = sinks.as_ref().map(|(own, _)| leaf(own));
    let out = kernels::attention(leaves.each_ref(), sinks.as_ref(), &shape);
    assert_near(&what, &values(out.clone().inner()), &expected.0[0], tolerance);
    let mut grads = (out * g.autodiff()).sum().backward();
    for ((leaf, name), expected) in leaves.iter().zip(["dq", "dk", "dv"]).zip(&expected.0[1..]) {
        let found = values(leaf.grad_remove(&mut grads).expect("a leaf"));
        // of a query that sees itself alone the gradient is zero, but for rounding
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let apart = norm(&found.iter().zip(expected).map(|(a, b)| a - b).collect::<Vec<f64>>());
        let allowed = tolerance * norm(expected).max(1e-2 * norm(&gs));
        assert!(apart <= allowed, "{name} of {what}: {apart:e} apart, {allowed:e} allowed");
    }
    if let Some(sinks) = sinks {
        let found = values(sinks.grad_remove(&mut grads).expect("a leaf"));
        let what = format!("sinks of {what}");
        assert_near(&what, &found, &expected.0[4], tolerance);
    }
}

fn sinks_join_the_softmax_of_every_row_and_have_gradients(device: &Device) {
    let heads = |query, kv, dim| Heads { query, kv, dim };
    for precision in precisions(device) {
        for (heads, window, softcap) in
            [(heads(4, 2, 64), None, None), (heads(4, 2, 20), Some(33), None), (heads(3, 1, 64), Some(17), Some(1.5))]
        {
            for runs in [one_level(&[(37, &[5, 90, 1]), (0, &[20])]), three_levels()] {
                hold_sized(&runs, heads, (window, softcap), precision, (2.0, true), device);
            }
        }
    }
}

fn attention_of_packed_sequences_and_its_gradients_are_their_formulas(device: &Device) {
    let heads = |query, kv, dim| Heads { query, kv, dim };
    for precision in precisions(device) {
        // a block and more, a tile and less, one row; sequences that share a beginning
        hold(&one_level(&[(0, &[130]), (0, &[1]), (0, &[31, 70])]), heads(2, 1, 20), (None, None), precision, device);
        hold(
            &one_level(&[(37, &[5, 90, 1]), (0, &[20]), (100, &[3, 64])]),
            heads(4, 2, 20),
            (None, None),
            precision,
            device,
        );
        for window in [1, 17, 40, 100] {
            hold(
                &one_level(&[(80, &[30, 7, 70]), (3, &[90])]),
                heads(3, 3, 20),
                (Some(window), None),
                precision,
                device,
            );
        }
        hold(&one_level(&[(12, &[50, 40])]), heads(6, 2, 20), (Some(33), Some(1.5)), precision, device);
    }
    for precision in precisions(device) {
        for dim in [20, 64] {
            for (window, softcap) in [(None, None), (Some(1), None), (Some(40), Some(2.0)), (Some(100), None)] {
                hold(&three_levels(), heads(4, 2, dim), (window, softcap), precision, device);
            }
        }
    }
    // heads of which tensor cores make matrices, in half precision; those of 128 by other sizes
    for precision in precisions(device) {
        hold(
            &one_level(&[(37, &[5, 90, 1]), (0, &[20]), (100, &[3, 64])]),
            heads(4, 2, 64),
            (None, None),
            precision,
            device,
        );
        hold(&one_level(&[(12, &[50, 40]), (0, &[130])]), heads(6, 2, 16), (Some(33), Some(1.5)), precision, device);
        hold(&one_level(&[(80, &[30, 7, 70]), (0, &[1])]), heads(3, 1, 128), (Some(70), None), precision, device);
        hold(&one_level(&[(0, &[100])]), heads(1, 1, 80), (None, Some(2.0)), precision, device);
        // Gemma 2's, for which most shared memory is wanted
        hold(&one_level(&[(12, &[50, 40]), (0, &[33])]), heads(2, 1, 256), (Some(48), Some(2.0)), precision, device);
        // scores so far apart that sums are multiplied anew from tile to tile
        for dim in [32, 128] {
            hold_sized(
                &one_level(&[(40, &[200, 60])]),
                heads(2, 1, dim),
                (None, None),
                precision,
                (6.0, false),
                device,
            );
        }
    }
    // several blocks of 128 rows; groups of heads that are divided among blocks of keys
    if let Some(&precision) = precisions(device).iter().find(|(dtype, _)| *dtype == DType::BF16) {
        for (dim, window, softcap) in [(64, None, None), (96, Some(150), Some(2.0)), (128, Some(200), None)] {
            let trees = one_level(&[(0, &[300]), (130, &[5, 70])]);
            hold(&trees, heads(7, 1, dim), (window, softcap), precision, device);
        }
    }
    for dim in [6, 130] {
        hold(&one_level(&[(0, &[67, 33])]), heads(2, 1, dim), (None, None), (DType::F32, 1e-5), device);
    }
}
